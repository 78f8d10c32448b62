"""One row's attention to its blocks of KV, compiled by numba.

The vectors are written out, for the compiler's own ones are lost in loops as short as a head. A head's
rest, where dim is no multiple of a vector, is summed up float by float.
"""

from __future__ import annotations

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.kernels.compiled import ONE, ZERO, Array, compiled, exp
from dora.engine.kernels.lanes import WIDTH, load, multiply_add, prefetch, splat, store, store_totals

UNROLL = 4  # positions at a time; a divisor of BLOCK_SIZE, so that they lie in one block
_KEYS, _VALUES = 0, 1


@compiled("float32[:, :, :, :, :, ::1], int64, int64, int64[::1], int64, int64, int64")
def _fetch_ahead(kv: Array, layer: int, part: int, table: Array, t: int, length: int, num: int) -> None:
    """Prefetch keys or values of the `num` positions that lie a block after t, if they are wanted."""
    if t + BLOCK_SIZE < length:
        first = kv[table[t // BLOCK_SIZE + 1], layer, part, t % BLOCK_SIZE]
        for at in range(0, num * first.size, WIDTH):
            prefetch(first, at)


@compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def score(q: Array, kv: Array, layer: int, table: Array, length: int, scores: Array) -> None:
    """scores [heads, T] = q [heads, dim] times the keys, for `length` positions rounded up to UNROLL."""
    (num_heads, dim), kv_heads, width = q.shape, kv.shape[4], scores.shape[1]
    group, row, whole = num_heads // kv_heads, kv_heads * dim, dim // WIDTH * WIDTH
    for t in range(0, length, UNROLL):
        keys, at = kv[table[t // BLOCK_SIZE], layer, _KEYS], t % BLOCK_SIZE
        _fetch_ahead(kv, layer, _KEYS, table, t, length, UNROLL)
        for shared in range(kv_heads):
            first = at * row + shared * dim
            for h in range(shared * group, (shared + 1) * group):
                s0 = splat(ZERO)
                s1, s2, s3 = s0, s0, s0
                for d in range(0, whole, WIDTH):
                    own = load(q, h * dim + d)
                    s0 = multiply_add(own, load(keys, first + d), s0)
                    s1 = multiply_add(own, load(keys, first + row + d), s1)
                    s2 = multiply_add(own, load(keys, first + 2 * row + d), s2)
                    s3 = multiply_add(own, load(keys, first + 3 * row + d), s3)
                store_totals(scores, h * width + t, s0, s1, s2, s3)
                for d in range(whole, dim):
                    for i in range(UNROLL):
                        scores[h, t + i] += q[h, d] * keys[at + i, shared, d]


@compiled("float32[:, ::1], int64")
def softmax(scores: Array, length: int) -> None:
    """Softmax of each row's first `length` entries."""
    for h in range(scores.shape[0]):
        row = scores[h]
        highest, total = row[0], ZERO
        for t in range(length):
            highest = max(highest, row[t])
        for t in range(length):
            row[t] = exp(row[t] - highest)
            total += row[t]
        share = ONE / total
        for t in range(length):
            row[t] *= share


@compiled("float32[:, ::1], float32[:, :, :, :, :, ::1], int64, int64[::1], int64, float32[:, ::1]")
def mix(scores: Array, kv: Array, layer: int, table: Array, length: int, out: Array) -> None:
    """out [heads, dim] = scores [heads, T] times the values, for `length` positions.

    Two heads at a time; the last of an odd group is both of them.
    """
    (num_heads, dim), kv_heads = out.shape, kv.shape[4]
    group, row, whole = num_heads // kv_heads, kv_heads * dim, dim // (2 * WIDTH) * 2 * WIDTH
    out[:] = ZERO
    for t in range(0, length, BLOCK_SIZE):
        values, num = kv[table[t // BLOCK_SIZE], layer, _VALUES], min(BLOCK_SIZE, length - t)
        _fetch_ahead(kv, layer, _VALUES, table, t, length, BLOCK_SIZE)
        for shared in range(kv_heads):
            for g in range(shared * group, (shared + 1) * group, 2):
                h = min(g + 1, (shared + 1) * group - 1)
                for d in range(0, whole, 2 * WIDTH):
                    g0, g1 = load(out, g * dim + d), load(out, g * dim + d + WIDTH)
                    h0, h1 = load(out, h * dim + d), load(out, h * dim + d + WIDTH)
                    for i in range(num):
                        at = i * row + shared * dim + d
                        v0, v1 = load(values, at), load(values, at + WIDTH)
                        p, r = splat(scores[g, t + i]), splat(scores[h, t + i])
                        g0, g1 = multiply_add(p, v0, g0), multiply_add(p, v1, g1)
                        h0, h1 = multiply_add(r, v0, h0), multiply_add(r, v1, h1)
                    store(out, g * dim + d, g0)
                    store(out, g * dim + d + WIDTH, g1)
                    store(out, h * dim + d, h0)
                    store(out, h * dim + d + WIDTH, h1)
            for h in range(shared * group, (shared + 1) * group):
                for i in range(num):
                    for d in range(whole, dim):
                        out[h, d] += scores[h, t + i] * values[i, shared, d]
