"""The decode kernels for GPUs, in Triton. With TRITON_INTERPRET=1 they run slowly on the CPU, for tests.

The kernels read their inputs (positions, rows, slots) from the workspace on the device, so that a step can be
replayed as a CUDA graph. Sums are fp32 for every dtype; offsets into weights and KV are int64.
"""

import math
import os

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from dora.engine.block_manager import BLOCK_SIZE
from dora.engine.kernels.eager import linear
from dora.engine.kernels.workspace import MAX_PREFILL_READS, PARTITION, ForwardBatch, Workspace

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default differs between versions of Triton
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_NUM_PROGRAMS = 2 if IS_INTERPRETED else 1024  # enough to keep a GPU busy
_MAX_PROGRAMS = 8192  # of attention; each may compute several partitions
_CHUNK = 8  # partitions that are combined at once
_MIN_DOT = 16  # the minimum size of a matrix in tl.dot
_COLUMNS = 1024  # per program of an element-wise kernel


@triton.jit
def _add_norm(
    x, delta, hidden, weights, slots, slot_stride, offset, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per row: x += delta, rounded; hidden = RMS norm of x, with the weights of its slot."""
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    mask, at = column < WIDTH, row * WIDTH + column
    added = tl.load(x + at, mask, 0.0).to(tl.float32) + tl.load(delta + at, mask, 0.0).to(tl.float32)
    rounded = added.to(x.dtype.element_ty)
    tl.store(x + at, rounded, mask)
    values = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scales = weights + tl.load(slots + row) * slot_stride + offset
    normed = values * factor * tl.load(scales + column, mask, 0.0).to(tl.float32)
    tl.store(hidden + at, normed.to(hidden.dtype.element_ty), mask)


@triton.jit
def _swiglu(gate_up, gated, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """One program per row and COLUMNS columns."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask, at = column < WIDTH, gate_up + row * 2 * WIDTH + column
    gate, up = tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + WIDTH, mask, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(gated + row * WIDTH + column, value.to(gated.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["layer"])
def _rope_store_kv(
    qkv, q, kv, weights, cos, sin,
    slots, rows, positions, tables,
    slot_stride, q_norm, k_norm, eps, layer, block_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program per row and head: norm q and k (if HAS_NORM), apply RoPE, store k and v in their block.

    HALF is half of DIM, rounded up to a power of two.
    """
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    mask = column < DIM // 2
    is_rotated = column < tl.where(head < HEADS + KV_HEADS, DIM // 2, 0)  # q and k, not v
    in_query = column < tl.where(head < HEADS, DIM // 2, 0)
    in_block = column < tl.where(head < HEADS, 0, DIM // 2)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + column
    left = tl.load(source, mask, 0.0).to(tl.float32)
    right = tl.load(source + DIM // 2, mask, 0.0).to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / DIM + eps)
        factor = tl.where(head < HEADS + KV_HEADS, factor, 1.0)
        norm = tl.where(head < HEADS, q_norm, k_norm)
        scales = weights + tl.load(slots + row) * slot_stride + norm + column
        left *= factor * tl.load(scales, is_rotated, 1.0).to(tl.float32)
        right *= factor * tl.load(scales + DIM // 2, is_rotated, 1.0).to(tl.float32)
    position = tl.load(positions + row)
    c = tl.load(cos + position * DIM + column, is_rotated, 1.0)
    s = tl.load(sin + position * DIM + column, is_rotated, 0.0)
    rotated_left, rotated_right = left * c - right * s, right * c + left * s

    query = q + (row * HEADS + head) * DIM + column
    tl.store(query, rotated_left.to(q.dtype.element_ty), in_query)
    tl.store(query + DIM // 2, rotated_right.to(q.dtype.element_ty), in_query)
    block = tl.load(tables + tl.load(rows + row) * table_stride + position // BLOCK)
    index = layer * 2 * BLOCK * KV_HEADS + (position % BLOCK) * KV_HEADS
    index += tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS + BLOCK * KV_HEADS)
    target = kv + block * block_stride + index * DIM + column
    tl.store(target, rotated_left.to(kv.dtype.element_ty), in_block)
    tl.store(target + DIM // 2, rotated_right.to(kv.dtype.element_ty), in_block)


@triton.jit(do_not_specialize=["layer"])
def _attend(
    q, kv, rows, positions, tables, owners, ends, partial, masses,
    layer, block_stride, table_stride, num_rows, partition, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DIM_PADDED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per kv head and some of the partitions of all rows; the query heads of a kv head are one
    matrix.

    A partition is up to `partition` tokens of the context of its row, owners [partition]; those of a row end
    before ends [row]. partial [partition, head, DIM] fp32 is the attention within a partition, and masses
    [partition, head] the log2 of its sum of exponentials. GROUP is the number of query heads per kv head,
    rounded up to _MIN_DOT.
    """
    kv_head = tl.program_id(1)
    group, column, offset = tl.arange(0, GROUP), tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    in_group, in_dim = group < HEADS // KV_HEADS, column < DIM
    in_both = in_group[:, None] & in_dim[None, :]
    head = kv_head * (HEADS // KV_HEADS) + group
    for item in range(tl.program_id(0), tl.load(ends + num_rows - 1).to(tl.int32), tl.num_programs(0)):
        row = tl.load(owners + item).to(tl.int32)
        length = tl.load(positions + row).to(tl.int32) + 1
        table = tables + tl.load(rows + row) * table_stride
        num_before = item - tl.load(ends + row).to(tl.int32) + (length + partition - 1) // partition
        start = num_before * partition
        stop = tl.minimum(start + partition, length)
        queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + column[None, :], in_both, 0.0).to(DOT)
        highest = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        mixed = tl.zeros([GROUP, DIM_PADDED], tl.float32)
        for first in range(start, stop, TILE):
            at = first + offset
            known = at < stop
            block = tl.load(table + at // BLOCK, known, 0)
            index = layer * 2 * BLOCK * KV_HEADS + (at % BLOCK) * KV_HEADS + kv_head
            key = kv + block * block_stride + index * DIM
            keys = tl.load(key[None, :] + column[:, None], known[None, :] & in_dim[:, None], 0.0).to(DOT)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(known[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            value = key + BLOCK * KV_HEADS * DIM
            values = tl.load(value[:, None] + column[None, :], known[:, None] & in_dim[None, :], 0.0).to(DOT)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(DOT), values, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            highest = new_highest
        out = item * HEADS + head
        tl.store(partial + out[:, None] * DIM + column[None, :], mixed / total[:, None], in_both)
        tl.store(masses + out, highest + tl.log2(total), in_group)


@triton.jit
def _combine(
    partial, masses, attended, positions, ends, partition,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per row and head: the partitions' results, weighted by their fraction of the mass."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, offset = tl.arange(0, DIM_PADDED), tl.arange(0, CHUNK)
    in_dim = column < DIM
    count = (tl.load(positions + row).to(tl.int32) + partition) // partition
    stop = tl.load(ends + row).to(tl.int32)
    highest = tl.max(tl.full([CHUNK], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([CHUNK], tl.float32), 0)
    mixed = tl.zeros([DIM_PADDED], tl.float32)
    for first in range(stop - count, stop, CHUNK):
        known = first + offset < stop
        at = (first + offset) * HEADS + head
        mass = tl.load(masses + at, known, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(mass, 0))
        fraction, shrink = tl.exp2(mass - new_highest), tl.exp2(highest - new_highest)
        parts = tl.load(partial + at[:, None] * DIM + column[None, :], known[:, None] & in_dim[None, :], 0.0)
        mixed = mixed * shrink + tl.sum(parts * fraction[:, None], 0)
        total = total * shrink + tl.sum(fraction, 0)
        highest = new_highest
    out = attended + (row * HEADS + head) * DIM + column
    tl.store(out, (mixed / total).to(attended.dtype.element_ty), in_dim)


class TritonKernels:
    """See `Kernels`; positions, rows and slots are read from the workspace.

    Attention divides the context of each row into partitions, so that a long row takes no longer than many
    short ones with as many tokens. A partition has PARTITION tokens, and fewer where few rows would not keep
    a GPU busy. `attend` finds the partitions for layer 0; the other layers of a step use them.
    """

    name = "triton"
    linear = staticmethod(linear)

    def __init__(self, workspace: Workspace) -> None:
        work, config = self._work, self._config = workspace, workspace.config
        is_fp32 = work.dtype == torch.float32
        self._tile = 2 * BLOCK_SIZE if is_fp32 else 4 * BLOCK_SIZE
        self._offsets, self._slot_stride = work.layout.offsets, work.weights.stride(0)
        heads, dim = config.num_attention_heads, config.head_dim
        self._max_context = work.block_tables.shape[1] * BLOCK_SIZE
        num_rows = len(work.logits)  # of decode steps; prompts have more rows, and few tokens to attend to
        max_items = max(self._max_partitions(num) for num in range(1, num_rows + 1))
        max_items = max(max_items, len(work.x) + MAX_PREFILL_READS // self._tile)
        self._q = torch.zeros(len(work.x), heads, dim, dtype=work.dtype, device=work.device)
        self._partial = torch.zeros(max_items, heads, dim, device=work.device)
        self._masses = torch.zeros(max_items, heads, device=work.device)
        self._ends = torch.zeros(len(work.x), dtype=torch.int64, device=work.device)
        self._items = torch.arange(max_items, device=work.device)
        self._owners = torch.zeros_like(self._items)
        self._dot = tl.float32 if is_fp32 or IS_INTERPRETED else tl.bfloat16

    def add_norm(self, batch: ForwardBatch, offset: int) -> None:
        work, width = self._work, self._config.hidden_size
        padded = triton.next_power_of_2(width)
        _add_norm[(len(batch),)](
            work.x, work.delta, work.hidden, work.weights, work.slots, self._slot_stride, offset,
            self._config.rms_norm_eps, width, padded, num_warps=min(8, max(1, padded // 256)),
        )  # fmt: skip

    def attend(self, batch: ForwardBatch, positions: NDArray[np.int64], layer: int) -> None:
        self._prepare_attention(batch, layer)
        work, config, num_rows = self._work, self._config, len(batch)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        partition, padded = self._partition(num_rows), max(_MIN_DOT, triton.next_power_of_2(dim))
        group = max(_MIN_DOT, triton.next_power_of_2(heads // kv_heads))
        if layer == 0:
            self._find_partitions(num_rows)
        num_programs = min(
            self._max_partitions(num_rows), len(self._items), max(1, _MAX_PROGRAMS // kv_heads)
        )
        _attend[(num_programs, kv_heads)](
            self._q, work.kv, work.rows, work.positions, work.block_tables, self._owners, self._ends,
            self._partial, self._masses, layer, work.kv.stride(0), work.block_tables.stride(0),
            num_rows, partition, math.log2(math.e) / math.sqrt(dim),
            heads, kv_heads, group, dim, BLOCK_SIZE, self._tile, padded, self._dot,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        _combine[(num_rows, heads)](
            self._partial, self._masses, work.attended, work.positions, self._ends, partition,
            heads, dim, padded, _CHUNK, num_warps=1,
        )  # fmt: skip

    def swiglu(self, batch: ForwardBatch) -> None:
        width = self._config.intermediate_size
        grid = (len(batch), triton.cdiv(width, _COLUMNS))
        _swiglu[grid](self._work.gate_up, self._work.gated, width, _COLUMNS, num_warps=4)

    def _prepare_attention(self, batch: ForwardBatch, layer: int) -> None:
        """Write the queries to `_q`, and the keys and values to their blocks."""
        work, config, attn = self._work, self._config, f"model.layers.{layer}.self_attn."
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        norms = (self._offsets.get(f"{attn}{x}_norm.weight", 0) for x in "qk")
        _rope_store_kv[(len(batch), heads + 2 * kv_heads)](
            work.qkv, self._q, work.kv, work.weights, work.cos, work.sin,
            work.slots, work.rows, work.positions, work.block_tables,
            self._slot_stride, *norms, config.rms_norm_eps, layer,
            work.kv.stride(0), work.block_tables.stride(0),
            heads, kv_heads, dim, triton.next_power_of_2(dim // 2), BLOCK_SIZE, config.has_qk_norm,
            num_warps=1,
        )  # fmt: skip

    def _find_partitions(self, num_rows: int) -> None:
        """Number the partitions of all rows, row by row, on the device: `_owners` and `_ends`."""
        ends, partition = self._ends[:num_rows], self._partition(num_rows)
        counts = (self._work.positions[:num_rows] + partition) // partition
        torch.cumsum(counts, 0, out=ends)
        num_items = min(self._max_partitions(num_rows), len(self._items))
        torch.searchsorted(ends, self._items[:num_items], right=True, out=self._owners[:num_items])

    def _max_partitions(self, num_rows: int) -> int:
        return num_rows * -(-self._max_context // self._partition(num_rows))

    def _partition(self, num_rows: int) -> int:
        """The length of the partitions of a batch: a multiple of the tile."""
        partition, num_programs = PARTITION, num_rows * self._config.num_key_value_heads
        while partition > self._tile and num_programs * PARTITION < _NUM_PROGRAMS * partition:
            partition //= 2
        return partition
