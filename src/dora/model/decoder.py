"""The forward pass of a decoder of any family, over packed tokens.

It keeps no state: weights come as named views, and attention is a callback, so that the
trainer can attend inside packed sequences and the engine can attend to its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig
from dora.model.rope import frequencies
from dora.model.routing import Recorder, Route, mix, shares

Weights = Mapping[str, Tensor]
Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Attend(Protocol):
    """Attention of one layer: q [N, heads, D], k and v [N, kv heads, D] -> [N, heads, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_positions, head_dim], fp32."""
    scaling = config.rope_scaling
    turned = frequencies(config.head_dim, config.rope_theta, scaling)
    angles = torch.outer(torch.arange(num_positions).float(), turned)
    angles = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if scaling is None else scaling.cos_sin_factor
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: x [N, heads, D], cos and sin [N, D] fp32; what is rounded is the result."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]).to(x.dtype)


def forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    route: Route | None = None,
    run: Run = lambda layer, x: layer(x),
) -> Tensor:
    """Final hidden states [N, hidden] of packed tokens [N] with their rope rows [N, D].

    `route` chooses the experts of a mixture's tokens; without it these are the likeliest. `run` computes
    each layer of its input [N, hidden]: it may do so twice, to keep less in between.
    """
    route, eps = route or Recorder(config), config.rms_norm_eps

    def layer(i: int, x: Tensor) -> Tensor:
        name = f"model.layers.{i}."
        h = _norm(weights, name + "input_layernorm", x, eps)
        q, k, v = _queries_keys_values(weights, config, name + "self_attn.", h)
        mixed = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2)
        x = x + _linear(weights, name + "self_attn.o_proj", mixed)
        h = _norm(weights, name + "post_attention_layernorm", x, eps)
        if i in config.mixture_layers:
            return x + _mixture(weights, config, i, h, route)
        return x + _mlp(weights, name + "mlp.", h)

    x = F.embedding(tokens, weights["model.embed_tokens.weight"]).to(weights["model.norm.weight"].dtype)
    for i in range(config.num_hidden_layers):
        x = run(partial(layer, i), x)
    return _norm(weights, "model.norm", x, eps)


def head(weights: Weights) -> Tensor:
    """[vocab, hidden]: what makes logits of hidden states; the embedding, where the two are tied."""
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))


def _norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], eps)


def _queries_keys_values(weights: Weights, config: ModelConfig, attn: str, h: Tensor) -> list[Tensor]:
    """Each [N, heads, D], not rotated."""
    q, k, v = (_linear(weights, f"{attn}{x}_proj", h).unflatten(-1, (-1, config.head_dim)) for x in "qkv")
    if config.has_qk_norm:
        q = _norm(weights, attn + "q_norm", q, config.rms_norm_eps)
        k = _norm(weights, attn + "k_norm", k, config.rms_norm_eps)
    return [q, k, v]


def _mlp(weights: Weights, mlp: str, h: Tensor) -> Tensor:
    gate = F.silu(_linear(weights, mlp + "gate_proj", h))
    return _linear(weights, mlp + "down_proj", gate * _linear(weights, mlp + "up_proj", h))


def _mixture(weights: Weights, config: ModelConfig, layer: int, h: Tensor, route: Route) -> Tensor:
    mlp = f"model.layers.{layer}.mlp."
    probs = _linear(weights, mlp + "gate", h).float().softmax(-1)
    ids = route(layer, probs)
    weights_of = shares(config, probs, ids).to(h.dtype)
    return mix(h, ids, weights_of, lambda i, part: _mlp(weights, f"{mlp}experts.{i}.", part))
