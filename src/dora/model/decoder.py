"""The forward pass of the decoder over packed tokens, for all families.

It keeps no state: weights are named views, and attention is a callback. The trainer attends within packed
sequences, the engine to its KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig, RopeScaling
from dora.model.device import uncompiled
from dora.model.moe import RecordingRouter, Router, expert_weights, mix_experts

Weights = Mapping[str, Tensor]
LayerRunner = Callable[..., Any]  # of a layer's number, the layer, and its arguments
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


# The weights of a layer; a model lacks some of them.
_ATTENTION = (
    "input_layernorm.weight",
    *(f"self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias")),
    *(f"self_attn.{x}_norm.weight" for x in "qk"),
    "post_attention_layernorm.weight",
)
_MLP = tuple(f"mlp.{x}_proj.{kind}" for x in ("gate", "up", "down") for kind in ("weight", "bias"))


class AttentionFn(Protocol):
    """Attention of one layer: q [N, heads, D], k and v [N, kv heads, D] -> [N, heads, D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor: ...


def run_layer_once(number: int, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The plain `LayerRunner`."""
    return layer(*args, **kwargs)


def forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: Callable[[int], AttentionFn],
    router: Router | None = None,
    run_layer: LayerRunner = run_layer_once,
    fuse: Compiler = uncompiled,
) -> Tensor:
    """Final hidden states [N, hidden] of packed tokens [N] with the RoPE rows [N, D] of their positions.

    `attention(i)` is the attention of layer i. `router` chooses the experts of MoE layers, by default the
    top k. `run_layer` calls each layer on its input [N, hidden]; with activation checkpointing it does so
    twice. `fuse` compiles a layer without its experts; then the `attention(i)` must be one function, and
    traceable.
    """
    router = router or RecordingRouter(config)

    def layer(i: int, x: Tensor) -> Tensor:
        own, attend = partial(_named, weights, f"model.layers.{i}."), attention(i)
        if i in config.moe_layers:
            x, h = fuse(_add_attention)(own(_ATTENTION), config, x, cos, sin, attend)
            return x + _moe(weights, config, i, h, router)
        out: Tensor = fuse(_dense_layer)(own(_ATTENTION + _MLP), config, x, cos, sin, attend)
        return out

    x = F.embedding(tokens, weights["model.embed_tokens.weight"]).to(weights["model.norm.weight"].dtype)
    for i in range(config.num_hidden_layers):
        x = run_layer(i, partial(layer, i), x)
    return _norm(weights, "model.norm", x, config.rms_norm_eps)


def lm_head(weights: Weights) -> Tensor:
    """The output projection [vocab, hidden]: the embedding, if the two are tied."""
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_positions, head_dim], fp32."""
    scaling = config.rope_scaling
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, scaling)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if scaling is None else scaling.cos_sin_factor
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, heads, D] by cos and sin [N, D] fp32; only the result is rounded to x's dtype."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]).to(x.dtype)


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair of dimensions [dim / 2] (RoPE: arXiv 2104.09864).

    Scaling interpolates between the original frequency and that divided by `factor`.
    """
    original = 1.0 / _periods(dim, theta)
    if scaling is None:
        return original
    ratio = _original_ratio(scaling, dim, theta)
    return ratio * original + (1 - ratio) * original / scaling.factor


def _periods(dim: int, theta: float) -> Tensor:
    """Positions per radian of each pair of dimensions [dim / 2], unscaled."""
    return theta ** (torch.arange(0, dim, 2).float() / dim)


def _original_ratio(scaling: RopeScaling, dim: int, theta: float) -> Tensor:
    """The weight of the original frequency of each pair of dimensions [dim / 2], 0 to 1."""
    if scaling.rope_type == "linear":
        return torch.zeros(dim // 2)
    positions = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        rotations = positions / (2 * math.pi * _periods(dim, theta))
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return ((rotations - low) / (high - low)).clamp(0, 1)

    def pair(rotations: float) -> float:
        """The pair, as a fraction, that rotates so often in the original context (YaRN, arXiv 2309.00071)."""
        return dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return 1 - ((torch.arange(dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))


def _norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], eps)


def _named(weights: Weights, prefix: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of the weights `names` that the model has, without their `prefix`."""
    own = ((name, weights.get(prefix + name)) for name in names)
    return {name: weight for name, weight in own if weight is not None}


def _dense_layer(
    own: Weights, config: ModelConfig, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn
) -> Tensor:
    """The residual stream [N, hidden] after a layer."""
    x, h = _add_attention(own, config, x, cos, sin, attend)
    return x + _mlp(own, "mlp.", h)


def _add_attention(
    own: Weights, config: ModelConfig, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn
) -> tuple[Tensor, Tensor]:
    """The residual stream after attention, and the input of the MLP, each [N, hidden]."""
    eps = config.rms_norm_eps
    h = _norm(own, "input_layernorm", x, eps)
    q, k, v = (_linear(own, f"self_attn.{x}_proj", h).unflatten(-1, (-1, config.head_dim)) for x in "qkv")
    if config.has_qk_norm:
        q, k = _norm(own, "self_attn.q_norm", q, eps), _norm(own, "self_attn.k_norm", k, eps)
    attended = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v).flatten(-2)
    x = x + _linear(own, "self_attn.o_proj", attended)
    return x, _norm(own, "post_attention_layernorm", x, eps)


def _mlp(weights: Weights, mlp: str, h: Tensor) -> Tensor:
    gate, up = (_linear(weights, f"{mlp}{x}_proj", h) for x in ("gate", "up"))
    return _linear(weights, mlp + "down_proj", F.silu(gate) * up)


def _moe(weights: Weights, config: ModelConfig, layer: int, h: Tensor, router: Router) -> Tensor:
    mlp = f"model.layers.{layer}.mlp."
    probs = _linear(weights, mlp + "gate", h).float().softmax(-1)
    ids = router(layer, probs)
    weights_of_ids = expert_weights(config, probs, ids).to(h.dtype)
    # Not compiled: the numbers of tokens of experts differ so much that it would be done again and again.
    return mix_experts(h, ids, weights_of_ids, lambda i, part: _mlp(weights, f"{mlp}experts.{i}.", part))
