"""A storage that is killed between two steps finds again what it had answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.stream.rows import FIELDS, columns, numbers, rewards, row

from dora.errors import StreamError
from dora.stream import keeper
from dora.stream.fields import Packing
from dora.stream.keeper import Keeper
from dora.stream.lines import Want
from dora.stream.segments import Arena, is_segment
from dora.stream.stream import Stream

ALL = Want(num_rows=99)
TASK = "reward"


class Killed(BaseException):
    """What was done until now is done; what was not is not."""


def die(*_: Any) -> NoReturn:
    raise Killed


def opened(folder: Path, **rules: Any) -> Stream:
    stream = Stream(FIELDS, folder, record=folder / "samples.sqlite", **rules)
    stream.declare(TASK, ["ids"])
    return stream


def put(stream: Stream, *which: int) -> None:
    assert stream.put([row(n) for n in which], columns(which)) is not None
    stream.settle()


def consume(stream: Stream, consumer: str, want: Want = ALL) -> list[int]:
    """Without settling."""
    lease = stream.lease(consumer, "me", want, 0.0)
    if lease is None:
        return []
    found = numbers(stream.batch(lease))
    stream.commit(lease.number, "me", 0.0)
    return found


def kill(stream: Stream, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it settles."""
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr({"Stream": Stream, "Keeper": Keeper}[owner], name, die)
        with pytest.raises(Killed):
            stream.settle()
    assert stream._keeper is not None
    stream._keeper._db.close()


def segments(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if is_segment(path.name)]


def put_by_a_client(stream: Stream, folder: Path, *which: int) -> None:
    """That is gone afterwards."""
    arena, packing = Arena(folder, "a" * 16), Packing(stream.fields, columns(which), len(which))
    place, view = arena.reserve(packing.num_bytes)
    packing.write(view)
    assert stream.admit([row(n) for n in which], packing.names, place) is not None
    stream.let_go(arena.owner)
    stream.settle()


def test_bytes_are_there_until_the_record_has_forgotten_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(tmp_path)
    put_by_a_client(stream, tmp_path, 3)
    assert consume(stream, TASK) == [3]
    kill(stream, "Keeper.commit", monkeypatch)
    again = opened(tmp_path)
    assert consume(again, TASK) == [3]  # for nobody was told that this was done
    kill(again, "Stream._release", monkeypatch)
    assert segments(tmp_path)
    last = opened(tmp_path)
    assert (len(last.ledger.rows), segments(tmp_path)) == (0, [])
    last.close()


def test_what_is_spilled_goes_where_the_record_names_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = tmp_path / "spilled"
    spill.mkdir()
    stream = opened(tmp_path, memory_bytes=0, spill=spill)
    put(stream, 3)
    assert consume(stream, TASK) == [3]
    assert stream.put([row(4)], columns([4])) is not None
    kill(stream, "Keeper.commit", monkeypatch)
    again = opened(tmp_path, memory_bytes=0, spill=spill)
    assert consume(again, TASK) == [3]
    assert again.put([row(4)], columns([4])) is not None
    kill(again, "Stream._release", monkeypatch)
    last = opened(tmp_path, memory_bytes=0, spill=spill)
    assert consume(last, TASK) == [4]
    last.close()


@pytest.mark.parametrize("num_bytes", [0, None])
def test_a_record_of_segments_that_are_lost_is_refused(tmp_path: Path, num_bytes: int | None) -> None:
    stream = opened(tmp_path)
    put(stream, 3)
    stream.close()
    (lost,) = segments(tmp_path)
    if num_bytes is None:
        (tmp_path / lost).unlink()
    else:
        (tmp_path / lost).write_bytes(b"")
    for _ in range(2):  # it does not keep the record for itself, either
        with pytest.raises(StreamError, match="put the segments back"):
            opened(tmp_path)


def test_a_late_consumer_is_not_served_dead_rows_after_a_restart(tmp_path: Path) -> None:
    stream = opened(tmp_path)
    put(stream, 0, 1, 2)
    assert consume(stream, TASK, Want(2)) == [0, 1]
    stream.declare("late", ["ids"])
    stream.close()
    again = opened(tmp_path)
    assert consume(again, "late") == [2]
    again.close()


def test_what_a_later_block_still_names_stays_consumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_NUM_BEFORE_PRUNING", 1)
    stream = opened(tmp_path)
    put(stream, 0, 1)
    put(stream, 2, 3, 4)
    stream.fill([1, 4], rewards([1, 4]))
    for num_rows in (2, 1):
        consume(stream, TASK, Want(num_rows))
        stream.settle()
    stream.close()
    again = opened(tmp_path)
    assert sorted(again.ledger.rows) == [3, 4]
    again.close()


def test_without_a_record_nothing_is_left(tmp_path: Path) -> None:
    stream = Stream(FIELDS, tmp_path)
    arena = Arena(tmp_path, "a" * 16)
    arena.reserve(8)  # by a client that is still there
    stream.put([row(3)], {"ids": [np.arange(3, 6, dtype=np.int32)]})
    stream.close()
    assert segments(tmp_path) == []
