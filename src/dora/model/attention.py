"""Causal attention of many sequences in one call, whatever their lengths, on GPUs.

A kernel for variable lengths takes all sequences of a packed batch at once. torch's
`scaled_dot_product_attention` must be called for each shape instead, and its first choice on recent GPUs,
cuDNN, needs tens of milliseconds of host time for each shape that it meets first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dora.model.device import to_device

_HALF = (torch.float16, torch.bfloat16)
_MAX_DIM = 256


class VarlenLayout(NamedTuple):
    """Where the sequences of a packed batch begin.

    The starts are int32 [sequences + 1] offsets into the queries and keys of all sequences. The queries of
    a sequence are its last tokens: query i of n attends to all keys but the last n - 1 - i.
    """

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


VarlenAttention = Callable[[Tensor, Tensor, Tensor, VarlenLayout], Tensor]


def varlen_layout(num_queries: Sequence[int], num_keys: Sequence[int], device: torch.device) -> VarlenLayout:
    """The layout of sequences with so many queries and keys each."""

    def starts(lengths: Sequence[int]) -> Tensor:
        return to_device(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), device)

    return VarlenLayout(starts(num_queries), starts(num_keys), max(num_queries), max(num_keys))


def varlen_attention(query: Tensor) -> VarlenAttention | None:
    """The kernel for queries [T, heads, D] of this device and dtype: torch's or flash-attn's; else None.

    It takes queries, keys and values [K, kv heads, D] and their layout, and returns [T, heads, D].
    """
    dim = query.shape[-1]
    return _kernel() if query.is_cuda and query.dtype in _HALF and dim % 8 == 0 and dim <= _MAX_DIM else None


def disable_cudnn_attention() -> None:
    """Keep torch's attention of this process from cuDNN, which plans each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@cache
def _kernel() -> VarlenAttention | None:
    """Imported on GPUs only, which takes a second."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        pass
    else:
        return torch_varlen(varlen_attn)
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, *layout, causal=True)
        return out

    return attend


def torch_varlen(varlen_attn: Callable[..., object]) -> VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`, whose arguments differ between versions of torch."""
    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
        num_shared, arguments = q.shape[1] // k.shape[1], dict[str, object](causal)
        if num_shared > 1 and "enable_gqa" in known:
            arguments["enable_gqa"] = True
        elif num_shared > 1:
            k, v = k.repeat_interleave(num_shared, 1), v.repeat_interleave(num_shared, 1)
        out = varlen_attn(q, k, v, *layout, **arguments)
        assert isinstance(out, Tensor)
        return out

    return attend
