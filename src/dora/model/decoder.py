"""The forward pass of a Qwen3 decoder, over packed tokens.

It keeps no state: weights come as named views, and attention is a callback, so that the
trainer can attend inside a padded batch and the engine can attend to its KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig


class Attend(Protocol):
    """Attention of one layer: q [N, heads, D], k and v [N, kv heads, D] -> [N, heads, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_positions, head_dim], fp32 (RoPE, arXiv 2104.09864)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), 1.0 / config.rope_theta**half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: x [N, heads, D], cos and sin [N, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


def forward(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    tokens: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
) -> Tensor:
    """Final hidden states [N, hidden] of packed tokens [N] with their rope rows [N, D]."""
    eps, dim = config.rms_norm_eps, config.head_dim
    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        attn = layer + "self_attn."
        h = F.rms_norm(x, (x.shape[-1],), weights[layer + "input_layernorm.weight"], eps)
        q = F.linear(h, weights[attn + "q_proj.weight"]).unflatten(-1, (-1, dim))
        k = F.linear(h, weights[attn + "k_proj.weight"]).unflatten(-1, (-1, dim))
        v = F.linear(h, weights[attn + "v_proj.weight"]).unflatten(-1, (-1, dim))
        q = rotate(F.rms_norm(q, (dim,), weights[attn + "q_norm.weight"], eps), cos, sin)
        k = rotate(F.rms_norm(k, (dim,), weights[attn + "k_norm.weight"], eps), cos, sin)
        x = x + F.linear(attend(i, q, k, v).flatten(-2), weights[attn + "o_proj.weight"])
        h = F.rms_norm(x, (x.shape[-1],), weights[layer + "post_attention_layernorm.weight"], eps)
        gate = F.silu(F.linear(h, weights[layer + "mlp.gate_proj.weight"]))
        up = F.linear(h, weights[layer + "mlp.up_proj.weight"])
        x = x + F.linear(gate * up, weights[layer + "mlp.down_proj.weight"])
    return F.rms_norm(x, (x.shape[-1],), weights["model.norm.weight"], eps)


def logits(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Vocabulary logits [N, vocab]; the head is the embedding where the two are tied."""
    head = weights.get("lm_head.weight")
    return F.linear(hidden, weights["model.embed_tokens.weight"] if head is None else head)


def causal_attend(batch: int, length: int) -> Attend:
    """Attention inside right-padded sequences: packed tokens are [batch * length].

    With padding on the right, causality alone keeps real tokens from seeing padding.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    return attend
