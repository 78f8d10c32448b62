"""All parameters of a decoder in one flat buffer.

A version of the policy is one contiguous tensor: publishing is one copy, loading is one
copy, and its digest is the digest of those bytes. `Layout` says where each Hugging Face
parameter name lies in it; the views share the buffer's memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape, in the order in which the flat buffer holds them."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.q_norm.weight": (dim,),
            f"{layer}.self_attn.k_norm.weight": (dim,),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class Layout:
    """Where every parameter lies in the flat buffer of `numel` elements.

    q, k and v of a layer are neighbours, and so are gate and up, so that `span` can hand out
    their fused matrix as one view.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = parameter_shapes(config)
        self.offsets: dict[str, int] = {}
        self.numel = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.numel
            self.numel += math.prod(shape)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` ([numel]); no copy."""
        return {name: self.span(flat, name) for name in self.shapes}

    def span(self, flat: Tensor, first: str, last: str | None = None) -> Tensor:
        """One view over the neighbours first..last, stacked along their first dimension."""
        last = last or first
        start = self.offsets[first]
        stop = self.offsets[last] + math.prod(self.shapes[last])
        return flat[start:stop].view(-1, *self.shapes[first][1:])

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelError naming what is missing, extra or of another shape."""
        missing, extra = (
            sorted(self.shapes.keys() - shapes.keys()),
            sorted(shapes.keys() - self.shapes.keys()),
        )
        if missing or extra:
            raise ModelError(
                f"checkpoint does not fit config.json: missing {missing[:3] or 'none'} ({len(missing)}), "
                f"extra {extra[:3] or 'none'} ({len(extra)}); check tie_word_embeddings and model_type"
            )
        for name, shape in self.shapes.items():
            if shapes[name] != shape:
                raise ModelError(
                    f"checkpoint tensor {name} has shape {shapes[name]}, config.json asks for {shape}"
                )

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new flat fp32 buffer from named tensors. Raises ModelError naming what does not fit."""
        self.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        flat = torch.empty(self.numel, dtype=torch.float32)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat


def initial_weights(config: ModelConfig, seed: int, std: float = 0.02) -> Tensor:
    """A flat buffer drawn as Hugging Face draws Qwen3: normal(0, std), norms at one."""
    layout = Layout(config)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(layout.numel)
    for name, view in layout.views(flat).items():
        if "norm" in name:
            view.fill_(1.0)
        else:
            view.normal_(0.0, std, generator=generator)
    return flat


def weight_digest(flat: Tensor) -> str:
    """Digest (32 hex digits) of the bytes of a flat weight buffer ([numel], contiguous, on CPU)."""
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
