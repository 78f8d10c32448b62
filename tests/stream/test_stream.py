"""A stream in one process: bytes are freed after the last consumer, spilled, and found again."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.rows import FIELDS, columns, group, numbers, rewards, row

from dora.errors import StreamError
from dora.stream import segments
from dora.stream.batch import Batch
from dora.stream.lines import Want
from dora.stream.segments import Arena, Reader
from dora.stream.stream import Stream

ALL = Want(num_rows=99)


def put(stream: Stream, which: Sequence[int], version: int = 0) -> range:
    indices = stream.put([row(n, version) for n in which], columns(which))
    assert indices is not None
    stream.settle()
    return indices


def get(stream: Stream, consumer: str, want: Want = ALL) -> Batch | None:
    lease = stream.lease(consumer, "me", want, 0.0)
    return None if lease is None else stream.batch(lease)


def consume(stream: Stream, consumer: str, want: Want = ALL) -> list[int]:
    batch = get(stream, consumer, want)
    if batch is None:
        return []
    found = numbers(batch)
    stream.commit(batch.lease, "me", 0.0)
    stream.settle()
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if "-" in path.name and "sqlite" not in path.name}


@pytest.fixture(params=["memory", "files"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Stream:
    made = Stream(FIELDS, None if request.param == "memory" else tmp_path)
    made.declare("reward", ["ids"])
    made.declare("actor", ["ids", "logprobs", "reward"], group_size=2)
    return made


def test_columns_written_by_two_producers_meet_in_a_row(stream: Stream) -> None:
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


def test_a_consumer_is_handed_the_columns_it_needs_and_no_others(stream: Stream) -> None:
    put(stream, [0])
    batch = get(stream, "reward")
    assert batch is not None
    assert numbers(batch) == [0]
    with pytest.raises(KeyError):
        batch.rows("routes")


def test_what_is_refused_leaves_the_stream_as_it_was(stream: Stream) -> None:
    put(stream, [0, 1])
    bad: tuple[Callable[[], Any], ...] = (
        lambda: stream.put([row(1)], columns([1])),
        lambda: stream.put([row(2)], {"ids": [np.zeros(2)]}),
        lambda: stream.fill([0], columns([0])),
        lambda: stream.fill([9], rewards([9])),
        lambda: stream.commit(1, "me", 0.0),
    )
    before = len(stream.ledger.rows), stream.ledger.num_bytes
    for request in bad:
        with pytest.raises(StreamError):
            request()
    assert (len(stream.ledger.rows), stream.ledger.num_bytes) == before
    assert consume(stream, "reward") == [0, 1]


def test_a_full_stream_takes_columns_of_its_rows_but_no_new_rows() -> None:
    stream = Stream(FIELDS, max_rows=2)
    stream.declare("actor", ["ids", "reward"], group_size=2)
    indices = put(stream, [0, 1])
    assert stream.put([row(2)], columns([2])) is None
    stream.fill(indices, rewards([0, 1]))
    assert consume(stream, "actor") == [0, 1]
    assert put(stream, [2, 3]) == range(2, 4)


def test_segments_are_used_again_and_not_more_than_needed(tmp_path: Path) -> None:
    stream = Stream(FIELDS, tmp_path)
    stream.declare("reward", ["ids"])
    one: dict[str, Any] = {"ids": [np.zeros(1 << 20, np.int32)], "logprobs": [np.zeros(0, np.float32)]}
    for number in range(20):
        stream.put([row(number)], one)
        stream.settle()
        if number >= 5:
            assert get(stream, "reward", Want(1)) is not None
            stream.commit(number - 4, "me", 0.0)
            stream.settle()
    assert 5 <= len(files(tmp_path)) <= 8  # without reuse 20
    stream.close()
    assert files(tmp_path) == set()


def test_an_arena_does_not_write_over_what_somebody_may_still_read(tmp_path: Path) -> None:
    arena, reader = Arena(tmp_path, "0" * 16, segment_bytes=4096), Reader(tmp_path)
    kept, view = arena.reserve(1000)
    view[:] = b"k" * 1000
    for _ in range(20):
        place, view = arena.reserve(3000)
        view[:] = b"x" * 3000
        arena.release(place.segment)
    assert bytes(reader.view(kept)) == b"k" * 1000
    with pytest.raises(ValueError, match="ends behind its segment"):
        reader.view(kept._replace(num_bytes=5000))


def test_what_there_is_no_memory_for_is_spilled_and_read_from_there(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    stream = Stream(FIELDS, memory, memory_bytes=1000, spill=disk)
    stream.declare("reward", ["ids"])
    for number in range(30):
        put(stream, [number])
    assert files(disk)
    assert consume(stream, "reward") == [*range(30)]
    assert stream.ledger.num_bytes == 0


def test_what_cannot_be_spilled_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(path: Path, num_bytes: int) -> mmap.mmap:
        if is_full and path.parent == disk:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make_segment(path, num_bytes)

    make_segment, is_full = segments._make, True
    monkeypatch.setattr(segments, "_make", make)
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    stream = Stream(FIELDS, memory, memory_bytes=500, spill=disk)
    stream.declare("reward", ["ids"])
    for number in range(20):
        is_full = number < 10
        put(stream, [number])
        assert bool(files(disk)) != is_full
    assert consume(stream, "reward") == [*range(20)]


def test_a_stream_goes_on_where_its_process_ended(tmp_path: Path) -> None:
    def open_again() -> Stream:
        return Stream(FIELDS, tmp_path, record=tmp_path / "samples.sqlite")

    stream = open_again()
    stream.declare("reward", ["ids"])
    stream.declare("actor", ["ids", "reward"], group_size=2)
    put(stream, [*range(6)])
    assert consume(stream, "reward", Want(3)) == [0, 1, 2]
    stream.fill([0, 1, 4, 5], rewards([0, 1, 4, 5]))
    assert consume(stream, "actor", Want(2)) == [0, 1]
    assert get(stream, "reward", Want(2)) is not None  # on lease, when everything dies
    stream.clear([group(2)])
    with pytest.raises(StreamError, match=r"samples.sqlite is in use .*: one storage keeps one record"):
        open_again()
    stream.close()

    again = open_again()
    assert [*again.ledger.rows] == [2, 3]
    assert consume(again, "reward") == [3]
    again.fill([2, 3], rewards([2, 3]))
    assert consume(again, "actor") == [2, 3]
    assert put(again, [6, 7]) == range(6, 8)
    again.close()

    last = open_again()
    assert consume(last, "reward") == [6, 7]
    with pytest.raises(StreamError, match="row 0/3/0 is here already"):
        put(last, [6])
    last.close()
    with pytest.raises(StreamError, match="keeps a stream of other fields"):
        Stream(FIELDS[:2], tmp_path, record=tmp_path / "samples.sqlite")


def test_indices_are_never_given_twice(tmp_path: Path) -> None:
    for life in range(3):
        stream = Stream(FIELDS, tmp_path, record=tmp_path / "samples.sqlite")
        stream.declare("reward", ["ids"])
        assert put(stream, [life, life + 10]) == range(2 * life, 2 * life + 2)
        assert consume(stream, "reward") == [life, life + 10]
        stream.close()
    assert len(files(tmp_path)) <= 1


def test_a_stream_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="needs a folder"):
        Stream(FIELDS, record=tmp_path / "samples.sqlite")
    with pytest.raises(StreamError, match="memory_bytes and spill"):
        Stream(FIELDS, tmp_path, memory_bytes=5)
