"""Packing and unpacking a block preserves columns without padding; invalid columns are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.sample_rows import FIELDS, IDS, REWARD, ROUTES

from dora.errors import StreamError
from dora.stream.schema import BatchPart, BlockPacker, Column, Field, StreamBatch, jagged_column, unpack

KNOWN = {field.name: field for field in FIELDS}


def pack_and_unpack(columns: dict[str, Any], num_rows: int) -> dict[str, Column]:
    packer = BlockPacker(KNOWN, columns, num_rows)
    block = bytearray(packer.num_bytes)
    packer.write(block)
    return unpack(KNOWN, packer.names, num_rows, block)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_columns_are_preserved_by_a_block(lengths: list[int]) -> None:
    ids = [np.arange(n, dtype=np.int32) for n in lengths]
    routes = [np.ones((n, 3), np.int16) * n for n in lengths]
    rewards = np.arange(len(lengths), dtype=np.float64)
    once = pack_and_unpack({"ids": ids, "reward": rewards, "routes": routes}, len(lengths))
    for columns in (
        once,
        pack_and_unpack(dict(once), len(lengths)),
    ):  # a column that was read can be put again
        for k in range(len(lengths)):
            np.testing.assert_array_equal(columns["ids"][k], ids[k])
            np.testing.assert_array_equal(columns["routes"][k], routes[k])
            assert columns["reward"][k] == k
        assert columns["ids"].values.size == sum(lengths)


def test_a_column_of_a_block_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        pack_and_unpack({"reward": np.zeros(2)}, 2)["reward"].values[0] = 1.0


def test_consecutive_rows_of_a_column_are_a_view() -> None:
    column = jagged_column([np.full(n, n, np.int32) for n in range(5)])
    neighbours, others = (column.select(np.array(rows, np.int32)) for rows in ([2, 3], [3, 1]))
    assert np.shares_memory(neighbours.values, column.values)
    assert [neighbours[0].tolist(), neighbours[1].tolist()] == [[2, 2], [3, 3, 3]]
    assert [others[0].tolist(), others[1].tolist()] == [[3, 3, 3], [1]]


def test_a_batch_reads_rows_of_several_blocks() -> None:
    blocks = []
    for start in (0, 10):
        packer = BlockPacker(KNOWN, {"ids": [np.full(k, start + k, np.int32) for k in range(3)]}, 3)
        blocks.append(bytearray(packer.num_bytes))
        packer.write(blocks[-1])
    pairs = [np.array(p, np.int32) for p in ([[0, 2], [2, 1]], [[1, 2]])]
    rows = np.zeros((3, 6), np.int64)
    parts = [BatchPart(("ids",), 3, block, pair) for block, pair in zip(blocks, pairs, strict=True)]
    batch = StreamBatch(1, rows, KNOWN, parts)
    assert [values.tolist() for values in batch.rows("ids")] == [[2, 2], [12, 12], [1]]
    assert batch.column("ids").values.tolist() == [2, 2, 12, 12, 1]


@pytest.mark.parametrize(
    ("columns", "fragment"),
    [
        ({"value": np.zeros(2)}, "field 'value' is not declared; declared are ids, logprobs, reward, routes"),
        ({"reward": np.zeros(2, np.float32)}, "'reward' is float32 and was declared <f8: convert it first"),
        ({"reward": np.zeros((2, 1))}, r"'reward' has shape \(1,\) and was declared \(\)"),
        ({"ids": [[1], [2]]}, "'ids' is list and was declared <i4"),
        ({"ids": [np.zeros(3, np.int64)] * 2}, "'ids' is int64"),
        ({"ids": [np.zeros((1, 1), np.int32)] * 2}, r"'ids' has shape \(1, 1\)"),
        ({"ids": [np.int32(1)] * 2}, r"'ids' has shape \(\)"),
        ({"routes": [np.zeros((1, 2), np.int16)] * 2}, r"'routes' has shape \(1, 2\)"),
        ({"reward": np.zeros(3)}, "'reward' has 3 values for 2 rows"),
        ({}, "no columns"),
    ],
)
def test_an_invalid_column_is_refused(columns: dict[str, Any], fragment: str) -> None:
    with pytest.raises(StreamError, match=fragment):
        BlockPacker(KNOWN, columns, 2)


def test_a_field_has_numbers_of_a_fixed_size() -> None:
    for dtype, shape, fragment in (
        ("O", (), "dtype 'O' has no fixed size"),
        ("<i4", (3, None), "only the first dimension may be None"),
    ):
        with pytest.raises(StreamError, match=fragment):
            Field("odd", dtype, shape)


def test_a_truncated_or_corrupt_block_is_refused() -> None:
    packer = BlockPacker(KNOWN, {"ids": [np.arange(9, dtype=np.int32)] * 2}, 2)
    block = bytearray(packer.num_bytes)
    packer.write(block)
    with pytest.raises(StreamError, match="shorter than its columns"):
        unpack(KNOWN, ["ids"], 2, block[:64])
    for offsets in ([0, 9, 4], [1, 9, 18], [0, 9, 2**60]):
        block[:24] = np.array(offsets, np.int64).tobytes()
        with pytest.raises(StreamError, match=r"shorter than its columns|do not ascend"):
            unpack(KNOWN, ["ids"], 2, block)


def test_the_inner_shape_is_the_same_for_all_rows() -> None:
    assert [field.inner_shape for field in (IDS, REWARD, ROUTES)] == [(), (), (3,)]
