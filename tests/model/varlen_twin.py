"""The arguments and results of `torch.nn.attention.varlen.varlen_attn`, which needs a GPU, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.attention import VarlenLayout


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    assert window_size == (-1, 0), "causal"
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32}
    (num_q, num_k), out = (starts.diff().tolist() for starts in (cu_seq_q, cu_seq_k)), []
    assert (max(num_q), max(num_k)) == (max_q, max_k)
    assert (sum(num_q), sum(num_k)) == (len(query), len(key))
    parts = (query.split(num_q), key.split(num_k), value.split(num_k))
    for q, k, v in zip(*parts, strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)[0])
    return torch.cat(out, dim=1).transpose(0, 1)


def older_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> Tensor:
    """That of older versions of torch, which share kv heads without being told to."""
    assert is_causal
    starts, maxima = (cu_seq_q, cu_seq_k), (max_q, max_k)
    return varlen_attn(query, key, value, *starts, *maxima, window_size=(-1, 0), enable_gqa=True)


@torch.library.custom_op("dora_tests::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], max_q: int, max_k: int) -> Tensor:
    layout = VarlenLayout(starts[0], starts[1], max_q, max_k)
    return varlen_attn(q, k, v, *layout, window_size=(-1, 0), enable_gqa=True).contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], max_q: int, max_k: int) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("dora_tests::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], max_q: int, max_k: int
) -> list[Tensor]:
    """The gradients of attention by hand: autograd does not work within an operator."""
    (num_q, num_k), num_shared = (x.diff().tolist() for x in starts), q.shape[1] // k.shape[1]
    parts, scale, found = (
        (grad.split(num_q), q.split(num_q), k.split(num_k), v.split(num_k)),
        q.shape[2] ** -0.5,
        [],
    )
    for g, queries, keys, values in zip(*parts, strict=True):
        wide_k, wide_v = (x.repeat_interleave(num_shared, 1) for x in (keys, values))
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        scores = torch.einsum("qhd,khd->hqk", queries, wide_k) * scale
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        dp = torch.einsum("qhd,khd->hqk", g, wide_v)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dk, dv = torch.einsum("hqk,qhd->khd", ds, queries), torch.einsum("hqk,qhd->khd", p, g)
        dk, dv = (x.unflatten(1, (-1, num_shared)).sum(2) for x in (dk, dv))
        found.append((torch.einsum("hqk,khd->qhd", ds, wide_k), dk, dv))
    return [torch.cat(x) for x in zip(*found, strict=True)]


@_attend_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], max_q: int, max_k: int
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, starts, *ctx.maxima = inputs
    ctx.save_for_backward(q, k, v, *starts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, *starts = ctx.saved_tensors
    grads = torch.ops.dora_tests.attend_backward(grad, q, k, v, starts, *ctx.maxima)
    return (*grads, [None, None], None, None)


_attend.register_autograd(_backward, setup_context=_save)


def traceable_attention(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
    """Attention as an operator, as that of GPUs is, so that torch.compile can trace through it."""
    starts = [layout.query_starts, layout.key_starts]
    out: Tensor = torch.ops.dora_tests.attend(q, k, v, starts, layout.max_queries, layout.max_keys)
    return out
