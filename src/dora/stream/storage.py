"""Storage of the stream: its columns in shared memory, and optionally its metadata in an SQLite file.

`SampleStream` is the stream within one process. Columns are in segments, files of a folder that every process
of the host can map. In a memory file system they outlive the process, on a disk also the host.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import sqlite3
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError
from dora.full_disk import is_full
from dora.stream.metadata import (
    BatchRequest,
    Block,
    BlockLocation,
    MetadataController,
    SampleMeta,
    StreamLease,
    StreamRow,
)
from dora.stream.schema import ALIGNMENT, BatchPart, BlockPacker, ColumnData, Field, StreamBatch


class SampleStream:
    """Rows of declared fields for registered consumers. No method waits.

    A server calls `flush` before it replies to any request, so that what it confirms is durable.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        folder: Path,
        *,
        metadata_db: Path | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Blocks are in files of `folder`; `max_bytes` limits their total size.

        With `metadata_db`, an SQLite file, the stream survives its process: opening it again with the same
        arguments restores rows, consumers and consumption status. Raises StreamError.
        """
        self.fields = {field.name: field for field in fields}
        self.folder = folder
        self.metadata = MetadataController(self.fields, max_bytes)
        self._writer = SegmentWriter(folder, secrets.token_hex(8))
        self._reader = SegmentReader(folder)
        self._num_blocks: Counter[str] = Counter()  # by segment of other owners
        self._removed_owners: set[str] = set()
        self._reusable: dict[str, Counter[str]] = defaultdict(Counter)  # by owner: freed blocks by segment
        self._database = None if metadata_db is None else MetadataDatabase(metadata_db, self.fields)
        if self._database is not None:
            try:
                self._restore(self._database)
            except StreamError:
                self._database.close()
                raise

    def register_consumer(self, name: str, fields: Sequence[str], **rules: Any) -> None:
        """Add a consumer; arguments as for `MetadataController.register_consumer`."""
        is_new = name not in self.metadata.consumers
        self.metadata.register_consumer(name, fields, **rules)
        if self._database is not None and is_new:
            # A block may name rows that all earlier consumers consumed: the new one must not get them back.
            self._database.add_consumed(None, self._database.removed_rows(self.metadata.rows))
            self._database.add_consumer(name, {"fields": [*fields], **rules})

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> range | None:
        """Add rows with their first columns; their indices, None if it is full. Raises StreamError."""
        packer = BlockPacker(self.fields, columns, len(samples))
        self.metadata.check_new(samples)
        if not self.metadata.has_room(packer.num_bytes):
            return None
        try:
            location = self._write(packer)
        except OSError as error:
            if not is_full(error):
                raise
            return None
        return self.put_block(samples, packer.names, location)

    def put_block(
        self, samples: Sequence[SampleMeta], names: Sequence[str], location: BlockLocation
    ) -> range | None:
        """Add rows as `put`, with a block that a client has written."""
        self.metadata.field_mask(names)
        self.metadata.check_new(samples)
        if not self.metadata.has_room(location.num_bytes):
            return None
        block = self._make_block(names, len(samples), location)
        indices = self.metadata.add(samples, block)
        if self._database is not None:
            self._database.add_block(block, indices, samples)
        return indices

    def fill(self, indices: Sequence[int], columns: ColumnData) -> None:
        """Add columns to rows, whatever `max_bytes`. Raises StreamError; OSError for a full disk."""
        packer = BlockPacker(self.fields, columns, len(indices))
        self.metadata.check_fill(indices, packer.names)
        self.fill_block(indices, packer.names, self._write(packer))

    def fill_block(self, indices: Sequence[int], names: Sequence[str], location: BlockLocation) -> None:
        """Add columns as `fill`, with a block that a client has written."""
        self.metadata.check_fill(indices, names)
        block = self._make_block(names, len(indices), location)
        self.metadata.fill(indices, block)
        if self._database is not None:
            self._database.add_block(block, indices, [self.metadata.rows[index] for index in indices])

    def lease(self, consumer: str, client: str, request: BatchRequest, now_s: float) -> StreamLease | None:
        """Lease the requested rows; None while they are not ready. Raises StreamError."""
        return self.metadata.lease(consumer, client, request, now_s)

    def batch(self, lease: StreamLease) -> StreamBatch:
        """The rows of a lease, with views of the columns its consumer needs."""
        parts = [
            BatchPart(block.names, block.num_rows, self.view(block), np.array(pairs, np.int32).reshape(-1, 2))
            for block, pairs in lease.blocks.items()
        ]
        return StreamBatch(lease.lease_id, encode_lease(lease), self.fields, parts)

    def view(self, block: Block) -> memoryview:
        """The bytes of a block."""
        return self._reader.view(block.location)

    def commit(self, lease_id: int, client: str, now_s: float) -> None:
        """Mark the rows of a lease as consumed. Raises StreamError."""
        lease = self.metadata.commit(lease_id, client, now_s)
        if self._database is not None:
            self._database.add_consumed(lease.consumer.name, [row.index for row in lease.rows])

    def clear(self, groups: Iterable[GroupId]) -> None:
        """Remove groups, whatever their status."""
        indices = self.metadata.clear(groups)
        if self._database is not None:
            self._database.add_consumed(None, indices)

    def flush(self) -> None:
        """Make the metadata durable, then free unused blocks.

        Bytes are overwritten or removed only after the database has deleted their entry.
        """
        freed = []
        while self.metadata.freed_blocks:
            block = self.metadata.freed_blocks.pop()
            freed.append(block)
            if self._database is not None:
                self._database.delete_block(block)
        if self._database is not None:
            self._database.commit()
        for block in freed:
            self._free(block.location.segment)

    def take_reusable(self, owner: str) -> Counter[str]:
        """Number of freed blocks by segment of an owner since the last call, for `SegmentWriter.free`."""
        return self._reusable.pop(owner, Counter())

    def remove_owner(self, owner: str) -> None:
        """The owner has exited: remove each of its segments once it is empty."""
        self._removed_owners.add(owner)
        self._reusable.pop(owner, None)
        for path in self.folder.glob(f"{owner}-*"):
            self._remove_if_empty(path.name)

    def has_owner(self, owner: str) -> bool:
        """Whether the id is the stream's own, or that of a former client."""
        return owner == self._writer.owner or owner in self._removed_owners

    def close(self) -> None:
        """Flush. Without a metadata database, remove all segments, also those of clients."""
        self.flush()
        if self._database is not None:
            self._database.close()
            return
        self._writer.close()
        with contextlib.suppress(FileNotFoundError):  # the folder has been removed
            for path in self.folder.iterdir():
                if is_segment_name(path.name):
                    path.unlink(missing_ok=True)

    def _write(self, packer: BlockPacker) -> BlockLocation:
        location, view = self._writer.allocate(packer.num_bytes)
        packer.write(view)
        return location

    def _make_block(self, names: Sequence[str], num_rows: int, location: BlockLocation) -> Block:
        self._count(location.segment)
        return Block(tuple(names), num_rows, location)

    def _count(self, segment: str) -> None:
        if segment_owner(segment) != self._writer.owner:
            self._num_blocks[segment] += 1

    def _free(self, segment: str) -> None:
        """One block of the segment is unused."""
        owner = segment_owner(segment)
        if owner == self._writer.owner:
            self._writer.free(segment)
            return
        self._num_blocks[segment] -= 1
        if owner in self._removed_owners:
            self._remove_if_empty(segment)
        else:
            self._reusable[owner][segment] += 1

    def _remove_if_empty(self, segment: str) -> None:
        if self._num_blocks[segment] <= 0:
            del self._num_blocks[segment]
            if is_segment_name(segment):
                (self.folder / segment).unlink(missing_ok=True)

    def _restore(self, database: MetadataDatabase) -> None:
        """Load rows, consumers and consumption status; all former clients have exited."""
        for block, indices, samples in database.blocks():
            self._check_segment(block.location)
            self._count(block.location.segment)
            self._removed_owners.add(segment_owner(block.location.segment))
            self.metadata.restore(indices, samples, block)
        for name, rules in database.consumers():
            self.metadata.register_consumer(name, **rules)
        for consumer, indices in database.consumed():
            self.metadata.restore_consumed(consumer, indices)
        for path in self.folder.iterdir():
            if is_segment_name(path.name):
                self._removed_owners.add(segment_owner(path.name))
                self._remove_if_empty(path.name)
        self.flush()

    def _check_segment(self, location: BlockLocation) -> None:
        """Raises StreamError if the segment of a persisted block is missing or truncated."""
        with contextlib.suppress(FileNotFoundError):
            size = (self.folder / location.segment).stat().st_size
            if size >= location.offset + location.num_bytes:
                return
        raise StreamError(
            f"the metadata names {location}, which is missing in {self.folder}: restore the segments "
            "(a memory file system is empty after a loss of power), or start with a new metadata_db"
        )


def encode_rows(indices: Iterable[int], rows: Sequence[SampleMeta | StreamRow]) -> NDArray[np.int64]:
    """[n, 6]: index, epoch, dataset row, sibling, version, number of tokens."""
    flat = [(i, *row.request, row.version, row.num_tokens) for i, row in zip(indices, rows, strict=True)]
    return np.array(flat, np.int64).reshape(-1, 6)


def encode_lease(lease: StreamLease) -> NDArray[np.int64]:
    """The rows of a lease [n, 6], as `encode_rows`."""
    return encode_rows([row.index for row in lease.rows], lease.rows)


def decode_samples(numbers: NDArray[np.int64]) -> list[SampleMeta]:
    """From [n, 5]: `encode_rows` without the index."""
    return [
        SampleMeta(RequestId(epoch, row, sibling), version, num_tokens)
        for epoch, row, sibling, version, num_tokens in numbers.tolist()
    ]


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
_COMMITS_PER_PRUNE = 1000


class RestoredBlock(NamedTuple):
    """A persisted block with its rows."""

    block: Block
    indices: list[int]
    samples: list[SampleMeta]


class MetadataDatabase:
    """An SQLite file with blocks, consumers and consumption status. Leases are not stored.

    Writes are collected in one transaction until `commit`. They survive the crash of the process, not a loss
    of power.
    """

    def __init__(self, path: Path, fields: Mapping[str, Field]) -> None:
        """Raises StreamError if the file is of a stream with other fields, or is open in another process."""
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        self._db.execute("pragma locking_mode = exclusive")
        try:
            self._db.execute("pragma journal_mode = wal")
        except sqlite3.OperationalError as error:
            self._db.close()
            raise StreamError(f"{path} is in use ({error}): one stream at a time can open it") from error
        self._db.execute("pragma synchronous = off")
        self._db.executescript(_SCHEMA)
        declared = {(f.name, f.dtype, json.dumps(f.shape)) for f in fields.values()}
        known = {*self._db.execute("select name, dtype, shape from stream_fields")}
        if known and known != declared:
            self._db.close()
            raise StreamError(f"{path} is of a stream with other fields; use another file")
        self._db.executemany("insert or ignore into stream_fields values (?, ?, ?)", sorted(declared))
        (number,) = self._db.execute("select coalesce(max(number), 0) from stream_blocks").fetchone()
        self._last_number: int = number
        self._numbers: dict[Block, int] = {}
        self._num_commits = 0

    def add_consumer(self, name: str, declaration: Mapping[str, Any]) -> None:
        """Store a consumer with the arguments of its registration."""
        self._write("insert or ignore into stream_consumers values (?, ?)", (name, json.dumps(declaration)))

    def removed_rows(self, rows: Mapping[int, StreamRow]) -> list[int]:
        """Indices that stored blocks name and that are not among the existing `rows`."""
        blobs = (blob for (blob,) in self._db.execute("select rows from stream_blocks"))
        named = {index for blob in blobs for index in np.frombuffer(blob, np.int64)[::6].tolist()}
        return sorted(named - rows.keys())

    def add_block(self, block: Block, indices: Sequence[int], rows: Sequence[SampleMeta | StreamRow]) -> None:
        """Store a block and the identities of its rows."""
        self._last_number += 1
        self._numbers[block] = self._last_number
        values = (self._last_number, json.dumps(block.names), min(indices), *block.location)
        blob = encode_rows(indices, rows).tobytes()
        self._write("insert into stream_blocks values (?, ?, ?, ?, ?, ?, ?)", (*values, blob))

    def delete_block(self, block: Block) -> None:
        """Delete a block that is no longer referenced."""
        self._write("delete from stream_blocks where number = ?", (self._numbers.pop(block),))

    def add_consumed(self, consumer: str | None, indices: Sequence[int]) -> None:
        """Store that a consumer committed rows; None: the rows were cleared."""
        if not indices:
            return
        blob = np.asarray(indices, np.int64).tobytes()
        self._write("insert into stream_done values (null, ?, ?, ?)", (consumer, max(indices), blob))
        self._num_commits += 1
        if self._num_commits % _COMMITS_PER_PRUNE == 0:
            # Delete what no block can name again; the newest entry stays, because it has the last index.
            newest = "(select max(last_row) from stream_done)"
            oldest = "select min(first_row) from stream_blocks"
            self._write(f"delete from stream_done where last_row < coalesce(({oldest}), {newest})", ())

    def commit(self) -> None:
        """Make all writes durable."""
        if self._db.in_transaction:
            self._db.execute("commit")

    def blocks(self) -> Iterator[RestoredBlock]:
        """The stored blocks, in the order in which they were added."""
        sql = "select number, names, segment, offset, num_bytes, rows from stream_blocks order by number"
        for number, names, segment, offset, num_bytes, blob in self._db.execute(sql):
            rows = np.frombuffer(blob, np.int64).reshape(-1, 6)
            block = Block(tuple(json.loads(names)), len(rows), BlockLocation(segment, offset, num_bytes))
            self._numbers[block] = number
            yield RestoredBlock(block, rows[:, 0].tolist(), decode_samples(rows[:, 1:]))

    def consumers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and declarations of the stored consumers, in order."""
        for name, declaration in self._db.execute("select * from stream_consumers order by rowid"):
            yield name, json.loads(declaration)

    def consumed(self) -> Iterator[tuple[str | None, list[int]]]:
        """The stored calls of `add_consumed`, in order."""
        for consumer, blob in self._db.execute("select consumer, indices from stream_done order by number"):
            yield consumer, np.frombuffer(blob, np.int64).tolist()

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        if not self._db.in_transaction:
            self._db.execute("begin")
        self._db.execute(sql, values)


SEGMENT_BYTES = 8 << 20
KEPT_BYTES = 256 << 20  # of empty segments that a writer keeps for reuse: their pages are already allocated
MAPPED_BYTES = 512 << 20  # of segments that a reader keeps mapped, although their owner may have removed them
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}-\d{1,9}")  # OWNER-NUMBER


class SegmentWriter:
    """Allocates blocks in the segments of one owner; no two processes write to one segment.

    A segment is filled from front to back and reused when all its blocks are free: both take constant time.
    """

    def __init__(self, folder: Path, owner: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`owner`: 16 hexadecimal digits, different for each writer of the folder."""
        self.owner, self._folder, self._segment_bytes = owner, folder, segment_bytes
        self._maps: dict[str, mmap.mmap] = {}
        self._num_blocks: Counter[str] = Counter()
        self._current, self._used_bytes = "", 0
        self._num_segments = 0

    def allocate(self, num_bytes: int) -> tuple[BlockLocation, memoryview]:
        """A new block and its bytes. Raises OSError if the file system is full."""
        if not self._current or self._used_bytes + num_bytes > len(self._maps[self._current]):
            previous, self._current = self._current, self._empty_segment(num_bytes)
            self._used_bytes = 0
            if previous:
                self._trim(previous)
        location = BlockLocation(self._current, self._used_bytes, num_bytes)
        self._used_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._num_blocks[self._current] += 1
        return location, memoryview(self._maps[self._current])[location.offset : location.offset + num_bytes]

    def free(self, segment: str, num_blocks: int = 1) -> None:
        """Free blocks of a segment; their bytes may change from now on."""
        self._num_blocks[segment] -= num_blocks
        if segment == self._current:
            self._used_bytes = self._used_bytes if self._num_blocks[segment] else 0
        else:
            self._trim(segment)

    def close(self) -> None:
        """Remove all segments; processes that have one mapped keep it."""
        for segment in self._maps:
            (self._folder / segment).unlink(missing_ok=True)
        self._maps.clear()
        self._current = ""

    def _empty_segment(self, num_bytes: int) -> str:
        """The smallest unused segment of at least `num_bytes`, or a new one."""
        fitting = [s for s in self._unused() if len(self._maps[s]) >= num_bytes]
        if fitting:
            return min(fitting, key=lambda s: len(self._maps[s]))
        self._num_segments += 1
        name = f"{self.owner}-{self._num_segments}"
        self._maps[name] = _create_segment(self._folder / name, max(self._segment_bytes, num_bytes))
        return name

    def _unused(self) -> list[str]:
        return [s for s in self._maps if not self._num_blocks[s] and s != self._current]

    def _trim(self, segment: str) -> None:
        """Remove a segment if it is unused and enough unused bytes are kept."""
        if not self._num_blocks[segment] and sum(len(self._maps[s]) for s in self._unused()) > KEPT_BYTES:
            (self._folder / segment).unlink(missing_ok=True)
            del self._maps[segment], self._num_blocks[segment]


class SegmentReader:
    """Maps segments of any owner, read-only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def view(self, location: BlockLocation) -> memoryview:
        """The bytes of a block. Raises OSError or ValueError if they do not exist."""
        segment = location.segment
        if segment not in self._maps:
            with (self._folder / segment).open("rb") as file:
                self._maps[segment] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            while len(self._maps) > 1 and sum(map(len, self._maps.values())) > MAPPED_BYTES:
                self._maps.popitem(last=False)  # existing views keep it mapped
        self._maps.move_to_end(segment)
        end = location.offset + location.num_bytes
        if end > len(self._maps[segment]):
            raise ValueError(f"{location} exceeds its segment of {len(self._maps[segment])} bytes")
        return memoryview(self._maps[segment])[location.offset : end]


def _create_segment(path: Path, num_bytes: int) -> mmap.mmap:
    """Create, allocate and map a file. Raises OSError if the file system is full."""
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # else a full file system raises SIGBUS at the first write
        return mmap.mmap(fd, num_bytes)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def segment_owner(segment: str) -> str:
    return segment.partition("-")[0]


def is_segment_name(name: str) -> bool:
    """Whether a name is that of a segment, not the path of another file."""
    return _SEGMENT_NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def segment_size(path: Path) -> int:
    """Bytes of a segment, which never change. Raises OSError if it does not exist."""
    return path.stat().st_size
