"""The digest of weights: equal on a CPU, where threads compute it, and on a GPU, where integer operations do.

The bytes, padded with zeros to whole leaves, are little-endian signed 32-bit words w. A leaf of LEAF_WORDS
words has two sums of w[i] * key[i] modulo 2^64, with fixed random odd keys (multilinear hashing). The digest
is BLAKE2b of the number of bytes and all sums in order. Other bytes have the same two sums of a leaf with
probability 2^-66 or less. It finds errors and is no protection against an adversary, who can solve for them.

Processes of inference servers load this file alone, so it imports only NumPy and the standard library.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

LEAF_WORDS = 4096
LEAF_BYTES = 4 * LEAF_WORDS
PIECE_BYTES = 2**22  # of one task of a thread: whole leaves, of which a cache holds several
_LEAVES_AT_ONCE = 32
_MAX_THREADS = 16  # more of them wait for memory

Sums = NDArray[np.int64]  # [leaves, 2]


def _make_keys() -> Sums:
    """Keys [2, LEAF_WORDS]: the first outputs of SplitMix64, made odd."""
    with np.errstate(over="ignore"):
        x = np.arange(1, 2 * LEAF_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64).reshape(2, LEAF_WORDS)


KEYS = _make_keys()


def leaf_sums(content: NDArray[np.uint8]) -> Sums:
    """The sums of the leaves of `content` [bytes]; its last leaf may be incomplete."""
    num_whole = len(content) // LEAF_BYTES
    words = content[: num_whole * LEAF_BYTES].view("<i4").reshape(num_whole, LEAF_WORDS)
    sums = np.empty((-(-len(content) // LEAF_BYTES), 2), np.int64)
    wide = np.empty((min(_LEAVES_AT_ONCE, num_whole), LEAF_WORDS), np.int64)
    for begin in range(0, num_whole, _LEAVES_AT_ONCE):
        end = min(begin + _LEAVES_AT_ONCE, num_whole)
        part = wide[: end - begin]
        np.copyto(part, words[begin:end])
        for i, key in enumerate(KEYS):
            sums[begin:end, i] = part.dot(key)
    if rest := content[num_whole * LEAF_BYTES :].tobytes():
        sums[-1] = leaf_sums(np.frombuffer(rest.ljust(LEAF_BYTES, b"\0"), np.uint8))
    return sums


def combine(sums: Iterable[Sums], num_bytes: int) -> str:
    """The digest (32 hex digits) of a buffer of `num_bytes` from the sums of its pieces, in order."""
    root = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=16)
    for part in sums:
        root.update(np.ascontiguousarray(part, "<i8").data)
    return root.hexdigest()


def digest_pieces(num_bytes: int, sums_of: Callable[[int, int], Sums], piece_bytes: int = PIECE_BYTES) -> str:
    """The digest of a buffer whose pieces `sums_of(begin, end)` handles, in bytes, in several threads.

    The functions of NumPy and torch that do the work release Python's lock. A piece has whole leaves.
    """
    begins = range(0, num_bytes, piece_bytes)

    def handle(begin: int) -> Sums:
        return sums_of(begin, min(begin + piece_bytes, num_bytes))

    if len(begins) < 2:
        return combine(map(handle, begins), num_bytes)
    with ThreadPoolExecutor(num_threads()) as threads:
        return combine(threads.map(handle, begins), num_bytes)


def bytes_digest(content: NDArray[np.uint8]) -> str:
    """The digest (32 hex digits) of `content` [bytes]."""
    return digest_pieces(len(content), lambda begin, end: leaf_sums(content[begin:end]))


def num_threads() -> int:
    """How many threads copy and digest weights."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return min(_MAX_THREADS, len(affinity(0)) if affinity else os.cpu_count() or 1)
