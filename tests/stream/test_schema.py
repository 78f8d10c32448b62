"""Packing and unpacking a block preserves columns without padding; invalid columns are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.sample_rows import FIELDS

from dora.errors import StreamError
from dora.stream.schema import BatchPart, BlockPacker, Column, StreamBatch, unpack

KNOWN = {field.name: field for field in FIELDS}


def pack_and_unpack(columns: dict[str, Any], num_rows: int) -> dict[str, Column]:
    packer = BlockPacker(KNOWN, columns)
    assert packer.num_rows == num_rows
    block = bytearray(packer.num_bytes)
    packer.write(block)
    return unpack(KNOWN, packer.names, num_rows, block)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_columns_are_preserved_by_a_block(lengths: list[int]) -> None:
    ids = [np.arange(n, dtype=np.int32) for n in lengths]
    routes = [np.ones(2 * n, np.int16) * n for n in lengths]
    rewards = np.arange(len(lengths), dtype=np.float64)
    columns = pack_and_unpack({"ids": ids, "reward": rewards, "routes": routes}, len(lengths))
    for k in range(len(lengths)):
        np.testing.assert_array_equal(columns["ids"][k], ids[k])
        np.testing.assert_array_equal(columns["routes"][k], routes[k])
        assert columns["reward"][k] == k
    assert columns["ids"].values.size == sum(lengths)


def test_a_batch_reads_rows_of_several_blocks() -> None:
    blocks = []
    for start in (0, 10):
        packer = BlockPacker(KNOWN, {"ids": [np.full(k, start + k, np.int32) for k in range(3)]})
        blocks.append(bytearray(packer.num_bytes))
        packer.write(blocks[-1])
    pairs = [np.array(p, np.int32) for p in ([[0, 2], [2, 1]], [[1, 2]])]
    rows = np.zeros((3, 4), np.int64)
    parts = [BatchPart(("ids",), 3, block, pair) for block, pair in zip(blocks, pairs, strict=True)]
    batch = StreamBatch(1, rows, KNOWN, parts)
    assert [values.tolist() for values in batch.rows("ids")] == [[2, 2], [12, 12], [1]]


@pytest.mark.parametrize(
    ("columns", "fragment"),
    [
        ({"value": np.zeros(2)}, "field 'value' is not declared; declared are ids, logprobs, reward, routes"),
        ({"reward": np.zeros(2, np.float32)}, r"'reward' is float32 of shape \(2,\) and was declared <f8"),
        ({"reward": np.zeros((2, 1))}, r"'reward' is float64 of shape \(2, 1\)"),
        ({"ids": [[1], [2]]}, "'ids' is list"),
        ({"ids": [np.zeros(3, np.int64)] * 2}, "'ids' is int64"),
        ({"ids": [np.zeros((1, 1), np.int32)] * 2}, r"'ids' is int32 of shape \(1, 1\)"),
        ({"ids": [np.int32(1)] * 2}, r"'ids' is int32 of shape \(\)"),
        ({"reward": np.zeros(3), "ids": [np.zeros(1, np.int32)]}, "'ids' has 1 values for 3 rows"),
        ({}, "no rows or no columns: pass at least one of each"),
        ({"reward": np.zeros(0)}, "no rows or no columns"),
        ({"ids": []}, "no rows or no columns"),
    ],
)
def test_an_invalid_column_is_refused(columns: dict[str, Any], fragment: str) -> None:
    with pytest.raises(StreamError, match=fragment):
        BlockPacker(KNOWN, columns)


def test_a_column_may_be_in_a_file(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "rewards", np.float64, "w+", shape=(2,))
    mapped[:] = 1.5
    assert pack_and_unpack({"reward": mapped}, 2)["reward"].values.tolist() == [1.5, 1.5]


def test_a_truncated_block_is_refused() -> None:
    packer = BlockPacker(KNOWN, {"ids": [np.arange(9, dtype=np.int32)] * 2})
    block = bytearray(packer.num_bytes)
    packer.write(block)
    with pytest.raises(ValueError, match="buffer is smaller"):
        unpack(KNOWN, ["ids"], 2, block[:64])
