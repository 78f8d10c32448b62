"""The data plane: blocks of bytes in memory, or in files that every process of a host can map.

Whoever writes a block owns its segment, so no two processes write to one. A segment is filled from front
to back and used again when all its blocks are free: both cost the same however many blocks there are.
A file in a memory file system outlives its process; one on a disk outlives the host's sleep too.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections import Counter, OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SEGMENT_BYTES = 8 << 20
KEPT_BYTES = 256 << 20  # of empty segments, for the next blocks: their pages are there already
MAPPED_BYTES = 512 << 20  # of segments that a reader keeps mapped, though their owner may have removed them
ALIGNMENT = 64  # bytes, of blocks
_NAME = re.compile(r"[0-9a-f]{16}-\d{1,9}")


class Place(NamedTuple):
    """Where a block is."""

    segment: str
    offset: int
    num_bytes: int


def owner_of(segment: str) -> str:
    return segment.partition("-")[0]


def is_segment(name: str) -> bool:
    """Whether it is the name of a segment, and not the path of something else."""
    return _NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def num_bytes_of(segment: Path) -> int:
    """How long it is, which never changes. Raises OSError if it is not there."""
    return segment.stat().st_size


def is_full(error: OSError) -> bool:
    """Whether it says that there is no room in the file system."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class Heap:
    """Blocks in the memory of this process."""

    def __init__(self) -> None:
        self._blocks: dict[str, bytearray] = {}
        self._num = 0

    def reserve(self, num_bytes: int) -> tuple[Place, memoryview]:
        """A place for a block, and its bytes."""
        self._num += 1
        name = f"{0:016x}-{self._num}"
        self._blocks[name] = bytearray(num_bytes)
        return Place(name, 0, num_bytes), memoryview(self._blocks[name])

    def view(self, place: Place) -> memoryview:
        """The bytes of a block."""
        return memoryview(self._blocks[place.segment])

    def release(self, segment: str, num_blocks: int = 1) -> None:
        """A block is not needed any more; who still looks at it keeps its bytes."""
        del self._blocks[segment]

    def close(self) -> None:
        self._blocks.clear()


class Arena:
    """Segments of one owner as files of `folder`."""

    def __init__(self, folder: Path, owner: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.owner, self._folder, self._segment_bytes = owner, folder, segment_bytes
        self._maps: dict[str, mmap.mmap] = {}
        self._num_live: Counter[str] = Counter()
        self._current, self._used = "", 0
        self._num = 0

    def reserve(self, num_bytes: int) -> tuple[Place, memoryview]:
        """A place for a block, and its bytes. Raises OSError if there is no room in the file system."""
        if not self._current or self._used + num_bytes > len(self._maps[self._current]):
            left, self._current = self._current, self._empty(num_bytes)
            self._used = 0
            if left:
                self._trim(left)
        place = Place(self._current, self._used, num_bytes)
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._num_live[self._current] += 1
        return place, self.view(place)

    def view(self, place: Place) -> memoryview:
        """The bytes of a block."""
        return memoryview(self._maps[place.segment])[place.offset : place.offset + place.num_bytes]

    def release(self, segment: str, num_blocks: int = 1) -> None:
        """Blocks of a segment are not needed any more; their bytes may change from now on."""
        self._num_live[segment] -= num_blocks
        if segment == self._current:
            self._used = self._used if self._num_live[segment] else 0
        else:
            self._trim(segment)

    def close(self) -> None:
        """Remove all segments; whoever has one mapped keeps it."""
        for segment in self._maps:
            (self._folder / segment).unlink(missing_ok=True)
        self._maps.clear()
        self._current = ""

    def _empty(self, num_bytes: int) -> str:
        """A segment that is empty and large enough."""
        fitting = [s for s in self._unused() if len(self._maps[s]) >= num_bytes]
        if fitting:
            return min(fitting, key=lambda s: len(self._maps[s]))
        self._num += 1
        name = f"{self.owner}-{self._num}"
        self._maps[name] = _make(self._folder / name, max(self._segment_bytes, num_bytes))
        return name

    def _unused(self) -> list[str]:
        return [s for s in self._maps if not self._num_live[s] and s != self._current]

    def _trim(self, segment: str) -> None:
        """Keep a segment that has become empty for later, unless there are enough."""
        if not self._num_live[segment] and sum(len(self._maps[s]) for s in self._unused()) > KEPT_BYTES:
            (self._folder / segment).unlink(missing_ok=True)
            del self._maps[segment], self._num_live[segment]


class Reader:
    """Maps the segments of others, to be read only."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def view(self, place: Place) -> memoryview:
        """The bytes of a block. Raises OSError or ValueError if it is not there."""
        segment = place.segment
        if segment not in self._maps:
            paths = [folder / segment for folder in self._folders]
            with next((path for path in paths if path.exists()), paths[0]).open("rb") as file:
                self._maps[segment] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            while len(self._maps) > 1 and sum(map(len, self._maps.values())) > MAPPED_BYTES:
                self._maps.popitem(last=False)  # views of it keep it mapped
        self._maps.move_to_end(segment)
        if place.offset + place.num_bytes > len(self._maps[segment]):
            raise ValueError(f"{place} ends behind its segment")
        return memoryview(self._maps[segment])[place.offset : place.offset + place.num_bytes]


def _make(path: Path, num_bytes: int) -> mmap.mmap:
    """A new file of that size, with room on its file system, mapped."""
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # else a full file system would be a bus error later
        return mmap.mmap(fd, num_bytes)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)
