"""KV block pools in files: an engine maps its own to write, other engines map it to copy blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dora.engine.request import EngineError

KVBlocks = NDArray[np.uint64]  # [blocks, 64-bit words of a block]
Checksums = NDArray[np.uint64]  # [n], of blocks: the sum of their words, modulo 2^64

_READABLE = 'Array(uint64, 2, "C", True)'  # a pool that may be mapped read-only
Peer = TypeVar("Peer")
_Function = TypeVar("_Function", bound=Callable[..., None])


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


def view_as_blocks(pool: NDArray[np.uint8], num_blocks: int) -> KVBlocks:
    """The bytes of a pool as `num_blocks` blocks of words."""
    return pool.reshape(num_blocks, -1).view(np.uint64)


def bytes_per_block(pool: KVBlocks) -> int:
    return int(pool.shape[1]) * pool.itemsize


class PeerPool(Protocol):
    """The pool of another engine, with `len` blocks."""

    def __len__(self) -> int: ...

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> Checksums:
        """Set pool[targets] to the peer's blocks `sources`, and return the checksums of pool[targets].

        Raises OSError if the peer cannot be read.
        """


class MappedPool:
    """The pool of an engine on the same machine, to read."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Map its file, of blocks of `num_bytes`.

        Raises OSError if the file does not exist, ValueError if it is empty.
        """
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        num_blocks = len(mapped) // num_bytes
        words = np.frombuffer(mapped, np.uint64, num_blocks * num_bytes // 8)
        self.blocks: KVBlocks = words.reshape(num_blocks, -1)

    def __len__(self) -> int:
        return len(self.blocks)

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> Checksums:
        return copy_blocks(self.blocks, sources, pool, targets)


class EngineKV(Protocol[Peer]):
    """An engine's own KV, block by block, as its migrations read and write it.

    `len` is how many blocks can be published at once.
    """

    @property
    def blocks(self) -> KVBlocks | None:
        """Those that can be published, if they are in host memory: the pool or a staging area."""

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """The size of a block."""

    @property
    def num_free(self) -> int:
        """How many more blocks can be published now."""

    def open_peer(self, path: Path, /) -> Peer:
        """The KV of another engine of the machine, of the same kind and of blocks of the same size.

        Raises OSError or ValueError if the file does not have it.
        """

    def publish(self, blocks: Sequence[int], /) -> tuple[list[int], Checksums]:
        """Let other engines copy some blocks. Returns the numbers to copy from, and the checksums."""

    def release(self, published: Sequence[int], /) -> None:
        """No engine copies these published blocks any more."""

    def receive(self, peer: Peer, sources: Sequence[int], targets: Sequence[int], /) -> Checksums:
        """Set the own blocks `targets` to the peer's `sources`; returns the checksums of what arrived.

        Raises OSError if the peer cannot be read.
        """


class SharedKV:
    """KV in a pool that other engines map: nothing is copied before they copy it."""

    def __init__(self, pool: KVBlocks) -> None:
        self.blocks = pool

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        return bytes_per_block(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self)

    def open_peer(self, path: Path) -> PeerPool:
        return MappedPool(path, self.num_bytes)

    def publish(self, blocks: Sequence[int]) -> tuple[list[int], Checksums]:
        return [*blocks], checksum_blocks(self.blocks, blocks)

    def release(self, published: Sequence[int]) -> None:
        """Published blocks are those of the request, which keeps them."""

    def receive(self, peer: PeerPool, sources: Sequence[int], targets: Sequence[int]) -> Checksums:
        return peer.copy(sources, self.blocks, targets)


def copy_blocks(peer: KVBlocks, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int]) -> Checksums:
    """Set pool[targets] to peer[sources]; returns the checksums of what was copied."""
    checksums = np.empty(len(sources), np.uint64)
    _copy_blocks(peer, np.array(sources, np.int64), pool, np.array(targets, np.int64), checksums)
    return checksums


def checksum_blocks(pool: KVBlocks, blocks: Sequence[int]) -> Checksums:
    """The checksums of pool[blocks]."""
    checksums = np.empty(len(blocks), np.uint64)
    _checksum_blocks(pool, np.array(blocks, np.int64), checksums)
    return checksums


def _compiled(*signature: str) -> Callable[[_Function], _Function]:
    """Compile at import, or load cached code. NumPy would sum words at a third of the speed."""
    decorator: Any = njit(f"void({', '.join(signature)})", nogil=True, cache=True)
    return cast(Callable[[_Function], _Function], decorator)


@_compiled(_READABLE, "int64[::1]", "uint64[:, ::1]", "int64[::1]", "uint64[::1]")
def _copy_blocks(
    peer: KVBlocks,
    sources: NDArray[np.int64],
    pool: KVBlocks,
    targets: NDArray[np.int64],
    checksums: Checksums,
) -> None:
    """One pass over memory: each word is copied and added."""
    for i in range(sources.size):
        source, target = peer[sources[i]], pool[targets[i]]
        total = np.uint64(0)
        for j in range(source.size):
            word = source[j]
            target[j] = word
            total += word
        checksums[i] = total


@_compiled(_READABLE, "int64[::1]", "uint64[::1]")
def _checksum_blocks(pool: KVBlocks, blocks: NDArray[np.int64], checksums: Checksums) -> None:
    for i in range(blocks.size):
        block, total = pool[blocks[i]], np.uint64(0)
        for j in range(block.size):
            total += block[j]
        checksums[i] = total
