"""Storage of the stream: its columns in shared memory.

`SampleStream` is the stream within one process. Columns are in segments, files of a folder that every process
of the host can map.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dora.core.types import GroupId, RequestId
from dora.errors import StorageFullError, StreamError
from dora.full_disk import is_full
from dora.stream.metadata import (
    Block,
    BlockLocation,
    ConsumerDeclaration,
    MetadataController,
    SampleMeta,
    StreamLease,
)
from dora.stream.schema import ALIGNMENT, BatchPart, BlockPacker, ColumnData, Field, StreamBatch


class SampleStream:
    """The columns of groups; `metadata` leases the groups to consumers. No method waits."""

    def __init__(
        self, fields: Iterable[Field], consumers: Iterable[ConsumerDeclaration], folder: Path
    ) -> None:
        """Blocks are in files of `folder`. Raises StreamError for an invalid declaration."""
        fields, consumers = [*fields], [*consumers]
        _check_declarations(fields, consumers)
        self.fields = {field.name: field for field in fields}
        self.folder = folder  # as given, because the path of its socket must be short
        self.segments = folder.resolve()  # the same, also after the process changes to another folder
        self.metadata = MetadataController(self.fields, consumers)
        self._writer = SegmentWriter(self.segments, new_owner())
        self._reader = SegmentReader(self.segments)
        self._num_blocks: Counter[str] = Counter()  # by segment of other owners
        self._removed_owners: set[str] = set()
        self._reusable: dict[str, Counter[str]] = defaultdict(Counter)  # by owner: freed blocks by segment

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> None:
        """Add groups with their first columns. Raises StreamError and StorageFullError."""
        packer = BlockPacker(self.fields, columns)
        new = self.metadata.check_new(samples, packer.names, packer.num_rows)
        self.metadata.add(new, self._make_block(packer.names, packer.num_rows, self._write(packer)))

    def put_block(
        self, samples: Sequence[SampleMeta], names: Sequence[str], num_rows: int, location: BlockLocation
    ) -> None:
        """Add groups as `put`, with a block that a client has written."""
        new = self.metadata.check_new(samples, names, num_rows)
        self.metadata.add(new, self._make_block(names, num_rows, location))

    def fill(self, groups: Iterable[GroupId], columns: ColumnData) -> None:
        """Add columns to groups. Raises StreamError and StorageFullError."""
        packer = BlockPacker(self.fields, columns)
        found = self.metadata.check_fill(groups, packer.names, packer.num_rows)
        self.metadata.fill(found, self._make_block(packer.names, packer.num_rows, self._write(packer)))

    def fill_block(
        self, groups: Iterable[GroupId], names: Sequence[str], num_rows: int, location: BlockLocation
    ) -> None:
        """Add columns as `fill`, with a block that a client has written."""
        found = self.metadata.check_fill(groups, names, num_rows)
        self.metadata.fill(found, self._make_block(names, num_rows, location))

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

    def free_unused(self) -> None:
        """Free blocks without rows and leases."""
        while self.metadata.freed_blocks:
            self._free(self.metadata.freed_blocks.pop().location.segment)

    def take_reusable(self, owner: str) -> Counter[str]:
        """Number of freed blocks by segment of an owner since the last call, for `SegmentWriter.free`."""
        return self._reusable.pop(owner, Counter())

    def remove_owner(self, owner: str) -> None:
        """The owner has exited: remove each of its segments once it is empty."""
        self._removed_owners.add(owner)
        self._reusable.pop(owner, None)
        for path in self.segments.glob(f"{owner}-*"):
            self._remove_if_empty(path.name)

    def close(self) -> None:
        """Remove all segments, also those of clients."""
        self._writer.close()
        with contextlib.suppress(FileNotFoundError):  # the folder has been removed
            for path in self.segments.iterdir():
                if is_segment_name(path.name):
                    path.unlink(missing_ok=True)

    def _write(self, packer: BlockPacker) -> BlockLocation:
        try:
            location, view = self._writer.allocate(packer.num_bytes)
        except OSError as error:
            if is_full(error):
                raise storage_full_error(error, self.metadata.num_rows, self.metadata.num_bytes) from error
            raise
        packer.write(view)
        return location

    def _make_block(self, names: Sequence[str], num_rows: int, location: BlockLocation) -> Block:
        if segment_owner(location.segment) != self._writer.owner:
            self._num_blocks[location.segment] += 1
        return Block(tuple(names), num_rows, location)

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
            (self.segments / segment).unlink(missing_ok=True)


def _check_declarations(fields: Sequence[Field], consumers: Sequence[ConsumerDeclaration]) -> None:
    """Raises StreamError for repeated names, fields without numbers, and consumers that could not lease."""
    for names in ([field.name for field in fields], [consumer.name for consumer in consumers]):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise StreamError(f"{repeated[0]!r} is declared twice: use another name")
    for field in fields:
        dtype = np.dtype(field.dtype)
        if dtype.kind not in "biufc" or not dtype.isnative:
            raise StreamError(
                f"field {field.name!r}: dtype {field.dtype!r} has no numbers in this machine's byte order; "
                "use one such as '<i4', or 'u1' for text"
            )
    for consumer in consumers:
        if not consumer.fields or not consumer.lease_s > 0:
            raise StreamError(
                f"consumer {consumer.name!r}: {len(consumer.fields)} fields, lease_s = {consumer.lease_s:g}: "
                "it needs at least one field, and lease_s more than 0 s"
            )


def storage_full_error(error: OSError, num_rows: int, num_bytes: int) -> StorageFullError:
    """The error says how much is the stream's: other files may fill the file system."""
    return StorageFullError(f"{error}; the stream has {num_rows} rows, {num_bytes} bytes in all")


def encode_lease(lease: StreamLease) -> NDArray[np.int64]:
    """The rows of a lease [n, 4]: epoch, dataset row, sibling, version."""
    samples = (group.samples[sibling] for group, sibling in lease.rows)
    return np.array([(*sample.request, sample.version) for sample in samples], np.int64)


def encode_samples(samples: Sequence[SampleMeta]) -> NDArray[np.int64]:
    """[n, 5]: epoch, dataset row, sibling, version, number of tokens."""
    rows = [(*sample.request, sample.version, sample.num_tokens) for sample in samples]
    return np.array(rows, np.int64).reshape(-1, 5)


def decode_samples(numbers: NDArray[np.int64]) -> list[SampleMeta]:
    """The samples of `encode_samples`."""
    return [
        SampleMeta(RequestId(epoch, row, sibling), version, num_tokens)
        for epoch, row, sibling, version, num_tokens in numbers.tolist()
    ]


SEGMENT_BYTES = 8 << 20
KEPT_BYTES = 256 << 20  # of empty segments that a writer keeps for reuse: their pages are already allocated
MAPPED_BYTES = 512 << 20  # of segments that a reader keeps mapped, although their owner may have removed them
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}-\d{1,9}")  # OWNER-NUMBER


class SegmentWriter:
    """Allocates blocks in the segments of one owner; no two processes write to one segment.

    A segment is filled from front to back and reused when all its blocks are free: both take constant time.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        """`owner`: 16 hexadecimal digits, different for each writer of the folder."""
        self.owner, self._folder = owner, folder
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
        self._maps[name] = _create_segment(self._folder / name, max(SEGMENT_BYTES, num_bytes))
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
        """The bytes of a block. Raises OSError if its segment does not exist."""
        segment = location.segment
        if segment not in self._maps:
            with (self._folder / segment).open("rb") as file:
                self._maps[segment] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            while len(self._maps) > 1 and sum(map(len, self._maps.values())) > MAPPED_BYTES:
                self._maps.popitem(last=False)  # existing views keep it mapped
        self._maps.move_to_end(segment)
        return memoryview(self._maps[segment])[location.offset : location.offset + location.num_bytes]


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


def new_owner() -> str:
    """A new id of a writer of segments."""
    return secrets.token_hex(8)


def segment_owner(segment: str) -> str:
    return segment.partition("-")[0]


def is_segment_name(name: str) -> bool:
    """Whether a name is that of a segment, not the path of another file."""
    return _SEGMENT_NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def segment_size(path: Path) -> int:
    """Bytes of a segment, which never change. Raises OSError if it does not exist."""
    return path.stat().st_size
