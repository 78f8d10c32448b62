"""The digest of a safetensors file, by the process that reads it. It needs the standard library only."""

from __future__ import annotations

import mmap
from hashlib import blake2b

_PIECE_BYTES = 2**26  # as in dora.model.weights


def file_digest(path: str) -> str:
    """Digest (32 hex digits) of the tensors' bytes in a safetensors file, in its order.

    If that is the order of the flat buffer, it equals `dora.model.weights.weight_digest` of the buffer.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        begin = 8 + int.from_bytes(mapped[:8], "little")
        with memoryview(mapped) as whole:
            pieces = [
                blake2b(whole[i : i + _PIECE_BYTES], digest_size=16)
                for i in range(begin, len(whole), _PIECE_BYTES)
            ]
    if len(pieces) == 1:
        return pieces[0].hexdigest()
    return blake2b(b"".join(piece.digest() for piece in pieces), digest_size=16).hexdigest()
