"""The decode kernels for CPUs, compiled by numba: fp32, one thread, one pass over memory each.

Attention reads only the positions that a row has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.block_manager import BLOCK_SIZE
from dora.engine.kernels.simd import WIDTH, load, multiply_add, prefetch, splat, store, store_totals
from dora.engine.kernels.workspace import ForwardBatch, Workspace

UNROLL = 4  # positions at a time; divides BLOCK_SIZE, so they lie in one block
_KEYS, _VALUES = 0, 1
_TILE_ROWS, _TILE_COLUMNS = 2, 4

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2E = np.float32(math.log2(math.e))
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)  # exp stays a normal fp32 number
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
# 2 ** f for |f| <= 1/2 by its Taylor series: relative error 2e-7
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))

Array = NDArray[Any]
Scalar = np.floating[Any]  # fp32
_Function = TypeVar("_Function", bound=Callable[..., None])


def compiled(signature: str) -> Callable[[_Function], _Function]:
    """Compile at import for one signature, or load the code that an earlier process cached."""
    decorator = njit(f"void({signature})", fastmath=True, error_model="numpy", nogil=True, cache=True)
    return cast(Callable[[_Function], _Function], decorator)


@njit(inline="always")
def _exp(x: Any) -> Any:
    """exp in fp32, written so that the compiler vectorises the loop around it."""
    power = min(max(x, _LOWEST), _HIGHEST) * _LOG2E
    whole = np.float32(math.floor(power + _HALF))
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return fraction * np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)


@compiled("float32[:, ::1], float32[:, ::1], float32[::1], float32[:, ::1]")
def _linear(x: Array, weights: Array, bias: Array, out: Array) -> None:
    """out [N, M] = x [N, K] times weights [M, K] transposed, plus bias [M].

    The weights are read once, in place; libraries repack a matrix first, which for some tens of rows takes
    longer than the product. Every row is summed in the same order in a tile of the same shape, so its result
    has the same bits in any batch. The last tile of rows or columns overlaps the one before it. Each tile
    prefetches its part of the weights of the columns after next; a single tile reads sequentially.
    """
    (num_rows, width), num_columns = x.shape, len(weights)
    num_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    part = (_TILE_COLUMNS * width + num_tiles - 1) // num_tiles
    for column in range(0, num_columns, _TILE_COLUMNS):
        j0 = max(0, min(column, num_columns - _TILE_COLUMNS))
        j1, j2, j3 = min(j0 + 1, num_columns - 1), min(j0 + 2, num_columns - 1), min(j0 + 3, num_columns - 1)
        w0, w1, w2, w3 = weights[j0], weights[j1], weights[j2], weights[j3]
        ahead = (column + 2 * _TILE_COLUMNS) * width if num_tiles > 1 else weights.size
        for tile in range(num_tiles):
            for at in range(ahead + tile * part, min(ahead + (tile + 1) * part, weights.size), WIDTH):
                prefetch(weights, at)
            i0 = max(0, min(tile * _TILE_ROWS, num_rows - _TILE_ROWS))
            i1 = min(i0 + 1, num_rows - 1)
            x0, x1 = x[i0], x[i1]
            a0, a1, a2, a3, b0, b1, b2, b3 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
            for k in range(width):
                a0 += x0[k] * w0[k]
                a1 += x0[k] * w1[k]
                a2 += x0[k] * w2[k]
                a3 += x0[k] * w3[k]
                b0 += x1[k] * w0[k]
                b1 += x1[k] * w1[k]
                b2 += x1[k] * w2[k]
                b3 += x1[k] * w3[k]
            out[i0, j0], out[i0, j1], out[i0, j2], out[i0, j3] = a0, a1, a2, a3
            out[i1, j0], out[i1, j1], out[i1, j2], out[i1, j3] = b0, b1, b2, b3
    if bias.size:
        for i in range(num_rows):
            for j in range(num_columns):
                out[i, j] += bias[j]


class NumbaLinear:
    """See `Linear`; nothing is copied."""

    def __init__(self, weights: Tensor, bias: Tensor | None) -> None:
        self._weights = weights.numpy()
        self._bias = np.zeros(0, np.float32) if bias is None else bias.numpy()

    def __call__(self, x: Tensor, /, *, out: Tensor) -> None:
        _linear(x.numpy(), self._weights, self._bias, out.numpy())


@compiled("float32[:, :, :, :, :, ::1], int64, int64, int64[::1], int64, int64, int64")
def _prefetch_block(kv: Array, layer: int, part: int, table: Array, t: int, length: int, num: int) -> None:
    """Prefetch the keys or values of `num` positions one block after position t, if within `length`."""
    if t + BLOCK_SIZE < length:
        first = kv[table[t // BLOCK_SIZE + 1], layer, part, t % BLOCK_SIZE]
        for at in range(0, num * first.size, WIDTH):
            prefetch(first, at)


@compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def attention_scores(q: Array, kv: Array, layer: int, table: Array, length: int, scores: Array) -> None:
    """scores [heads, T] = q [heads, dim] times the keys, for `length` positions rounded up to UNROLL.

    The vectors are explicit, because the compiler vectorises loops as short as a head badly. If dim is no
    multiple of a vector, the rest of a head is summed float by float.
    """
    (num_heads, dim), kv_heads, width = q.shape, kv.shape[4], scores.shape[1]
    group, row_size, whole = num_heads // kv_heads, kv_heads * dim, dim // WIDTH * WIDTH
    for t in range(0, length, UNROLL):
        keys, at = kv[table[t // BLOCK_SIZE], layer, _KEYS], t % BLOCK_SIZE
        _prefetch_block(kv, layer, _KEYS, table, t, length, UNROLL)
        for kv_head in range(kv_heads):
            first = at * row_size + kv_head * dim
            for h in range(kv_head * group, (kv_head + 1) * group):
                s0 = splat(_ZERO)
                s1, s2, s3 = s0, s0, s0
                for d in range(0, whole, WIDTH):
                    query = load(q, h * dim + d)
                    s0 = multiply_add(query, load(keys, first + d), s0)
                    s1 = multiply_add(query, load(keys, first + row_size + d), s1)
                    s2 = multiply_add(query, load(keys, first + 2 * row_size + d), s2)
                    s3 = multiply_add(query, load(keys, first + 3 * row_size + d), s3)
                store_totals(scores, h * width + t, s0, s1, s2, s3)
                for d in range(whole, dim):
                    for i in range(UNROLL):
                        scores[h, t + i] += q[h, d] * keys[at + i, kv_head, d]


@compiled("float32[:, ::1], int64")
def _softmax(scores: Array, length: int) -> None:
    """Softmax of each row's first `length` entries."""
    for h in range(scores.shape[0]):
        row = scores[h]
        highest, total = row[0], _ZERO
        for t in range(length):
            highest = max(highest, row[t])
        for t in range(length):
            row[t] = _exp(row[t] - highest)
            total += row[t]
        scale = _ONE / total
        for t in range(length):
            row[t] *= scale


@compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def attention_output(scores: Array, kv: Array, layer: int, table: Array, length: int, out: Array) -> None:
    """out [heads, dim] = scores [heads, T] times the values, for `length` positions.

    Two heads are computed at a time; the last head of an odd group is paired with itself.
    """
    (num_heads, dim), kv_heads = out.shape, kv.shape[4]
    group, row_size, whole = num_heads // kv_heads, kv_heads * dim, dim // (2 * WIDTH) * 2 * WIDTH
    out[:] = _ZERO
    for t in range(0, length, BLOCK_SIZE):
        values, num = kv[table[t // BLOCK_SIZE], layer, _VALUES], min(BLOCK_SIZE, length - t)
        _prefetch_block(kv, layer, _VALUES, table, t, length, BLOCK_SIZE)
        for kv_head in range(kv_heads):
            for g in range(kv_head * group, (kv_head + 1) * group, 2):
                h = min(g + 1, (kv_head + 1) * group - 1)
                for d in range(0, whole, 2 * WIDTH):
                    g0, g1 = load(out, g * dim + d), load(out, g * dim + d + WIDTH)
                    h0, h1 = load(out, h * dim + d), load(out, h * dim + d + WIDTH)
                    for i in range(num):
                        at = i * row_size + kv_head * dim + d
                        v0, v1 = load(values, at), load(values, at + WIDTH)
                        p, r = splat(scores[g, t + i]), splat(scores[h, t + i])
                        g0, g1 = multiply_add(p, v0, g0), multiply_add(p, v1, g1)
                        h0, h1 = multiply_add(r, v0, h0), multiply_add(r, v1, h1)
                    store(out, g * dim + d, g0)
                    store(out, g * dim + d + WIDTH, g1)
                    store(out, h * dim + d, h0)
                    store(out, h * dim + d + WIDTH, h1)
            for h in range(kv_head * group, (kv_head + 1) * group):
                for i in range(num):
                    for d in range(whole, dim):
                        out[h, d] += scores[h, t + i] * values[i, kv_head, d]


@compiled("float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], int64[::1], int64, float32")
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


@compiled("float32[:, ::1], float32[:, ::1], int64")
def _swiglu(gate_up: Array, gated: Array, num_rows: int) -> None:
    width = gated.shape[1]
    for i in range(num_rows):
        gate, up = gate_up[i, :width], gate_up[i, width:]
        for j in range(width):
            gated[i, j] = gate[j] / (_ONE + _exp(-gate[j])) * up[j]


@compiled("float32[::1], float32[::1], float32[::1], float32[::1], float32, float32, float32[::1]")
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


@compiled("float32[::1], float32[::1], float32[::1], float32, float32[::1]")
def _rotate(source: Array, cos: Array, sin: Array, factor: Scalar, target: Array) -> None:
    """target = factor * RoPE(source), all [dim]."""
    half = source.shape[0] // 2
    for j in range(half):
        left, right = factor * source[j], factor * source[half + j]
        target[j] = left * cos[j] - right * sin[j]
        target[half + j] = right * cos[j] + left * sin[j]


@compiled(
    "float32[:, :, ::1], float32[:, ::1], int64[::1], int64, int64, float32,"
    "float32[:, ::1], float32[:, ::1], float32[:, :, :, :, :, ::1], int64,"
    "int64[:, ::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], float32[:, :, ::1]"
)
def _attend(
    qkv: Array, weights: Array, slots: Array, q_norm: int, k_norm: int, eps: Scalar, cos: Array, sin: Array,
    kv: Array, layer: int, tables: Array, rows: Array, positions: Array,
    q: Array, scores: Array, attended: Array,
) -> None:  # fmt: skip
    """qkv [N, heads + 2 kv heads, dim] -> attended [N, heads, dim]; q and scores are scratch buffers.

    q_norm and k_norm are offsets of the norm weights, or negative.
    """
    num_heads, dim = q.shape
    first_value = num_heads + kv.shape[4]
    scale = _ONE / np.float32(math.sqrt(dim))
    for i in range(rows.shape[0]):
        slot_weights, at, table = weights[slots[i]], positions[i], tables[rows[i]]
        q_scales, k_scales = slot_weights[q_norm : q_norm + dim], slot_weights[k_norm : k_norm + dim]
        block, offset = table[at // BLOCK_SIZE], at % BLOCK_SIZE
        if q_norm < 0:
            for h in range(num_heads):
                _rotate(qkv[i, h], cos[at], sin[at], scale, q[h])
            for h in range(num_heads, first_value):
                _rotate(qkv[i, h], cos[at], sin[at], _ONE, kv[block, layer, 0, offset, h - num_heads])
        else:
            for h in range(num_heads):
                _norm_rotate(qkv[i, h], q_scales, cos[at], sin[at], eps, scale, q[h])
            for h in range(num_heads, first_value):
                key = kv[block, layer, 0, offset, h - num_heads]
                _norm_rotate(qkv[i, h], k_scales, cos[at], sin[at], eps, _ONE, key)
        kv[block, layer, 1, offset] = qkv[i, first_value:]
        attention_scores(q, kv, layer, table, at + 1, scores)
        _softmax(scores, at + 1)
        attention_output(scores, kv, layer, table, at + 1, attended[i])


class NumbaKernels:
    """See `Kernels`."""

    name = "numba"
    linear = NumbaLinear

    def __init__(self, workspace: Workspace) -> None:
        config, self._offsets = workspace.config, workspace.layout.offsets
        self._eps = np.float32(config.rms_norm_eps)
        self._weights, self._kv, self._tables = (
            tensor.numpy() for tensor in (workspace.weights, workspace.kv, workspace.block_tables)
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
        self._scores = np.zeros((num_heads, self._tables.shape[1] * BLOCK_SIZE + UNROLL), np.float32)

    def add_norm(self, batch: ForwardBatch, offset: int) -> None:
        _add_norm(self._x, self._delta, self._hidden, self._weights, batch.slots, offset, self._eps)

    def attend(self, batch: ForwardBatch, positions: NDArray[np.int64], layer: int) -> None:
        attn = f"model.layers.{layer}.self_attn."
        _attend(
            self._qkv, self._weights, batch.slots,
            self._offsets.get(attn + "q_norm.weight", -1), self._offsets.get(attn + "k_norm.weight", -1),
            self._eps, self._cos, self._sin, self._kv, layer, self._tables, batch.rows, positions,
            self._q, self._scores, self._attended,
        )  # fmt: skip

    def swiglu(self, batch: ForwardBatch) -> None:
        _swiglu(self._gate_up, self._gated, len(batch))
