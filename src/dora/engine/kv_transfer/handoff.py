"""The shared memory of migrations, and the compare-and-swap that decides which engine owns the request.

One file of the run has a slot for each migration, which the driver allocates. Engines map the file once.
A word of the slot has the state of the migration:

    started -> reserved     the destination has reserved a row
    reserved -> exported    the source has stopped to decode the request and has written a snapshot of it
    exported -> imported    the destination owns the request
    exported -> withdrawn   the source owns it again

The last two exclude each other, so exactly one engine owns the request at any time, whichever process
crashes. The word also has the number of the migration: a process that is late cannot change the slot's next
one. The driver frees the slot after both sides have replied.
"""

from __future__ import annotations

import mmap
import os
import pickle
import zlib
from collections import defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.types import Chunk
from dora.engine.block_manager import num_blocks_for
from dora.engine.decode_batch import NUM_LOGPROBS, PartialOutput
from dora.engine.request import Request

FORMAT_VERSION = 8
_CHECKSUM_BYTES = 4
_FILE_NAME = "migrations"
# Words of a slot. After them the numbers of the published blocks, then the snapshot.
_STATE, _NUM_PUBLISHED, _NUM_COPIED, _NUM_CACHED, _HASH, _SNAPSHOT_BYTES, _SNAPSHOT, _FIRST_BLOCK = (
    0, 1, 2, 3, 4, 10, 11, 12,
)  # fmt: skip
_HASH_BYTES = 8 * (_SNAPSHOT_BYTES - _HASH)
_MAX_TOKEN_BYTES = 32  # of a snapshot: token, its log-probs, and its share of a block
_MAX_OTHER_BYTES = 2**14  # of a snapshot: formats, chunks, stop strings
_PAGE_BYTES = 4096


class TransferError(Exception):
    """The destination cannot import the snapshot; the source keeps the request."""


class KVFormat(NamedTuple):
    """What must be equal on two engines so that one can use the KV of the other.

    `block_shape` has whatever the layout of a block depends on.
    """

    format_version: int
    model_digest: str
    weight_digest: str
    dtype: str
    block_shape: tuple[int | str, ...]

    def check_compatible(self, own: KVFormat) -> None:
        """Raises TransferError that names the first field in which the source differs from `own`."""
        for name in self._fields:
            theirs, ours = getattr(self, name), getattr(own, name)
            if theirs != ours:
                raise TransferError(f"{name} is {theirs} on the source and {ours} on the destination")

    def without_kv(self) -> KVFormat:
        """What must be equal in a token-only migration."""
        return self._replace(block_shape=())


class ExportedKV(NamedTuple):
    """KV of a halted request that its server has exported: the folder that has it, and its size.

    `ticket` is that of KV which other servers read themselves; the folder may then be on another machine.
    """

    folder: Path
    num_bytes: int
    ticket: bytes = b""


class RequestSnapshot(NamedTuple):
    """A running request as its source exports it.

    `num_computed` tokens of prompt and response have KV. `blocks` [n] are the blocks of the source's pool
    that hold it, without those that the destination had cached, and `checksums` [n] are theirs. Both are
    empty in a token-only migration, and where a server has exported the KV itself (`exported_kv`).
    `stopped_at_s` is when the source stopped to decode.
    """

    format: KVFormat
    request: Request
    output: PartialOutput
    num_computed: int
    blocks: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    stopped_at_s: float
    exported_kv: ExportedKV | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle arrays as bytes: this takes a fifth of the time that arrays take."""
        output = self.output
        columns = (
            np.asarray(output.token_ids, np.int64).tobytes(),
            np.asarray(output.logprobs, np.float32).tobytes(),
            self.blocks.tobytes(),
            self.checksums.tobytes(),
        )
        request = (self.request, output.chunks, self.num_computed)
        return _unpickle_snapshot, (self.format, columns, *request, self.stopped_at_s, self.exported_kv)

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


def _unpickle_snapshot(
    kv_format: KVFormat,
    columns: tuple[bytes, bytes, bytes, bytes],
    request: Request,
    chunks: tuple[Chunk, ...],
    num_computed: int,
    *others: Any,
) -> RequestSnapshot:
    token_ids, blocks = np.frombuffer(columns[0], np.int64), np.frombuffer(columns[2], np.int64)
    logprobs = np.frombuffer(columns[1], np.float32).reshape(-1, NUM_LOGPROBS)
    output = PartialOutput(token_ids, logprobs, chunks)
    checksums = np.frombuffer(columns[3], np.uint64)
    return RequestSnapshot(kv_format, request, output, num_computed, blocks, checksums, *others)


class HandoffState(IntEnum):
    """The state of a migration."""

    STARTED = 0
    RESERVED = 1
    EXPORTED = 2
    IMPORTED = 3
    WITHDRAWN = 4


_NUM_STATES = len(HandoffState)


class HandoffSlot(NamedTuple):
    """The part of the file `path` that belongs to a migration. It starts at the byte `offset`."""

    path: Path
    offset: int
    num_bytes: int


class Reservation(NamedTuple):
    """What the destination has cached already: blocks of the prompt, and the hash of the last of them."""

    num_cached_blocks: int
    cached_prefix_hash: str


class HandoffSlots:
    """The driver's side: allocates the slots of migrations in a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path, self._num_bytes = folder / _FILE_NAME, 0
        self._free: defaultdict[int, list[HandoffSlot]] = defaultdict(list)  # by size
        self._memory = HandoffMemory()

    def allocate(self, migration_id: int, request: Request) -> HandoffSlot:
        """A slot for the migration of `request`. Raises OSError if the file system is full."""
        needed = request.max_length * _MAX_TOKEN_BYTES + _MAX_OTHER_BYTES
        num_bytes = max(_PAGE_BYTES, 1 << (needed - 1).bit_length())
        slot = self._free[num_bytes].pop() if self._free[num_bytes] else self._add(num_bytes)
        self._memory.open(migration_id, slot).start(num_blocks_for(request.max_length))
        return slot

    def open(self, migration_id: int, slot: HandoffSlot) -> Handoff:
        return self._memory.open(migration_id, slot)

    def free(self, slot: HandoffSlot) -> None:
        """Reuse a slot. Only when both sides have replied, so that neither uses it any more."""
        self._free[slot.num_bytes].append(slot)

    def _add(self, num_bytes: int) -> HandoffSlot:
        """Allocate the space now: a write to a full memory file system ends the process with SIGBUS."""
        slot = HandoffSlot(self._path, self._num_bytes, num_bytes)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.truncate(descriptor, slot.offset + num_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, slot.offset, num_bytes)
        finally:
            os.close(descriptor)
        self._num_bytes += num_bytes
        return slot


class HandoffMemory:
    """The files of slots that this process has mapped."""

    def __init__(self) -> None:
        self._mapped: dict[Path, memoryview] = {}

    def open(self, migration_id: int, slot: HandoffSlot) -> Handoff:
        """The shared state of a migration. Raises OSError if the file does not have the slot."""
        stop = slot.offset + slot.num_bytes
        memory = self._mapped.get(slot.path)
        if memory is None or len(memory) < stop:
            descriptor = os.open(slot.path, os.O_RDWR)
            try:
                memory = self._mapped[slot.path] = memoryview(mmap.mmap(descriptor, 0))
            finally:
                os.close(descriptor)
        if len(memory) < stop:
            raise OSError(f"{slot.path} has {len(memory)} bytes, and the migration's slot ends at {stop}")
        return Handoff(migration_id, memory[slot.offset : stop])


class Handoff:
    """The state of one migration, which both engines and the driver share."""

    def __init__(self, migration_id: int, memory: memoryview) -> None:
        self._migration_id, self._memory = migration_id, memory
        self._words = np.frombuffer(memory, np.int64)

    def start(self, num_blocks: int) -> None:
        """Initialise the slot, with room for the numbers of `num_blocks` published blocks."""
        self._words[_NUM_PUBLISHED] = self._words[_NUM_COPIED] = 0
        self._words[_SNAPSHOT] = 8 * (_FIRST_BLOCK + num_blocks)
        self._words[_STATE] = self._word(HandoffState.STARTED)  # last: from here on it is this migration's

    @property
    def state(self) -> HandoffState:
        """Raises OSError if the slot belongs to another migration now."""
        migration_id, state = divmod(int(self._words[_STATE]), _NUM_STATES)
        if migration_id != self._migration_id:
            raise OSError(f"migration {self._migration_id} is over: its slot is that of {migration_id}")
        return HandoffState(state)

    # the destination

    def reserve(self, reservation: Reservation) -> None:
        """Let the source begin. Raises OSError if the migration is over."""
        self._check_is_current()
        self._words[_NUM_CACHED] = reservation.num_cached_blocks
        content = reservation.cached_prefix_hash.encode().ljust(_HASH_BYTES, b"\0")
        self._memory[8 * _HASH : 8 * _SNAPSHOT_BYTES] = content
        self._change(HandoffState.STARTED, HandoffState.RESERVED)

    def published(self, start: int) -> list[int]:
        """The published blocks, without the first `start`."""
        num_published = int(self._words[_NUM_PUBLISHED])
        return [int(block) for block in self._words[_FIRST_BLOCK + start : _FIRST_BLOCK + num_published]]

    def set_num_copied(self, num_blocks: int) -> None:
        """Report how many of the published blocks are copied."""
        self._check_is_current()
        self._words[_NUM_COPIED] = num_blocks

    def read_export(self) -> bytes | None:
        """The bytes that the source has exported, or None."""
        if not self._is(HandoffState.EXPORTED):
            return None
        return self._read()

    def load_snapshot(self) -> RequestSnapshot | None:
        """The snapshot that the source has exported, or None. Raises TransferError if it is damaged."""
        found = self.read_export()
        return None if found is None else _load(found)

    def commit_import(self) -> bool:
        """Make the destination the owner. Returns False if the source has withdrawn the export."""
        return self._change(HandoffState.EXPORTED, HandoffState.IMPORTED)

    # the source

    def reservation(self) -> Reservation | None:
        """What the destination has reserved, or None."""
        if not self._is(HandoffState.RESERVED):
            return None
        content = bytes(self._memory[8 * _HASH : 8 * _SNAPSHOT_BYTES])
        return Reservation(int(self._words[_NUM_CACHED]), content.rstrip(b"\0").decode())

    def publish(self, blocks: list[int]) -> None:
        """Add blocks that are full, so that their KV does not change any more."""
        self._check_is_current()
        num_published = int(self._words[_NUM_PUBLISHED])
        start = _FIRST_BLOCK + num_published
        self._words[start : start + len(blocks)] = blocks
        self._words[_NUM_PUBLISHED] = num_published + len(blocks)  # last: the destination reads up to here

    @property
    def num_copied(self) -> int:
        """How many published blocks the destination has copied."""
        return int(self._words[_NUM_COPIED])

    def export_snapshot(self, snapshot: RequestSnapshot) -> None:
        """Offer the request to the destination. Raises OSError if that is impossible."""
        content = pickle.dumps(snapshot, protocol=pickle.HIGHEST_PROTOCOL)
        self.write_export(_checksum(content) + content)

    def write_export(self, content: bytes) -> None:
        """Write the bytes of an export: a checksum and a pickled snapshot. Raises OSError."""
        self._check_is_current()
        start = int(self._words[_SNAPSHOT])
        if start + len(content) > len(self._memory):
            raise OSError(f"it has {len(content)} bytes, and there is room for {len(self._memory) - start}")
        self._memory[start : start + len(content)] = content
        self._words[_SNAPSHOT_BYTES] = len(content)
        self._change(HandoffState.RESERVED, HandoffState.EXPORTED)

    @property
    def is_imported(self) -> bool:
        return self._is(HandoffState.IMPORTED)

    def withdraw_export(self) -> bool:
        """Make the source the owner again. Returns False if the destination has committed the import."""
        return self._change(HandoffState.EXPORTED, HandoffState.WITHDRAWN)

    # the driver

    def num_imported_tokens(self) -> int:
        """Tokens of the response that the destination has imported. Raises TransferError."""
        return len(_load(self._read()).output.token_ids)

    def _read(self) -> bytes:
        start = int(self._words[_SNAPSHOT])
        return bytes(self._memory[start : start + int(self._words[_SNAPSHOT_BYTES])])

    def _check_is_current(self) -> None:
        """Raises OSError if the slot belongs to another migration now."""
        _ = self.state

    def _word(self, state: HandoffState) -> int:
        return self._migration_id * _NUM_STATES + state

    def _is(self, state: HandoffState) -> bool:
        """Whether this is the state. What the other side wrote before it is then visible here, too."""
        if int(self._words[_STATE]) != self._word(state):
            self._check_is_current()
            return False
        return self._change(state, state)

    def _change(self, old: HandoffState, new: HandoffState) -> bool:
        from dora.engine.kv_transfer.atomic import compare_and_swap  # numba, which the driver may not need

        return compare_and_swap(self._words, _STATE, self._word(old), self._word(new))


def _load(exported: bytes) -> RequestSnapshot:
    """Raises TransferError if the bytes are damaged."""
    checksum, content = exported[:_CHECKSUM_BYTES], exported[_CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise TransferError("the snapshot is damaged: its checksum differs")
    try:
        snapshot = pickle.loads(content)
    except ValueError as error:  # an array has another length than its shape
        raise TransferError("the snapshot is inconsistent") from error
    assert isinstance(snapshot, RequestSnapshot)
    return snapshot


def _checksum(content: bytes) -> bytes:
    return zlib.adler32(content).to_bytes(_CHECKSUM_BYTES, "little")
