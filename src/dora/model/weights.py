"""All parameters of a decoder in one flat buffer.

A version of the policy is one contiguous tensor: publishing and loading are one copy, and its digest is that
of the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig, TransformersConfig
from dora.model.digest import (
    KEYS,
    LEAF_BYTES,
    LEAF_WORDS,
    Sums,
    bytes_digest,
    combine,
    digest_pieces,
    leaf_sums,
    num_threads,
)

_UPLOAD_NUMEL = 2**22
_DEVICE_CHUNK_BYTES = 2**26  # whose products take twice that

_LAYER = re.compile(r".+?\.\d+(?=\.)")
Shapes = dict[str, tuple[int, ...]]


def layer_of(name: str) -> str:
    """The layer of a tensor, as model.layers.0; empty outside the layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Hugging Face name -> shape, in the order of the flat buffer.

    Matrices with the same input are adjacent, and so are their biases.
    """
    if isinstance(config, TransformersConfig):
        return dict(config.shapes)
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

    def __init__(self, source: ModelConfig | Shapes) -> None:
        """`source` is the config of a model, or the shapes in the order of the buffer."""
        self.shapes = parameter_shapes(source) if isinstance(source, ModelConfig) else source
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
                    f"checkpoint tensor {name} has shape {shapes[name]}, config.json requires {shape}; copy "
                    "or save the model again"
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
    """Digest (32 hex digits) of the bytes of a flat buffer [numel], contiguous, on any device."""
    if flat.device.type != "cpu":
        return combine([device_leaf_sums(flat)], flat.nbytes)
    return bytes_digest(as_bytes(flat))


def copy_with_digest(target: Tensor, source: Tensor) -> str:
    """Copy `source` to `target` ([numel] both); returns the digest of the bytes in `target`.

    On the CPU, threads copy and digest pieces that are still in a cache.
    """
    if target.is_cuda and source.device.type == "cpu" and not source.is_pinned():
        return weight_digest(_upload(target, source))
    if target.device.type != "cpu" or source.device.type != "cpu":
        return weight_digest(target.copy_(source))
    size = target.element_size()

    def copy(begin: int, end: int) -> Sums:
        piece = slice(begin // size, end // size)
        return leaf_sums(as_bytes(target[piece].copy_(source[piece])))

    return digest_pieces(target.nbytes, copy)


def _upload(target: Tensor, source: Tensor) -> Tensor:
    """Copy to a GPU in several threads, through pinned memory, which torch reuses."""
    parts = (flat.split(_UPLOAD_NUMEL) for flat in (target, source))
    with ThreadPoolExecutor(num_threads()) as threads:
        list(threads.map(lambda to, part: to.copy_(part.pin_memory()), *parts))
    return target


def as_bytes(flat: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor on the CPU; no copy."""
    content: NDArray[np.uint8] = flat.detach().view(torch.uint8).numpy()
    return content


def device_leaf_sums(flat: Tensor) -> Sums:
    """`leaf_sums` of a flat buffer's bytes by integer operations of torch, on the buffer's device."""
    content, keys = flat.detach().view(torch.uint8), torch.from_numpy(KEYS).to(flat.device)
    num_whole = content.numel() // LEAF_BYTES * LEAF_BYTES
    rest = torch.zeros(LEAF_BYTES, dtype=torch.uint8, device=flat.device)
    rest[: content.numel() - num_whole] = content[num_whole:]
    parts = [
        *content[:num_whole].split(_DEVICE_CHUNK_BYTES),
        *([rest] if num_whole < content.numel() else []),
    ]
    sums = [_leaf_sums(part.view(torch.int32).view(-1, LEAF_WORDS), keys) for part in parts if part.numel()]
    return torch.cat(sums).cpu().numpy() if sums else np.empty((0, 2), np.int64)


def _leaf_sums(words: Tensor, keys: Tensor) -> Tensor:
    """[leaves, LEAF_WORDS], int32 -> [leaves, 2], int64; sums wrap around."""
    return torch.stack([(words * key).sum(1) for key in keys], 1)
