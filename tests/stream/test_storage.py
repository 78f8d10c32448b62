"""A stream in one process: blocks are freed after the last consumer, and persist across restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.sample_rows import ALL, FIELDS, columns, group, numbers, rewards, row

from dora.errors import StreamError
from dora.stream.metadata import BatchRequest
from dora.stream.schema import StreamBatch
from dora.stream.storage import SampleStream, SegmentReader, SegmentWriter


def put(stream: SampleStream, which: Sequence[int], version: int = 0) -> range:
    indices = stream.put([row(n, version) for n in which], columns(which))
    assert indices is not None
    stream.flush()
    return indices


def get(stream: SampleStream, consumer: str, request: BatchRequest = ALL) -> StreamBatch | None:
    lease = stream.lease(consumer, "me", request, 0.0)
    return None if lease is None else stream.batch(lease)


def consume(stream: SampleStream, consumer: str, request: BatchRequest = ALL) -> list[int]:
    batch = get(stream, consumer, request)
    if batch is None:
        return []
    found = numbers(batch)
    stream.commit(batch.lease, "me", 0.0)
    stream.flush()
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if "-" in path.name and "sqlite" not in path.name}


@pytest.fixture
def stream(tmp_path: Path) -> SampleStream:
    made = SampleStream(FIELDS, tmp_path)
    made.register_consumer("reward", ["ids"])
    made.register_consumer("actor", ["ids", "logprobs", "reward"], group_size=2)
    return made


def test_a_row_has_the_columns_of_two_producers(stream: SampleStream) -> None:
    indices = put(stream, [0, 1, 3])
    assert consume(stream, "reward") == [0, 1, 3]
    assert get(stream, "actor") is None
    stream.fill([*indices][::-1], rewards([3, 1, 0]))
    batch = get(stream, "actor")
    assert batch is not None
    assert numbers(batch) == [0, 1]
    assert [float(value) for value in batch.rows("reward")] == [0.0, 1.0]
    assert batch.column("reward").values.tolist() == [0.0, 1.0]
    assert batch.num_tokens == [0, 1]
    assert batch.groups == [group(0)] * 2


def test_a_batch_has_only_the_columns_that_its_consumer_needs(stream: SampleStream) -> None:
    put(stream, [0])
    batch = get(stream, "reward")
    assert batch is not None
    assert numbers(batch) == [0]
    with pytest.raises(KeyError):
        batch.rows("routes")


def test_a_refused_request_leaves_the_stream_unchanged(stream: SampleStream) -> None:
    put(stream, [0, 1])
    bad: tuple[Callable[[], Any], ...] = (
        lambda: stream.put([row(1)], columns([1])),
        lambda: stream.put([row(2)], {"ids": [np.zeros(2)]}),
        lambda: stream.fill([0], columns([0])),
        lambda: stream.fill([9], rewards([9])),
        lambda: stream.commit(1, "me", 0.0),
    )
    before = len(stream.metadata.rows), stream.metadata.num_bytes
    for request in bad:
        with pytest.raises(StreamError):
            request()
    assert (len(stream.metadata.rows), stream.metadata.num_bytes) == before
    assert consume(stream, "reward") == [0, 1]


def test_a_full_stream_accepts_columns_but_no_new_rows(tmp_path: Path) -> None:
    stream = SampleStream(FIELDS, tmp_path, max_bytes=300)
    stream.register_consumer("actor", ["ids", "reward"], group_size=2)
    indices = put(stream, [0, 1])
    assert stream.put([row(2)], columns([2])) is None
    stream.fill(indices, rewards([0, 1]))
    assert consume(stream, "actor") == [0, 1]
    assert put(stream, [2, 3]) == range(2, 4)


def test_segments_are_reused(tmp_path: Path) -> None:
    stream = SampleStream(FIELDS, tmp_path)
    stream.register_consumer("reward", ["ids"])
    one: dict[str, Any] = {"ids": [np.zeros(1 << 20, np.int32)], "logprobs": [np.zeros(0, np.float32)]}
    for number in range(20):
        stream.put([row(number)], one)
        stream.flush()
        if number >= 5:
            assert get(stream, "reward", BatchRequest(1)) is not None
            stream.commit(number - 4, "me", 0.0)
            stream.flush()
    assert 5 <= len(files(tmp_path)) <= 8  # without reuse 20
    stream.close()
    assert files(tmp_path) == set()


def test_a_writer_does_not_overwrite_blocks_that_are_not_freed(tmp_path: Path) -> None:
    writer, reader = SegmentWriter(tmp_path, "0" * 16, segment_bytes=4096), SegmentReader(tmp_path)
    kept, view = writer.allocate(1000)
    view[:] = b"k" * 1000
    for _ in range(20):
        place, view = writer.allocate(3000)
        view[:] = b"x" * 3000
        writer.free(place.segment)
    assert bytes(reader.view(kept)) == b"k" * 1000
    with pytest.raises(ValueError, match="exceeds its segment"):
        reader.view(kept._replace(num_bytes=5000))


def test_a_persistent_stream_is_restored(tmp_path: Path) -> None:
    def open_stream() -> SampleStream:
        return SampleStream(FIELDS, tmp_path, metadata_db=tmp_path / "samples.sqlite")

    stream = open_stream()
    stream.register_consumer("reward", ["ids"])
    stream.register_consumer("actor", ["ids", "reward"], group_size=2)
    put(stream, [*range(6)])
    assert consume(stream, "reward", BatchRequest(3)) == [0, 1, 2]
    stream.fill([0, 1, 4, 5], rewards([0, 1, 4, 5]))
    assert consume(stream, "actor", BatchRequest(2)) == [0, 1]
    assert get(stream, "reward", BatchRequest(2)) is not None  # on lease when the process exits
    stream.clear([group(2)])
    with pytest.raises(StreamError, match=r"samples.sqlite is in use .*: one stream at a time"):
        open_stream()
    stream.close()

    again = open_stream()
    assert [*again.metadata.rows] == [2, 3]
    assert consume(again, "reward") == [3]
    again.fill([2, 3], rewards([2, 3]))
    assert consume(again, "actor") == [2, 3]
    assert put(again, [6, 7]) == range(6, 8)
    again.close()

    last = open_stream()
    assert consume(last, "reward") == [6, 7]
    with pytest.raises(StreamError, match="row 0/3/0 exists already"):
        put(last, [6])
    last.close()
    with pytest.raises(StreamError, match="is of a stream with other fields"):
        SampleStream(FIELDS[:2], tmp_path, metadata_db=tmp_path / "samples.sqlite")


def test_indices_are_unique_across_restarts(tmp_path: Path) -> None:
    for restart in range(3):
        stream = SampleStream(FIELDS, tmp_path, metadata_db=tmp_path / "samples.sqlite")
        stream.register_consumer("reward", ["ids"])
        assert put(stream, [restart, restart + 10]) == range(2 * restart, 2 * restart + 2)
        assert consume(stream, "reward") == [restart, restart + 10]
        stream.close()
    assert len(files(tmp_path)) <= 1
