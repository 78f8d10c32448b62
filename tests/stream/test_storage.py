"""A stream in one process: blocks are freed after the last consumer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.processes import TASK
from tests.stream.sample_rows import ALL, CONSUMERS, FIELDS, columns, group, numbers, rewards, samples

from dora.core.types import RequestId
from dora.errors import StreamError
from dora.stream.metadata import BatchRequest, ConsumerDeclaration
from dora.stream.schema import Field, StreamBatch
from dora.stream.storage import (
    SEGMENT_BYTES,
    SampleStream,
    SegmentReader,
    SegmentWriter,
    is_segment_name,
)


def put(stream: SampleStream, *groups: int) -> None:
    stream.put(samples(*groups), columns(*groups))
    stream.free_unused()


def get(stream: SampleStream, consumer: str, request: BatchRequest = ALL) -> StreamBatch | None:
    lease = stream.metadata.lease(consumer, "me", request, 0.0)
    return None if lease is None else stream.batch(lease)


def consume(stream: SampleStream, consumer: str) -> list[int]:
    batch = get(stream, consumer)
    if batch is None:
        return []
    found = numbers(batch)
    stream.metadata.commit(batch.lease, "me", 0.0)
    stream.free_unused()
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if is_segment_name(path.name)}


@pytest.fixture
def stream(tmp_path: Path) -> SampleStream:
    return SampleStream(FIELDS, CONSUMERS, tmp_path)


def test_a_row_has_the_columns_of_two_producers(stream: SampleStream) -> None:
    put(stream, 0, 1, 3)
    assert consume(stream, TASK) == [0, 1, 3]
    assert get(stream, "actor") is None
    stream.fill([group(1), group(0)], rewards(1, 0))
    batch = get(stream, "actor")
    assert batch is not None
    assert numbers(batch) == [1, 0]
    assert batch.rows("reward") == [1.0, 1.0, 0.0, 0.0]
    assert batch.requests == [RequestId(0, *row) for row in ((1, 0), (1, 1), (0, 0), (0, 1))]


def test_a_batch_has_only_the_columns_that_its_consumer_needs(stream: SampleStream) -> None:
    put(stream, 0)
    batch = get(stream, TASK)
    assert batch is not None
    assert numbers(batch) == [0]
    with pytest.raises(KeyError):
        batch.rows("routes")


def test_a_refused_request_leaves_the_stream_unchanged(stream: SampleStream) -> None:
    put(stream, 0, 1)
    bad: dict[str, Callable[[], Any]] = {
        "group 0/1 exists already": lambda: put(stream, 1),
        "'ids' is float64": lambda: stream.put(samples(2), {"ids": [np.zeros(1)] * 2}),
        "group 0/0 has ids, logprobs already": lambda: stream.fill([group(0)], columns(0)),
        "group 0/9 does not exist": lambda: stream.fill([group(9)], rewards(9)),
        "4 values for 2 rows": lambda: stream.fill([group(0)] * 2, rewards(0, 1)),
        "no rows or no columns": lambda: stream.fill([], {"reward": np.zeros(0)}),
        "no lease 1": lambda: stream.metadata.commit(1, "me", 0.0),
    }
    before = stream.metadata.num_rows, stream.metadata.num_bytes
    for message, request in bad.items():
        with pytest.raises(StreamError, match=message):
            request()
    assert (stream.metadata.num_rows, stream.metadata.num_bytes) == before
    assert consume(stream, TASK) == [0, 1]


@pytest.mark.parametrize("dtype", ["S5", "O", ">i4", "M8[s]", "(2,)<i4"])
def test_a_field_has_numbers_that_every_client_can_read(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(StreamError, match=r"field 'odd': dtype .* has no numbers in this machine's byte"):
        SampleStream([Field("odd", dtype)], [], tmp_path)


@pytest.mark.parametrize(
    ("consumers", "fragment"),
    [
        ([ConsumerDeclaration("critic", [])], "consumer 'critic': 0 fields"),
        ([ConsumerDeclaration("critic", ["ids"], 0.0)], "1 fields, lease_s = 0: it needs"),
        ([ConsumerDeclaration("critic", ["ids"], -1.0)], "lease_s = -1: it needs"),
        ([ConsumerDeclaration("critic", ["ids"], math.nan)], "lease_s = nan: it needs"),
        ([ConsumerDeclaration("critic", ["ids"]), ConsumerDeclaration("critic", ["reward"])], "'critic' is"),
        ([ConsumerDeclaration("critic", ["values"])], "field 'values' is not declared"),
    ],
)
def test_invalid_declarations_are_refused(
    tmp_path: Path, consumers: list[ConsumerDeclaration], fragment: str
) -> None:
    with pytest.raises(StreamError, match=fragment):
        SampleStream(FIELDS, consumers, tmp_path)
    with pytest.raises(StreamError, match="'ids' is declared twice: use another name"):
        SampleStream([*FIELDS, FIELDS[0]], CONSUMERS, tmp_path)


def test_segments_are_reused(tmp_path: Path) -> None:
    stream = SampleStream(FIELDS, [ConsumerDeclaration(TASK, ["ids"])], tmp_path)
    one: dict[str, Any] = {"ids": [np.zeros(1 << 20, np.int32)], "logprobs": [np.zeros(0, np.float32)]}
    for number in range(20):
        stream.put(samples(number, group_size=1), one)
        stream.free_unused()
        if number >= 5:
            assert get(stream, TASK, BatchRequest(1)) is not None
            stream.metadata.commit(number - 4, "me", 0.0)
            stream.free_unused()
    assert 5 <= len(files(tmp_path)) <= 8  # without reuse 20
    stream.close()
    assert files(tmp_path) == set()


def test_a_writer_does_not_overwrite_blocks_that_are_not_freed(tmp_path: Path) -> None:
    writer, reader = SegmentWriter(tmp_path, "0" * 16), SegmentReader(tmp_path)
    kept, view = writer.allocate(1000)
    view[:] = b"k" * 1000
    for _ in range(20):
        place, view = writer.allocate(SEGMENT_BYTES - 2000)
        view[:] = b"x" * (SEGMENT_BYTES - 2000)
        writer.free(place.segment)
    assert bytes(reader.view(kept)) == b"k" * 1000


def test_a_closed_stream_leaves_no_segments(stream: SampleStream, tmp_path: Path) -> None:
    SegmentWriter(tmp_path, "a" * 16).allocate(8)  # by a client that is still connected
    put(stream, 3)
    assert len(files(tmp_path)) == 2
    stream.close()
    assert files(tmp_path) == set()
