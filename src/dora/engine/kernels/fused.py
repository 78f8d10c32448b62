"""The decode kernels compiled by numba: one pass over memory each, attention over real positions only.

Everything is fp32 and single-threaded. Compiled code is cached beside this file, so only the
first process of an installation waits for the compiler (seconds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.workspace import Batch, Workspace

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2E = np.float32(math.log2(math.e))
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)  # exp stays a normal fp32 number
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
# 2 ** f for |f| <= 1/2 by its Taylor series: relative error 2e-7
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
_UNROLL = 4  # positions at a time; a divisor of BLOCK_SIZE, so that they lie in one block

Array = NDArray[Any]
Scalar = np.floating[Any]  # fp32
_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(signature: str) -> Callable[[_Function], _Function]:
    """Compile at import for one signature, or load what an earlier process compiled."""
    decorator = njit(f"void({signature})", fastmath=True, error_model="numpy", nogil=True, cache=True)
    return cast(Callable[[_Function], _Function], decorator)


@njit(inline="always")
def _exp(x: Any) -> Any:
    """exp in fp32, written so that the compiler can vectorise the loop around it."""
    power = min(max(x, _LOWEST), _HIGHEST) * _LOG2E
    whole = np.float32(math.floor(power + _HALF))
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return fraction * np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)


@_compiled("float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], int64[::1], int64, float32")
def _add_norm(
    x: Array, delta: Array, hidden: Array, weights: Array, slots: Array, offset: int, eps: Scalar
) -> None:
    width = x.shape[1]
    for i in range(slots.shape[0]):
        scales = weights[slots[i], offset : offset + width]
        total = _ZERO
        for j in range(width):
            x[i, j] += delta[i, j]
            total += x[i, j] * x[i, j]
        factor = _ONE / np.float32(math.sqrt(total / np.float32(width) + eps))
        for j in range(width):
            hidden[i, j] = x[i, j] * factor * scales[j]


@_compiled("float32[:, ::1], float32[:, ::1], int64")
def _swiglu(gate_up: Array, gated: Array, num_rows: int) -> None:
    width = gated.shape[1]
    for i in range(num_rows):
        gate, up = gate_up[i, :width], gate_up[i, width:]
        for j in range(width):
            gated[i, j] = gate[j] / (_ONE + _exp(-gate[j])) * up[j]


@_compiled("float32[::1], float32[::1], float32[::1], float32[::1], float32, float32, float32[::1]")
def _norm_rotate(
    source: Array, scales: Array, cos: Array, sin: Array, eps: Scalar, factor: Scalar, target: Array
) -> None:
    """target = factor * RoPE(RMS norm of source), all [dim]."""
    dim, half = source.shape[0], source.shape[0] // 2
    total = _ZERO
    for j in range(dim):
        total += source[j] * source[j]
    factor = factor / np.float32(math.sqrt(total / np.float32(dim) + eps))
    for j in range(half):
        left, right = factor * source[j] * scales[j], factor * source[half + j] * scales[half + j]
        target[j] = left * cos[j] - right * sin[j]
        target[half + j] = right * cos[j] + left * sin[j]


@_compiled("float32[::1], float32[::1], float32[::1], float32, float32[::1]")
def _rotate(source: Array, cos: Array, sin: Array, factor: Scalar, target: Array) -> None:
    """target = factor * RoPE(source), all [dim]."""
    half = source.shape[0] // 2
    for j in range(half):
        left, right = factor * source[j], factor * source[half + j]
        target[j] = left * cos[j] - right * sin[j]
        target[half + j] = right * cos[j] + left * sin[j]


@_compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def _score(q: Array, kv: Array, layer: int, table: Array, length: int, scores: Array) -> None:
    """scores [heads, T] = q [heads, dim] times the keys, for `length` positions rounded up to _UNROLL."""
    num_heads, dim = q.shape
    group = num_heads // kv.shape[4]
    for t in range(0, length, _UNROLL):
        block, at = table[t // BLOCK_SIZE], t % BLOCK_SIZE
        for h in range(num_heads):
            shared = h // group
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for d in range(dim):
                s0 += q[h, d] * kv[block, layer, 0, at, shared, d]
                s1 += q[h, d] * kv[block, layer, 0, at + 1, shared, d]
                s2 += q[h, d] * kv[block, layer, 0, at + 2, shared, d]
                s3 += q[h, d] * kv[block, layer, 0, at + 3, shared, d]
            scores[h, t], scores[h, t + 1], scores[h, t + 2], scores[h, t + 3] = s0, s1, s2, s3


@_compiled("float32[:, ::1], int64")
def _softmax(scores: Array, length: int) -> None:
    """Softmax of each row's first `length` entries; those that rounding up added become 0."""
    for h in range(scores.shape[0]):
        row = scores[h]
        highest, total = row[0], _ZERO
        for t in range(length):
            highest = max(highest, row[t])
        for t in range(length):
            row[t] = _exp(row[t] - highest)
            total += row[t]
        for t in range(length):
            row[t] /= total
        row[length : length + _UNROLL - 1] = _ZERO


@_compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def _mix(scores: Array, kv: Array, layer: int, table: Array, length: int, out: Array) -> None:
    """out [heads, dim] = scores [heads, T] times the values, for `length` positions rounded up."""
    num_heads, dim = out.shape
    group = num_heads // kv.shape[4]
    out[:] = _ZERO
    for t in range(0, length, _UNROLL):
        block, at = table[t // BLOCK_SIZE], t % BLOCK_SIZE
        for h in range(num_heads):
            shared = h // group
            p0, p1, p2, p3 = scores[h, t], scores[h, t + 1], scores[h, t + 2], scores[h, t + 3]
            for d in range(dim):
                out[h, d] += (
                    p0 * kv[block, layer, 1, at, shared, d]
                    + p1 * kv[block, layer, 1, at + 1, shared, d]
                    + p2 * kv[block, layer, 1, at + 2, shared, d]
                    + p3 * kv[block, layer, 1, at + 3, shared, d]
                )


@_compiled(
    "float32[:, :, ::1], float32[:, ::1], int64[::1], int64, int64, float32,"
    "float32[:, ::1], float32[:, ::1], float32[:, :, :, :, :, ::1], int64,"
    "int64[:, ::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], float32[:, :, ::1]"
)
def _attend(
    qkv: Array, weights: Array, slots: Array, q_norm: int, k_norm: int, eps: Scalar, cos: Array, sin: Array,
    kv: Array, layer: int, tables: Array, rows: Array, positions: Array,
    q: Array, scores: Array, attended: Array,
) -> None:  # fmt: skip
    """qkv [N, heads + 2 kv heads, dim] -> attended [N, heads, dim]; q and scores are scratch.

    q_norm and k_norm are offsets of norm weights, negative where there is no norm.
    """
    num_heads, dim = q.shape
    first_value = num_heads + kv.shape[4]
    scale = _ONE / np.float32(math.sqrt(dim))
    for i in range(rows.shape[0]):
        own, at, table = weights[slots[i]], positions[i], tables[rows[i]]
        q_scales, k_scales = own[q_norm : q_norm + dim], own[k_norm : k_norm + dim]
        block, place = table[at // BLOCK_SIZE], at % BLOCK_SIZE
        if q_norm < 0:
            for h in range(num_heads):
                _rotate(qkv[i, h], cos[at], sin[at], scale, q[h])
            for h in range(num_heads, first_value):
                _rotate(qkv[i, h], cos[at], sin[at], _ONE, kv[block, layer, 0, place, h - num_heads])
        else:
            for h in range(num_heads):
                _norm_rotate(qkv[i, h], q_scales, cos[at], sin[at], eps, scale, q[h])
            for h in range(num_heads, first_value):
                key = kv[block, layer, 0, place, h - num_heads]
                _norm_rotate(qkv[i, h], k_scales, cos[at], sin[at], eps, _ONE, key)
        kv[block, layer, 1, place] = qkv[i, first_value:]
        _score(q, kv, layer, table, at + 1, scores)
        _softmax(scores, at + 1)
        _mix(scores, kv, layer, table, at + 1, attended[i])


class FusedKernels:
    """See `Kernels`."""

    name = "numba"

    def __init__(self, workspace: Workspace) -> None:
        config, self._offsets = workspace.config, workspace.layout.offsets
        self._eps = np.float32(config.rms_norm_eps)
        self._weights, self._kv, self._tables = (
            tensor.numpy() for tensor in (workspace.weights, workspace.kv, workspace.tables)
        )
        self._cos, self._sin = workspace.cos.numpy(), workspace.sin.numpy()
        self._x, self._delta, self._hidden = (
            tensor.numpy() for tensor in (workspace.x, workspace.delta, workspace.hidden)
        )
        self._gate_up, self._gated = workspace.gate_up.numpy(), workspace.gated.numpy()
        num_heads, dim = config.num_attention_heads, config.head_dim
        self._qkv, self._attended = (
            tensor.unflatten(-1, (-1, dim)).numpy() for tensor in (workspace.qkv, workspace.attended)
        )
        self._q = np.zeros((num_heads, dim), np.float32)
        self._scores = np.zeros((num_heads, self._tables.shape[1] * BLOCK_SIZE + _UNROLL), np.float32)

    def add_norm(self, batch: Batch, offset: int) -> None:
        _add_norm(self._x, self._delta, self._hidden, self._weights, batch.slots, offset, self._eps)

    def attend(self, batch: Batch, positions: NDArray[np.int64], layer: int) -> None:
        attn = f"model.layers.{layer}.self_attn."
        _attend(
            self._qkv, self._weights, batch.slots,
            self._offsets.get(attn + "q_norm.weight", -1), self._offsets.get(attn + "k_norm.weight", -1),
            self._eps, self._cos, self._sin, self._kv, layer, self._tables, batch.rows, positions,
            self._q, self._scores, self._attended,
        )  # fmt: skip

    def swiglu(self, batch: Batch) -> None:
        _swiglu(self._gate_up, self._gated, len(batch))
