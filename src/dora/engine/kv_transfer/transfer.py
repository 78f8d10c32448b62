"""Copying a request's KV from the source's block pool to the destination's.

A request that can only have little KV stops at once, and the destination copies it all with the snapshot.
Otherwise the source publishes full blocks while it decodes and the destination copies them. Then the request
stops, and only the blocks after the last published one are left to copy. Both sides checksum every block.
Each poll copies a limited number of bytes, because a decode step waits for it. KV that other engines cannot
map passes through a staging area (`staging`): a request stops only once there is room for its last blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import (
    Handoff,
    HandoffMemory,
    HandoffSlot,
    KVFormat,
    RequestSnapshot,
    TransferError,
)
from dora.engine.kv_transfer.migrator import IncomingMigration, OutgoingMigration
from dora.engine.kv_transfer.pool import (
    Checksums,
    EngineKV,
)
from dora.engine.messages import ReserveMigration, StartExport
from dora.engine.request import Request, Sequence

_BYTES_PER_POLL = 4 * 2**20  # between two decode steps
_BYTES_PER_DEVICE_POLL = 32 * 2**20  # the same from GPU to GPU
_MAX_STOPPED_BYTES = 4 * 2**20  # of KV that may be copied after the request has stopped: about a decode step


def _num_blocks_per_poll(kv: EngineKV[Any]) -> int:
    limit = _BYTES_PER_DEVICE_POLL if kv.blocks is None else _BYTES_PER_POLL
    return max(1, limit // kv.num_bytes)


def _publishes_blocks(request: Request, kv: EngineKV[Any]) -> bool:
    """Whether a request is decoded while its KV is copied. Both sides decide this by themselves."""
    return num_blocks_for(request.max_length) * kv.num_bytes > _MAX_STOPPED_BYTES


class KVTransport:
    """How engines of one machine reach each other: through mapped files.

    A run on several machines has a subclass.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}
        self._handoffs = HandoffMemory()

    def open_handoff(self, migration_id: int, slot: HandoffSlot) -> Handoff:
        """The shared state of a migration. Raises OSError."""
        return self._handoffs.open(migration_id, slot)

    def peer_pool(self, pool: Any, kv: EngineKV[Any]) -> Any:
        """Another engine's KV, which this engine's `kv` can read. Raises OSError or ValueError."""
        if pool not in self._opened:
            self._opened = {path: opened for path, opened in self._opened.items() if path.exists()}
            self._opened[pool] = kv.open_peer(pool)
        return self._opened[pool]


class KVExport(OutgoingMigration):
    """The source's side: publishes blocks, if the request is decoded while they are copied."""

    def __init__(
        self, command: StartExport, handoff: Handoff, request: Request, kv: EngineKV[Any] | None, now_s: float
    ) -> None:
        """`kv` is this engine's: None in a token-only migration."""
        super().__init__(command, handoff, now_s)
        self._kv = kv
        self._is_published = kv is not None and _publishes_blocks(request, kv)
        self._published: list[int] = []
        self._num_released = 0  # of these
        self._checksums = np.empty(0, np.uint64)  # of the published blocks

    @property
    def num_copied(self) -> int:
        return self.handoff.num_copied if self._is_published else 0

    def publish_full_blocks(self, sequence: Sequence, num_computed: int) -> bool:
        """Publish some full blocks. Returns whether the request can stop: the destination should copy no
        further block first, and there is room to publish the last ones.
        """
        kv, first = self._kv, self._num_cached_blocks
        if kv is None:
            return True
        if self._is_published:
            num_copied, num_full = self.num_copied, num_computed // BLOCK_SIZE  # read once: it may change now
            kv.release(self._published[self._num_released : num_copied])
            self._num_released = num_copied
            start = first + len(self._published)
            stop = min(num_full, start + min(_num_blocks_per_poll(kv), kv.num_free))
            if blocks := sequence.block_table[start:stop]:
                self.handoff.publish(self._publish(kv, blocks))
            if self.num_copied < num_full - first:
                return False
        return kv.num_free >= num_blocks_for(num_computed) - first - len(self._published)

    def snapshot(
        self, sequence: Sequence, own_format: KVFormat, output: PartialOutput, now_s: float
    ) -> RequestSnapshot:
        """The snapshot of a request that is not decoded any more."""
        num_computed = len(sequence.request.prompt_ids) + len(output.token_ids) - 1
        if self._kv is not None:
            blocks = sequence.block_table[self._num_cached_blocks : num_blocks_for(num_computed)]
            self._publish(self._kv, blocks[len(self._published) :])
        return RequestSnapshot(
            format=own_format.without_kv() if self._kv is None else own_format,
            request=sequence.request,
            output=output,
            num_computed=num_computed,
            blocks=np.array(self._published, np.int64),
            checksums=self._checksums,
            stopped_at_s=now_s,
        )

    def close(self) -> None:
        """The migration is over, and the destination copies no more."""
        if self._kv is not None:
            self._kv.release(self._published[self._num_released :])

    @property
    def _num_cached_blocks(self) -> int:
        assert self.reservation is not None
        return self.reservation.num_cached_blocks

    def _publish(self, kv: EngineKV[Any], blocks: list[int]) -> list[int]:
        published, checksums = kv.publish(blocks)
        self._published += published
        self._checksums = np.concatenate((self._checksums, checksums))
        return published


class KVImport(IncomingMigration):
    """The destination's side: copies blocks into those of a reserved `sequence`."""

    def __init__(
        self,
        command: ReserveMigration,
        handoff: Handoff,
        sequence: Sequence,
        num_cached_blocks: int,
        allocate_up_to: Callable[[Sequence, int], bool],
        kv: EngineKV[Any] | None,
        peer: Any,
        now_s: float,
    ) -> None:
        """`kv` is this engine's and `peer` the source's: None in a token-only migration.

        `allocate_up_to` extends the sequence to a number of blocks, or returns False.
        """
        super().__init__(command, handoff, now_s)
        self._sequence, self._num_cached, self._allocate_up_to = sequence, num_cached_blocks, allocate_up_to
        self._kv, self._peer = kv, peer
        self._is_published = kv is not None and _publishes_blocks(command.request, kv)
        self._checksums: Checksums = np.empty(0, np.uint64)  # of the blocks copied

    @property
    def is_token_only(self) -> bool:
        return self._peer is None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV this engine had before the migration."""
        return self._num_cached * BLOCK_SIZE

    @property
    def num_copied(self) -> int:
        return len(self._checksums)

    @property
    def num_bytes(self) -> int:
        return 0 if self._kv is None else self.num_copied * self._kv.num_bytes

    def copy_published_blocks(self) -> None:
        """Copy some of the blocks that the source has published. Raises TransferError if that fails."""
        if self._kv is None or not self._is_published:
            return
        if blocks := self.handoff.published(self.num_copied):
            self._copy(blocks[: _num_blocks_per_poll(self._kv)])
            self.handoff.set_num_copied(self.num_copied)

    def finish(self, snapshot: RequestSnapshot, own_format: KVFormat) -> None:
        """Copy the remaining blocks and compare all checksums. Without KV, allocate the blocks.

        Raises TransferError.
        """
        snapshot.check(own_format.without_kv() if self.is_token_only else own_format, self.command.request)
        num_blocks = num_blocks_for(snapshot.num_computed)
        if self.is_token_only:
            self._allocate(num_blocks)
            return
        if not len(snapshot.blocks) == num_blocks - self._num_cached >= self.num_copied:
            raise TransferError("the snapshot is inconsistent")
        self._copy(snapshot.blocks[self.num_copied :].tolist())
        wrong = np.flatnonzero(self._checksums != snapshot.checksums)
        if wrong.size:
            raise TransferError(f"{wrong.size} of {self.num_copied} KV blocks arrived damaged")

    def _copy(self, blocks: list[int]) -> None:
        assert self._kv is not None
        assert self._peer is not None
        started_s = time.perf_counter()
        start = self._num_cached + self.num_copied
        stop = start + len(blocks)
        self._allocate(stop)
        own = self._sequence.block_table[start:stop]
        if blocks and not 0 <= min(blocks) <= max(blocks) < len(self._peer):
            raise TransferError(f"a block is outside the source's pool of {len(self._peer)} blocks")
        try:
            checksums = self._kv.receive(self._peer, blocks, own)
        except OSError as error:
            raise TransferError(f"the source's KV cannot be read: {error}") from error
        self._checksums = np.concatenate((self._checksums, checksums))
        self.copy_s += time.perf_counter() - started_s

    def _allocate(self, num_blocks: int) -> None:
        if not self._allocate_up_to(self._sequence, num_blocks):
            raise TransferError("too few KV blocks are free")
