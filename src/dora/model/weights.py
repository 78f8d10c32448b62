"""All parameters of a decoder in one flat buffer.

A version of the policy is one contiguous tensor: publishing and loading are one copy, and its digest is that
of the bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig

_CHUNK_BYTES = 2**26

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Hugging Face name -> shape, in the order of the flat buffer.

    Matrices with the same input are adjacent, and so are their biases.
    """
    hidden, head = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": head}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes |= _attention(config, layer + "self_attn.")
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if i in config.moe_layers:
            shapes |= _moe(config, layer + "mlp.")
        else:
            bias, inner = config.mlp_bias, config.intermediate_size
            shapes |= _linears(layer + "mlp.", {"gate_proj": inner, "up_proj": inner}, hidden, bias)
            shapes |= _linears(layer + "mlp.", {"down_proj": hidden}, inner, bias)
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": head}


def _linears(prefix: str, rows: Mapping[str, int], columns: int, bias: bool) -> Shapes:
    """Matrices with the same input, then their biases."""
    shapes: Shapes = {f"{prefix}{name}.weight": (num, columns) for name, num in rows.items()}
    return shapes | ({f"{prefix}{name}.bias": (num,) for name, num in rows.items()} if bias else {})


def _attention(config: ModelConfig, attn: str) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes = _linears(attn, inputs, hidden, config.has_qkv_bias)
    if config.has_qk_norm:
        shapes |= {attn + "q_norm.weight": (dim,), attn + "k_norm.weight": (dim,)}
    return shapes | _linears(attn, {"o_proj": hidden}, queries, config.attention_bias)


def _moe(config: ModelConfig, mlp: str) -> Shapes:
    """The router; gate and up of all experts [experts * 2 * inner, hidden]; then down of all experts."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    experts = [f"{mlp}experts.{i}." for i in range(config.num_experts)]
    shapes = _linears(mlp, {"gate": config.num_experts}, hidden, bias=False)
    shapes |= {f"{expert}{x}_proj.weight": (inner, hidden) for expert in experts for x in ("gate", "up")}
    return shapes | {f"{expert}down_proj.weight": (hidden, inner) for expert in experts}


class WeightLayout:
    """Shapes and offsets of all parameters in the flat buffer of `numel` elements.

    q, k and v of a layer are adjacent, and so are gate and up (of all experts in a MoE layer), so `span`
    returns their fused matrix as a view.
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
        """A view of the adjacent parameters first..last, stacked along their first dimension."""
        last = last or first
        start = self.offsets[first]
        stop = self.offsets[last] + math.prod(self.shapes[last])
        return flat[start:stop].view(-1, *self.shapes[first][1:])

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for missing, extra or misshapen tensors of a checkpoint."""
        missing = sorted(self.shapes.keys() - shapes.keys())
        extra = sorted(shapes.keys() - self.shapes.keys())
        if missing or extra:
            raise ModelError(
                f"the checkpoint does not fit config.json: missing {missing[:3] or 'none'} ({len(missing)}), "
                f"extra {extra[:3] or 'none'} ({len(extra)}); check tie_word_embeddings and model_type"
            )
        for name, shape in self.shapes.items():
            if shapes[name] != shape:
                raise ModelError(
                    f"checkpoint tensor {name} has shape {shapes[name]}, config.json requires {shape}"
                )


def initial_weights(config: ModelConfig, seed: int, std: float = 0.02) -> Tensor:
    """Random weights [numel] as Hugging Face initialises them: normal(0, std), norms 1, biases 0."""
    layout = WeightLayout(config)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(layout.numel)
    for name, view in layout.views(flat).items():
        if name.endswith(("norm.weight", ".bias")):
            view.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            view.normal_(0.0, std, generator=generator)
    return flat


def weight_digest(flat: Tensor) -> str:
    """Digest (32 hex digits) of the bytes of a flat buffer [numel], contiguous, on any device.

    For a large buffer, the digest of the digests of its chunks, which are computed in parallel.
    """
    if flat.nbytes <= _CHUNK_BYTES:
        return _digest(flat).hex()
    with ThreadPoolExecutor() as threads:
        digests = b"".join(threads.map(_digest, flat.split(_CHUNK_BYTES // flat.element_size())))
    return hashlib.blake2b(digests, digest_size=16).hexdigest()


def _digest(flat: Tensor) -> bytes:
    return hashlib.blake2b(flat.cpu().view(torch.uint8).numpy().data, digest_size=16).digest()
