"""Seals of large buffers: each byte is read once, by a hash that costs little more than reading it.

NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, 1999) turns pieces of 4 KiB into 32 bytes each, under a
key of the line: in these, two different buffers of one length agree with a probability of 2^-128. They are
never shown: what goes over the line is a keyed BLAKE2b of them, of the direction and of the place there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

SEAL_BYTES = 16
PIECE_BYTES = 4096
_PAIRS = PIECE_BYTES // 8  # of words of 32 bits: one of each half of a piece
_ROUNDS, _SHIFT = 4, 8  # each is sure to 2^-32; the next one has the same key, so many words further on
_KEY_SHAPE = 2, _PAIRS + _SHIFT * (_ROUNDS - 1)
_LOW = np.uint64(2**32 - 1)

_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(function: _Function) -> _Function:
    """At import, for buffers that may be read-only; kept on disk where there is a place for it."""
    signature = 'void(Array(uint32, 2, "C", True), uint32[:, ::1], uint64[:, ::1])'
    try:
        return cast(_Function, njit(signature, nogil=True, cache=True)(function))
    except RuntimeError:
        return cast(_Function, njit(signature, nogil=True)(function))


@_compiled
def _add_up(pieces: NDArray[np.uint32], key: NDArray[np.uint32], sums: NDArray[np.uint64]) -> None:
    """sums[n, r] = the sum over i of (x[i] + key[0, i + 8r]) * (y[i] + key[1, i + 8r]), x and y being the
    halves of piece n: additions modulo 2^32, products and their sum modulo 2^64.
    """
    for n in range(pieces.shape[0]):
        x, y = pieces[n, :_PAIRS], pieces[n, _PAIRS:]
        a = b = c = d = np.uint64(0)
        for i in range(_PAIRS):
            u, v = np.uint64(x[i]), np.uint64(y[i])
            a += ((u + key[0, i]) & _LOW) * ((v + key[1, i]) & _LOW)
            b += ((u + key[0, i + 8]) & _LOW) * ((v + key[1, i + 8]) & _LOW)
            c += ((u + key[0, i + 16]) & _LOW) * ((v + key[1, i + 16]) & _LOW)
            d += ((u + key[0, i + 24]) & _LOW) * ((v + key[1, i + 24]) & _LOW)
        sums[n, 0], sums[n, 1], sums[n, 2], sums[n, 3] = a, b, c, d


class Sealer:
    """Seals buffers with one key, which must be no other line's."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        drawn = hashlib.shake_256(b"bulk" + key).digest(4 * _KEY_SHAPE[0] * _KEY_SHAPE[1])
        self._words = np.frombuffer(drawn, np.uint32).reshape(_KEY_SHAPE).copy()

    def seal(self, content: Any, direction: bytes, place: bytes) -> bytes:
        """Of a contiguous buffer; there is one at each `place` (16 bytes) in a `direction` (at most 16)."""
        flat = np.frombuffer(content, np.uint8)
        num_pieces = len(flat) // PIECE_BYTES
        whole, rest = np.split(flat, [num_pieces * PIECE_BYTES])
        sums = np.empty((num_pieces, _ROUNDS), np.uint64)
        _add_up(whole.view(np.uint32).reshape(num_pieces, -1), self._words, sums)
        mixed = hashlib.blake2b(key=self._key, person=direction, salt=place, digest_size=SEAL_BYTES)
        mixed.update(sums.tobytes())
        mixed.update(rest.data)
        return mixed.digest()
