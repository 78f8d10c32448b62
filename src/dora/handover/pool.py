"""KV pools as files: their owner maps one for writing, other engines map it to copy blocks from it.

Neighbouring blocks are copied and added up in one go, for most of a request's are neighbours.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora.engine.sequence import EngineError

Blocks = NDArray[np.uint64]  # [blocks, words of a block]


class Peer(Protocol):
    """Another engine's pool, of so many blocks (`len`)."""

    def __len__(self) -> int: ...

    def copy(self, sources: Sequence[int], pool: Blocks, targets: Sequence[int], /) -> None:
        """pool[targets] = its blocks `sources`. Raises OSError where they cannot be had."""


class Mapped:
    """A peer on this machine."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def copy(self, sources: Sequence[int], pool: Blocks, targets: Sequence[int], /) -> None:
        copy_blocks(self._blocks, sources, pool, targets)


def make_pool(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """A new file of zeros, mapped: its bytes. Raises EngineError where there is no space for it.

    All of it is claimed at once, for a memory file system that is full kills whoever writes to it.
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
            f"{path.parent} has no space for {num_bytes} bytes of KV ({error.strerror}); "
            "lower max_rows or the lengths, or free some"
        ) from error
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def as_blocks(pool: NDArray[np.uint8], num_blocks: int) -> Blocks:
    """The words of so many blocks, so that they can be copied and added up."""
    return pool.reshape(num_blocks, -1).view(np.uint64)


def block_bytes(pool: Blocks) -> int:
    """Bytes of one block."""
    return int(pool.shape[1]) * pool.itemsize


def open_pool(path: Path, num_bytes: int) -> Blocks:
    """Another engine's pool of blocks of `num_bytes`, to read.

    Raises OSError or ValueError if it is not there or empty.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    num_blocks = len(mapped) // num_bytes
    return np.frombuffer(mapped, np.uint64, num_blocks * num_bytes // 8).reshape(num_blocks, -1)


def add_up(pool: Blocks, blocks: Sequence[int]) -> list[int]:
    """The sum of each block's words, modulo 2^64."""
    sums: list[int] = []
    for start, stop in _runs(blocks):
        first = blocks[start]
        sums += np.add.reduce(pool[first : first + stop - start], axis=1).tolist()
    return sums


def copy_blocks(peer: Blocks, sources: Sequence[int], pool: Blocks, targets: Sequence[int]) -> None:
    """pool[targets] = peer[sources]."""
    for start, stop in _runs(sources, targets):
        source, target, num_blocks = sources[start], targets[start], stop - start
        pool[target : target + num_blocks] = peer[source : source + num_blocks]


def _runs(*tables: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the longest stretches in which every table counts upwards."""
    breaks = {at for table in tables for at, (a, b) in enumerate(pairwise(table), 1) if b != a + 1}
    yield from pairwise(sorted({0, *breaks, len(tables[0])}))
