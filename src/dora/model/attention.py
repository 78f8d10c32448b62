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
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

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


class SharedKeys(NamedTuple):
    """Which of M inputs are the K keys of all sequences, if sequences share inputs.

    Key i is that of input `indices`[i]. `order` [K] lists the keys by their input, and those of input j begin
    at `starts`[j], [M].
    """

    indices: Tensor
    order: Tensor
    starts: Tensor


def shared_keys(indices: NDArray[np.int64], num_inputs: int, device: torch.device) -> SharedKeys:
    """The keys at `indices` [K], which name each of the inputs at least once."""
    order = np.argsort(indices, kind="stable")
    starts = np.searchsorted(indices[order], np.arange(num_inputs))
    return SharedKeys(*(to_device(torch.from_numpy(x), device) for x in (indices, order, starts)))


def take_keys(x: Tensor, keys: SharedKeys) -> Tensor:
    """x[indices], [K, ...], of x [M, ...]. The gradient of an input is the sum of its keys', in order."""
    rows: Tensor = _TakeKeys.apply(x.flatten(1), *keys)  # type: ignore[no-untyped-call]
    return rows.view(-1, *x.shape[1:])


class _TakeKeys(Function):
    """Autograd would sort the indices again for each layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        keys: Tensor = x.index_select(0, indices)
        return keys

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, starts = ctx.saved_tensors
        sums: Tensor = F.embedding_bag(order, grad, starts, mode="sum")
        return sums, None, None, None


VarlenAttention = Callable[[Tensor, Tensor, Tensor, VarlenLayout], Tensor]


def varlen_layout(num_queries: Sequence[int], num_keys: Sequence[int], device: torch.device) -> VarlenLayout:
    """The layout of sequences with so many queries and keys each."""

    def starts(lengths: Sequence[int]) -> Tensor:
        return to_device(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), device)

    return VarlenLayout(starts(num_queries), starts(num_keys), max(num_queries), max(num_keys))


def varlen_attention(query: Tensor) -> VarlenAttention | None:
    """torch's kernel for queries [T, heads, D] of this device and dtype; None if it has none.

    It takes queries, keys and values [K, kv heads, D] and their layout, and returns [T, heads, D].
    """
    dim = query.shape[-1]
    return _kernel() if query.is_cuda and query.dtype in _HALF and dim % 8 == 0 and dim <= _MAX_DIM else None


def disable_cudnn_attention() -> None:
    """Keep torch's attention of this process from cuDNN, which plans each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@cache
def _kernel() -> VarlenAttention:
    """Imported on GPUs only, which takes a second."""
    from torch.nn.attention.varlen import varlen_attn

    return torch_varlen(varlen_attn)


def torch_varlen(varlen_attn: Callable[..., object]) -> VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`, whose arguments differ between versions of torch."""
    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
        is_grouped = q.shape[1] != k.shape[1]  # older versions do not ask whether it is
        grouped = {"enable_gqa": True} if is_grouped and "enable_gqa" in known else {}
        out = varlen_attn(q, k, v, *layout, **causal, **grouped)
        assert isinstance(out, Tensor)
        return out

    return attend
