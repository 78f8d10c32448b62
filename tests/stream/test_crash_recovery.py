"""A persistent stream that is killed at any point restores everything it has confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.stream.processes import TASK
from tests.stream.sample_rows import ALL, FIELDS, columns, numbers, rewards, row

from dora.errors import StreamError
from dora.stream import storage
from dora.stream.metadata import BatchRequest
from dora.stream.schema import BlockPacker
from dora.stream.storage import MetadataDatabase, SampleStream, SegmentWriter, is_segment_name


class Killed(BaseException):
    """Raised at the point where the process is killed."""


def raise_killed(*_: Any) -> NoReturn:
    raise Killed


def open_stream(folder: Path) -> SampleStream:
    stream = SampleStream(FIELDS, folder, metadata_db=folder / "samples.sqlite")
    stream.register_consumer(TASK, ["ids"])
    return stream


def put(stream: SampleStream, *which: int) -> None:
    assert stream.put([row(n) for n in which], columns(which)) is not None
    stream.flush()


def consume(stream: SampleStream, consumer: str, request: BatchRequest = ALL) -> list[int]:
    """Lease and commit, without a flush."""
    lease = stream.lease(consumer, "me", request, 0.0)
    if lease is None:
        return []
    found = numbers(stream.batch(lease))
    stream.commit(lease.lease_id, "me", 0.0)
    return found


def kill(stream: SampleStream, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the stream during a flush, at the given method."""
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(
            {"SampleStream": SampleStream, "MetadataDatabase": MetadataDatabase}[owner], name, raise_killed
        )
        with pytest.raises(Killed):
            stream.flush()
    assert stream._database is not None
    stream._database._db.close()


def segments(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if is_segment_name(path.name)]


def put_by_a_client(stream: SampleStream, folder: Path, *which: int) -> None:
    """The client disconnects afterwards."""
    writer, packer = SegmentWriter(folder, "a" * 16), BlockPacker(stream.fields, columns(which), len(which))
    location, view = writer.allocate(packer.num_bytes)
    packer.write(view)
    assert stream.put_block([row(n) for n in which], packer.names, location) is not None
    stream.remove_owner(writer.owner)
    stream.flush()


def test_blocks_are_freed_only_after_the_database_has_deleted_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream(tmp_path)
    put_by_a_client(stream, tmp_path, 3)
    assert consume(stream, TASK) == [3]
    kill(stream, "MetadataDatabase.commit", monkeypatch)
    again = open_stream(tmp_path)
    assert consume(again, TASK) == [3]  # the commit was not confirmed
    kill(again, "SampleStream._free", monkeypatch)
    assert segments(tmp_path)
    last = open_stream(tmp_path)
    assert (len(last.metadata.rows), segments(tmp_path)) == (0, [])
    last.close()


@pytest.mark.parametrize("num_bytes", [0, None])
def test_a_database_with_missing_segments_is_refused(tmp_path: Path, num_bytes: int | None) -> None:
    stream = open_stream(tmp_path)
    put(stream, 3)
    stream.close()
    (lost,) = segments(tmp_path)
    if num_bytes is None:
        (tmp_path / lost).unlink()
    else:
        (tmp_path / lost).write_bytes(b"")
    for _ in range(2):  # the file is not locked after the error
        with pytest.raises(StreamError, match="restore the segments"):
            open_stream(tmp_path)


def test_a_late_consumer_does_not_get_consumed_rows_after_a_restart(tmp_path: Path) -> None:
    stream = open_stream(tmp_path)
    put(stream, 0, 1, 2)
    assert consume(stream, TASK, BatchRequest(2)) == [0, 1]
    stream.register_consumer("late", ["ids"])
    stream.close()
    again = open_stream(tmp_path)
    assert consume(again, "late") == [2]
    again.close()


def test_rows_that_a_later_block_names_stay_consumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_COMMITS_PER_PRUNE", 1)
    stream = open_stream(tmp_path)
    put(stream, 0, 1)
    put(stream, 2, 3, 4)
    stream.fill([1, 4], rewards([1, 4]))
    for num_rows in (2, 1):
        consume(stream, TASK, BatchRequest(num_rows))
        stream.flush()
    stream.close()
    again = open_stream(tmp_path)
    assert sorted(again.metadata.rows) == [3, 4]
    again.close()


def test_without_a_database_no_segments_are_left(tmp_path: Path) -> None:
    stream = SampleStream(FIELDS, tmp_path)
    writer = SegmentWriter(tmp_path, "a" * 16)
    writer.allocate(8)  # by a client that is still connected
    stream.put([row(3)], {"ids": [np.arange(3, 6, dtype=np.int32)]})
    stream.close()
    assert segments(tmp_path) == []
