"""What of a stream survives its process: an SQLite file that says where blocks are and who consumed what.

The bytes themselves are in the segments, which are files. A put is recorded before it is answered, and a
commit before its lease is gone; leases are not recorded, so those of a dead process are given back.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.records import RequestId
from dora.errors import StreamError
from dora.stream.fields import Field
from dora.stream.lines import Block, NewRow, Row
from dora.stream.segments import Place

_SCHEMA = """
create table if not exists stream_fields (name text primary key, dtype text not null, shape text not null);
create table if not exists stream_consumers (name text primary key, declaration text not null);
create table if not exists stream_blocks (
    number integer primary key, names text not null, first_row integer not null,
    segment text not null, offset integer not null, num_bytes integer not null, rows blob not null);
create index if not exists stream_first_rows on stream_blocks (first_row);
create table if not exists stream_done (
    number integer primary key, consumer text, last_row integer not null, indices blob not null);
"""
_NUM_BEFORE_PRUNING = 1000  # commits


class KeptBlock(NamedTuple):
    """A block of a former life with its rows."""

    block: Block
    indices: list[int]
    rows: list[NewRow]


def numbers_of(indices: Iterable[int], rows: Sequence[NewRow | Row]) -> NDArray[np.int64]:
    """[n, 6]: index, epoch, row and sibling of the request, version, number of tokens."""
    flat = [(i, *row.id, row.version, row.num_tokens) for i, row in zip(indices, rows, strict=True)]
    return np.array(flat, np.int64).reshape(-1, 6)


def rows_of(numbers: NDArray[np.int64]) -> list[NewRow]:
    """From [n, 5], without the indices."""
    return [NewRow(RequestId(e, r, s), version, num) for e, r, s, version, num in numbers.tolist()]


class Keeper:
    """Writes into one transaction, until `commit`."""

    def __init__(self, path: Path, fields: Mapping[str, Field]) -> None:
        """Raises StreamError if the file keeps a stream of other fields, or another storage has it."""
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        self._db.execute("pragma locking_mode = exclusive")
        try:
            self._db.execute("pragma journal_mode = wal")
        except sqlite3.OperationalError as error:
            self._db.close()
            raise StreamError(f"{path} is in use ({error}): one storage keeps one record") from error
        self._db.execute("pragma synchronous = off")  # survives the death of processes, not of the power
        self._db.executescript(_SCHEMA)
        declared = {(f.name, f.dtype, json.dumps(f.shape)) for f in fields.values()}
        known = {*self._db.execute("select name, dtype, shape from stream_fields")}
        if known and known != declared:
            self._db.close()
            raise StreamError(f"{path} keeps a stream of other fields; take another file")
        self._db.executemany("insert or ignore into stream_fields values (?, ?, ?)", sorted(declared))
        self._number: int = self._db.execute("select coalesce(max(number), 0) from stream_blocks").fetchone()[
            0
        ]
        self._numbers: dict[Block, int] = {}
        self._num_done = 0
        self._is_open = False

    def declare(self, name: str, declaration: Mapping[str, Any]) -> None:
        """A consumer, as the ledger was told of it."""
        self._write("insert or ignore into stream_consumers values (?, ?)", (name, json.dumps(declaration)))

    def gone(self, rows: Mapping[int, Row]) -> list[int]:
        """Indices that blocks still name, of rows that are not among those here."""
        blobs = (blob for (blob,) in self._db.execute("select rows from stream_blocks"))
        named = {index for blob in blobs for index in np.frombuffer(blob, np.int64)[::6].tolist()}
        return sorted(named - rows.keys())

    def put(self, block: Block, indices: Sequence[int], rows: Sequence[NewRow | Row]) -> None:
        """A block and its rows; rows that have others already are named again."""
        assert isinstance(block.place, Place)
        self._number += 1
        self._numbers[block] = self._number
        values = (self._number, json.dumps(block.names), min(indices), *block.place)
        blob = numbers_of(indices, rows).tobytes()
        self._write("insert into stream_blocks values (?, ?, ?, ?, ?, ?, ?)", (*values, blob))

    def moved(self, block: Block) -> None:
        """A block lies somewhere else now."""
        assert isinstance(block.place, Place)
        sql = "update stream_blocks set segment = ?, offset = ?, num_bytes = ? where number = ?"
        self._write(sql, (*block.place, self._numbers[block]))

    def freed(self, block: Block) -> None:
        self._write("delete from stream_blocks where number = ?", (self._numbers.pop(block),))

    def done(self, consumer: str | None, indices: Sequence[int]) -> None:
        """A consumer committed rows; None: they were cleared."""
        if not indices:
            return
        blob = np.asarray(indices, np.int64).tobytes()
        self._write("insert into stream_done values (null, ?, ?, ?)", (consumer, max(indices), blob))
        self._num_done += 1
        if self._num_done % _NUM_BEFORE_PRUNING == 0:  # what no block can name again, but never the newest
            newest = "(select max(last_row) from stream_done)"
            oldest = "select min(first_row) from stream_blocks"
            self._write(f"delete from stream_done where last_row < coalesce(({oldest}), {newest})", ())

    def commit(self) -> None:
        """Make it safe from the death of this process."""
        if self._is_open:
            self._db.execute("commit")
            self._is_open = False

    def blocks(self) -> Iterator[KeptBlock]:
        """Of a former life, in the order they were put."""
        sql = "select number, names, segment, offset, num_bytes, rows from stream_blocks order by number"
        for number, names, segment, offset, num_bytes, blob in self._db.execute(sql):
            numbers = np.frombuffer(blob, np.int64).reshape(-1, 6)
            place = Place(segment, offset, num_bytes)
            block = Block(tuple(json.loads(names)), len(numbers), num_bytes, place)
            self._numbers[block] = number
            yield KeptBlock(block, numbers[:, 0].tolist(), rows_of(numbers[:, 1:]))

    def consumers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Declared in a former life, in that order."""
        for name, declaration in self._db.execute("select * from stream_consumers order by rowid"):
            yield name, json.loads(declaration)

    def all_done(self) -> Iterator[tuple[str | None, list[int]]]:
        """Consumers and indices of a former life, in order."""
        for consumer, blob in self._db.execute("select consumer, indices from stream_done order by number"):
            yield consumer, np.frombuffer(blob, np.int64).tolist()

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        if not self._is_open:
            self._db.execute("begin")
            self._is_open = True
        self._db.execute(sql, values)
