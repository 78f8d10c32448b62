"""The files of a migration, and the atomic rename that decides which engine owns the request.

The source writes a snapshot of the request and names it `.exported`. The first rename after that decides: the
destination commits the import by renaming it to `.imported`, or the source withdraws it by renaming it to
`.withdrawn`. So exactly one engine owns the request at any time, whichever process crashes. The driver
removes the files after both sides have replied.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.engine.decode_batch import NUM_LOGPROBS, PartialOutput
from dora.engine.request import Request

FORMAT_VERSION = 4
_CHECKSUM_BYTES = 4
_NUM_PUBLISHED, _NUM_COPIED, _FIRST_BLOCK = 0, 1, 2  # indices into the words of `TransferProgress`


class TransferError(Exception):
    """The destination cannot import the snapshot; the source keeps the request."""


class KVFormat(NamedTuple):
    """What must be equal on two engines so that one can use the KV of the other."""

    format_version: int
    model_digest: str
    weight_digest: str
    dtype: str
    block_shape: tuple[int, ...]

    def check_compatible(self, own: KVFormat) -> None:
        """Raises TransferError that names the first field in which the source differs from `own`."""
        for name in self._fields:
            theirs, ours = getattr(self, name), getattr(own, name)
            if theirs != ours:
                raise TransferError(f"{name} is {theirs} on the source and {ours} on the destination")

    def without_kv(self) -> KVFormat:
        """What must be equal in a token-only migration."""
        return self._replace(block_shape=())


class RequestSnapshot(NamedTuple):
    """A running request as its source exports it.

    `num_computed` tokens of prompt and response have KV. `blocks` [n] are the blocks of the source's pool
    that hold it, without those that the destination had cached, and `checksums` [n] are theirs. Both are
    empty in a token-only migration. `stopped_at_s` is when the source stopped to decode.
    """

    format: KVFormat
    request: Request
    output: PartialOutput
    num_computed: int
    blocks: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    stopped_at_s: float

    def check(self, own_format: KVFormat, request: Request) -> None:
        """Raises TransferError if the destination cannot resume `request` from this snapshot."""
        self.format.check_compatible(own_format)
        if self.request != request:
            raise TransferError("the snapshot is of another request than was reserved")
        output, num_tokens = self.output, sum(chunk.num_tokens for chunk in self.output.chunks)
        length = len(request.prompt_ids) + len(output.token_ids)
        if not (
            self.num_computed == length - 1 < request.max_length - 1
            and len(output.token_ids) == num_tokens
            and output.logprobs.shape == (num_tokens, NUM_LOGPROBS)
            and len(self.blocks) == len(self.checksums)
        ):
            raise TransferError("the snapshot is inconsistent")


class TransferProgress:
    """Which blocks the source has published and how many of them the destination has copied.

    Both map one file of int64: the number published, the number copied, then the numbers of the published
    blocks.
    """

    def __init__(self, path: str, num_blocks: int | None = None) -> None:
        """Create the file with room for `num_blocks`, or open an existing one. Raises OSError."""
        flags = os.O_RDWR if num_blocks is None else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags, 0o600)
        try:
            if num_blocks is not None:
                os.write(descriptor, bytes(8 * (_FIRST_BLOCK + num_blocks)))
            self._words = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        finally:
            os.close(descriptor)

    @property
    def num_copied(self) -> int:
        return self._words[_NUM_COPIED]

    @num_copied.setter
    def num_copied(self, num_blocks: int) -> None:
        self._words[_NUM_COPIED] = num_blocks

    def publish(self, blocks: list[int]) -> None:
        """Add blocks that are full, so that their KV does not change any more."""
        num_published = self._words[_NUM_PUBLISHED]
        start = _FIRST_BLOCK + num_published
        self._words[start : start + len(blocks)] = array("q", blocks)
        self._words[_NUM_PUBLISHED] = num_published + len(blocks)  # last: the destination reads up to here

    def published(self, start: int) -> list[int]:
        """The published blocks, without the first `start`."""
        return self._words[_FIRST_BLOCK + start : _FIRST_BLOCK + self._words[_NUM_PUBLISHED]].tolist()


class MigrationFiles:
    """The files of one migration in `folder`."""

    def __init__(self, folder: Path, migration_id: int) -> None:
        stem = f"{folder}/migration-{migration_id}."
        self._progress, self._draft, self._exported, self._imported, self._withdrawn = self._paths = tuple(
            stem + name for name in ("progress", "draft", "exported", "imported", "withdrawn")
        )

    def open_progress(self, num_blocks: int | None = None) -> TransferProgress:
        """Create the progress file with room for `num_blocks`, or open the existing one. Raises OSError."""
        return TransferProgress(self._progress, num_blocks)

    def export_snapshot(self, snapshot: RequestSnapshot) -> None:
        """Offer the request to the destination. Raises OSError, for instance if the disk is full."""
        content = pickle.dumps(snapshot, protocol=pickle.HIGHEST_PROTOCOL)
        self.write_export(_checksum(content) + content)

    def write_export(self, content: bytes) -> None:
        """Write the bytes of an export: a checksum and a pickled snapshot."""
        with open(self._draft, "wb", buffering=0) as file:
            file.write(content)
        os.rename(self._draft, self._exported)

    def read_export(self) -> bytes | None:
        """The bytes that the source has exported, or None."""
        try:
            with open(self._exported, "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def load_snapshot(self) -> RequestSnapshot | None:
        """The snapshot that the source has exported, or None. Raises TransferError if it is damaged."""
        found = self.read_export()
        return None if found is None else _load(found)

    def num_imported_tokens(self) -> int:
        """Tokens of the response that the destination has imported. Raises TransferError or OSError."""
        with open(self._imported, "rb", buffering=0) as file:
            return len(_load(file.read()).output.token_ids)

    @property
    def is_imported(self) -> bool:
        return os.path.exists(self._imported)

    def commit_import(self) -> bool:
        """Make the destination the owner. Returns False if the source has withdrawn the export."""
        return _rename(self._exported, self._imported)

    def withdraw_export(self) -> bool:
        """Make the source the owner again. Returns False if the destination has committed the import."""
        return _rename(self._exported, self._withdrawn)

    def remove(self) -> None:
        """Delete the files. Only when neither side uses them any more."""
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _load(exported: bytes) -> RequestSnapshot:
    """Raises TransferError if the bytes are damaged."""
    checksum, content = exported[:_CHECKSUM_BYTES], exported[_CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise TransferError("the snapshot is damaged: its checksum differs")
    snapshot = pickle.loads(content)
    assert isinstance(snapshot, RequestSnapshot)
    return snapshot


def _rename(old: str, new: str) -> bool:
    try:
        os.rename(old, new)
    except FileNotFoundError:
        return False
    return True


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
