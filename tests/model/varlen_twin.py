"""The arguments and results of `torch.nn.attention.varlen.varlen_attn`, which needs a GPU, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
