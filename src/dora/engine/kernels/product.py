"""Matrix products of few rows, compiled by numba: weights are read once, as they lie in their slot.

Libraries copy a matrix into another order before they multiply it; for some tens of rows that
takes longer than the product. And a row's result has the same bits whatever rows are beside it,
for every row is summed up in the same order, in a tile of its own kind.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dora.engine.kernels.compiled import ZERO, Array, compiled
from dora.engine.kernels.lanes import WIDTH, prefetch

_TILE_ROWS, _TILE_COLUMNS = 2, 4


@compiled("float32[:, ::1], float32[:, ::1], float32[::1], float32[:, ::1]")
def _multiply(x: Array, weights: Array, bias: Array, out: Array) -> None:
    """out [N, M] = x [N, K] times weights [M, K] transposed, plus bias [M].

    The last tile of rows or columns overlaps the one before it. While a tile's sums run, its share of
    the weights of the columns after next is on its way; a single tile reads on and on and needs no help.
    """
    (num_rows, width), num_columns = x.shape, len(weights)
    num_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    share = (_TILE_COLUMNS * width + num_tiles - 1) // num_tiles
    for column in range(0, num_columns, _TILE_COLUMNS):
        j0 = max(0, min(column, num_columns - _TILE_COLUMNS))
        j1, j2, j3 = min(j0 + 1, num_columns - 1), min(j0 + 2, num_columns - 1), min(j0 + 3, num_columns - 1)
        w0, w1, w2, w3 = weights[j0], weights[j1], weights[j2], weights[j3]
        ahead = (column + 2 * _TILE_COLUMNS) * width if num_tiles > 1 else weights.size
        for tile in range(num_tiles):
            for at in range(ahead + tile * share, min(ahead + (tile + 1) * share, weights.size), WIDTH):
                prefetch(weights, at)
            i0 = max(0, min(tile * _TILE_ROWS, num_rows - _TILE_ROWS))
            i1 = min(i0 + 1, num_rows - 1)
            x0, x1 = x[i0], x[i1]
            a0, a1, a2, a3, b0, b1, b2, b3 = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
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


class Product:
    """x [N, K] times a matrix [M, K] transposed, plus a bias [M] if there is one; nothing is copied."""

    def __init__(self, weights: Tensor, bias: Tensor | None) -> None:
        self._weights = weights.numpy()
        self._bias = np.zeros(0, np.float32) if bias is None else bias.numpy()

    def __call__(self, x: Tensor, /, *, out: Tensor) -> None:
        _multiply(x.numpy(), self._weights, self._bias, out.numpy())
