"""KV block pools in files: an engine maps its own to write, other engines map it to copy blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora.engine.request import EngineError

KVBlocks = NDArray[np.uint64]  # [blocks, 64-bit words of a block]


def create_pool(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """Create a file of zeros and map it [num_bytes]. Raises EngineError if there is no space for it.

    The whole file is allocated here: a write to a full memory file system ends the process with SIGBUS.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.truncate(descriptor, num_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        mapped = mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EngineError(
            f"KV block pool: {path.parent} has no space for {num_bytes} bytes of KV ({error.strerror}); "
            "lower engine.max_num_seqs or the maximum lengths, or free space there"
        ) from error
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def open_pool(path: Path, num_bytes: int) -> KVBlocks:
    """Map another engine's pool, of blocks of `num_bytes`, to read.

    Raises OSError if the file does not exist, ValueError if it is empty.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    num_blocks = len(mapped) // num_bytes
    return np.frombuffer(mapped, np.uint64, num_blocks * num_bytes // 8).reshape(num_blocks, -1)


def view_as_blocks(pool: NDArray[np.uint8], num_blocks: int) -> KVBlocks:
    """The bytes of a pool as `num_blocks` blocks of words."""
    return pool.reshape(num_blocks, -1).view(np.uint64)


def bytes_per_block(pool: KVBlocks) -> int:
    return int(pool.shape[1]) * pool.itemsize


class PeerPool(Protocol):
    """The pool of another engine, with `len` blocks."""

    def __len__(self) -> int: ...

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> None:
        """Set pool[targets] to the peer's blocks `sources`. Raises OSError if they cannot be read."""


class MappedPool:
    """The pool of an engine on the same machine."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> None:
        copy_blocks(self._blocks, sources, pool, targets)


def copy_blocks(peer: KVBlocks, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int]) -> None:
    """Set pool[targets] to peer[sources]."""
    for start, stop in _contiguous_runs(sources, targets):
        source, target, num_blocks = sources[start], targets[start], stop - start
        pool[target : target + num_blocks] = peer[source : source + num_blocks]


def checksum_blocks(pool: KVBlocks, blocks: Sequence[int]) -> list[int]:
    """The sum of each block's words, modulo 2^64."""
    checksums: list[int] = []
    for start, stop in _contiguous_runs(blocks):
        first = blocks[start]
        checksums += np.add.reduce(pool[first : first + stop - start], axis=1).tolist()
    return checksums


def _contiguous_runs(*tables: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the longest runs in which every table counts up by one.

    Most blocks of a request are neighbours, so a run is one NumPy call for many blocks.
    """
    breaks = {at for table in tables for at, (a, b) in enumerate(pairwise(table), 1) if b != a + 1}
    yield from pairwise(sorted({0, *breaks, len(tables[0])}))
