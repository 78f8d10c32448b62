"""Message authentication codes of large buffers, at little more than the cost of reading them once.

NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, 1999) hashes each block of 4 KiB to 32 bytes under a key
of the channel. Two different buffers of one length collide with probability 2^-128. The hashes stay secret:
the code that is sent is a keyed BLAKE2b over them, the direction and the position of the buffer.

Importing this module compiles code: `rpc` imports it with the first large buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK_BYTES = 4096
_MAC_BYTES = 16
_NUM_PAIRS = BLOCK_BYTES // 8  # of 32-bit words: one from each half of a block
_NUM_HASHES, _KEY_SHIFT = 4, 8  # four hashes of 2^-32 each; the key of the next one is shifted by 8 words
_KEY_SHAPE = 2, _NUM_PAIRS + _KEY_SHIFT * (_NUM_HASHES - 1)
_LOW_BITS = np.uint64(2**32 - 1)

_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(function: _Function) -> _Function:
    """Compile at import, for buffers that may be read-only; cache on disk where a folder is writable."""
    signature = 'void(Array(uint32, 2, "C", True), uint32[:, ::1], uint64[:, ::1])'
    try:
        return cast(_Function, njit(signature, nogil=True, cache=True)(function))
    except RuntimeError:
        return cast(_Function, njit(signature, nogil=True)(function))


@_compiled
def _nh(blocks: NDArray[np.uint32], key: NDArray[np.uint32], hashes: NDArray[np.uint64]) -> None:
    """hashes[n, r] = sum over i of (x[i] + key[0, i + 8r]) * (y[i] + key[1, i + 8r]).

    x and y are the halves of block n. Additions of words are modulo 2^32, products and their sum modulo 2^64.
    """
    for n in range(blocks.shape[0]):
        x, y = blocks[n, :_NUM_PAIRS], blocks[n, _NUM_PAIRS:]
        a = b = c = d = np.uint64(0)
        for i in range(_NUM_PAIRS):
            u, v = np.uint64(x[i]), np.uint64(y[i])
            a += ((u + key[0, i]) & _LOW_BITS) * ((v + key[1, i]) & _LOW_BITS)
            b += ((u + key[0, i + 8]) & _LOW_BITS) * ((v + key[1, i + 8]) & _LOW_BITS)
            c += ((u + key[0, i + 16]) & _LOW_BITS) * ((v + key[1, i + 16]) & _LOW_BITS)
            d += ((u + key[0, i + 24]) & _LOW_BITS) * ((v + key[1, i + 24]) & _LOW_BITS)
        hashes[n, 0], hashes[n, 1], hashes[n, 2], hashes[n, 3] = a, b, c, d


class BulkMac:
    """Computes the codes of one channel's buffers; no two channels may share a key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        key_bytes = hashlib.shake_256(b"bulk" + key).digest(4 * _KEY_SHAPE[0] * _KEY_SHAPE[1])
        self._nh_key = np.frombuffer(key_bytes, np.uint32).reshape(_KEY_SHAPE).copy()

    def compute(self, content: Any, direction: bytes, position: bytes) -> bytes:
        """The code (16 bytes) of a contiguous buffer.

        `direction` (at most 16 bytes) and `position` (16 bytes) together must name one buffer of the channel.
        """
        flat = np.frombuffer(content, np.uint8)
        num_blocks = len(flat) // BLOCK_BYTES
        whole, rest = np.split(flat, [num_blocks * BLOCK_BYTES])
        hashes = np.empty((num_blocks, _NUM_HASHES), np.uint64)
        _nh(whole.view(np.uint32).reshape(num_blocks, -1), self._nh_key, hashes)
        mac = hashlib.blake2b(key=self._key, person=direction, salt=position, digest_size=_MAC_BYTES)
        mac.update(hashes.tobytes())
        mac.update(rest.data)
        return mac.digest()
