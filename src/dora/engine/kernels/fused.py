"""The decode kernels compiled by numba: one pass over memory each, attention over real positions only.

All are fp32 and of one thread.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.kernels.attention import UNROLL, mix, score, softmax
from dora.engine.kernels.compiled import ONE, ZERO, Array, Scalar, compiled, exp
from dora.engine.kernels.product import Product
from dora.engine.workspace import Batch, Workspace


@compiled("float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], int64[::1], int64, float32")
def _add_norm(
    x: Array, delta: Array, hidden: Array, weights: Array, slots: Array, offset: int, eps: Scalar
) -> None:
    width = x.shape[1]
    for i in range(slots.shape[0]):
        scales = weights[slots[i], offset : offset + width]
        total = ZERO
        for j in range(width):
            x[i, j] += delta[i, j]
            total += x[i, j] * x[i, j]
        factor = ONE / np.float32(math.sqrt(total / np.float32(width) + eps))
        for j in range(width):
            hidden[i, j] = x[i, j] * factor * scales[j]


@compiled("float32[:, ::1], float32[:, ::1], int64")
def _swiglu(gate_up: Array, gated: Array, num_rows: int) -> None:
    width = gated.shape[1]
    for i in range(num_rows):
        gate, up = gate_up[i, :width], gate_up[i, width:]
        for j in range(width):
            gated[i, j] = gate[j] / (ONE + exp(-gate[j])) * up[j]


@compiled("float32[::1], float32[::1], float32[::1], float32[::1], float32, float32, float32[::1]")
def _norm_rotate(
    source: Array, scales: Array, cos: Array, sin: Array, eps: Scalar, factor: Scalar, target: Array
) -> None:
    """target = factor * RoPE(RMS norm of source), all [dim]."""
    dim, half = source.shape[0], source.shape[0] // 2
    total = ZERO
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
    """qkv [N, heads + 2 kv heads, dim] -> attended [N, heads, dim]; q and scores are scratch.

    q_norm and k_norm are offsets of norm weights, negative where there is no norm.
    """
    num_heads, dim = q.shape
    first_value = num_heads + kv.shape[4]
    scale = ONE / np.float32(math.sqrt(dim))
    for i in range(rows.shape[0]):
        own, at, table = weights[slots[i]], positions[i], tables[rows[i]]
        q_scales, k_scales = own[q_norm : q_norm + dim], own[k_norm : k_norm + dim]
        block, place = table[at // BLOCK_SIZE], at % BLOCK_SIZE
        if q_norm < 0:
            for h in range(num_heads):
                _rotate(qkv[i, h], cos[at], sin[at], scale, q[h])
            for h in range(num_heads, first_value):
                _rotate(qkv[i, h], cos[at], sin[at], ONE, kv[block, layer, 0, place, h - num_heads])
        else:
            for h in range(num_heads):
                _norm_rotate(qkv[i, h], q_scales, cos[at], sin[at], eps, scale, q[h])
            for h in range(num_heads, first_value):
                key = kv[block, layer, 0, place, h - num_heads]
                _norm_rotate(qkv[i, h], k_scales, cos[at], sin[at], eps, ONE, key)
        kv[block, layer, 1, place] = qkv[i, first_value:]
        score(q, kv, layer, table, at + 1, scores)
        softmax(scores, at + 1)
        mix(scores, kv, layer, table, at + 1, attended[i])


class FusedKernels:
    """See `Kernels`."""

    name = "numba"
    product = Product

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
        self._scores = np.zeros((num_heads, self._tables.shape[1] * BLOCK_SIZE + UNROLL), np.float32)

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
