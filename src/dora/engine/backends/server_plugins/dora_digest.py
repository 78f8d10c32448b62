"""The digest of a weight file, by the process that reads it. It needs the standard library only."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

_PIECE_BYTES = 2**26  # as in dora.model.weights


def flat_digest(path: str) -> str:
    """Digest (32 hex digits) of a file of raw numbers: `dora.model.weights.weight_digest` of its buffer."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return _digest(mapped, 0)


def safetensors_digest(path: str) -> str:
    """Digest (32 hex digits) of the tensors' bytes in a safetensors file, in its order.

    If that is the order of the flat buffer, it equals `dora.model.weights.weight_digest` of the buffer.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return _digest(mapped, 8 + int.from_bytes(mapped[:8], "little"))


def _digest(mapped: mmap.mmap, begin: int) -> str:
    """Pieces are hashed in parallel: a hash releases Python's lock."""
    with memoryview(mapped) as whole, ThreadPoolExecutor() as threads:

        def hashed(start: int) -> bytes:
            with whole[start : start + _PIECE_BYTES] as piece:
                return blake2b(piece, digest_size=16).digest()

        pieces = [*threads.map(hashed, range(begin, len(whole), _PIECE_BYTES))]
    return (pieces[0] if len(pieces) == 1 else blake2b(b"".join(pieces), digest_size=16).digest()).hex()
