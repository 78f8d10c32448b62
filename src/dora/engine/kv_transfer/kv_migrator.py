"""Migrations of `dora.engine.engine.Engine`: the KV of a request is copied between the pools of two engines.

Where the destination cannot read the source's pool the migration is token-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora.core.types import RequestId
from dora.engine.decode_batch import DecodeBatch, KVCache, PartialOutput
from dora.engine.kv_transfer.handoff import KVFormat, RequestSnapshot, Reservation
from dora.engine.kv_transfer.migrator import Migrator
from dora.engine.kv_transfer.pool import EngineKV
from dora.engine.kv_transfer.transfer import KVExport, KVImport, KVTransport
from dora.engine.messages import ImportFailed, ReserveMigration, StartExport
from dora.engine.request import Request, Sequence
from dora.engine.scheduler import Scheduler


class KVMigrator(Migrator[KVExport, KVImport]):
    """The migrations of an engine, on its scheduler, batch and KV cache.

    `kv` is the engine's KV; None: its requests migrate without it. `kv_format(version)` is the format of a
    loaded version. `prefill(sequence, num_cached_tokens)` computes the KV of a sequence that arrived
    without it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: DecodeBatch,
        kv_cache: KVCache,
        kv: EngineKV[Any] | None,
        *,
        kv_format: Callable[[int], KVFormat],
        prefill: Callable[[Sequence, int], None],
        transport: KVTransport,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self._scheduler, self._batch, self._kv_cache, self._kv = scheduler, batch, kv_cache, kv
        self._kv_format, self._prefill, self._transport = kv_format, prefill, transport

    def reserve(self, command: ReserveMigration) -> ImportFailed | None:
        """Reserve a row and the first blocks for a request that can run here."""
        request, migration_id, peer = command.request, command.migration_id, None
        kv = None if command.source_pool is None else self._kv
        if command.source_pool is not None and kv is None:
            return ImportFailed(migration_id, "this engine has no pool to copy KV to")
        try:
            if kv is not None:
                peer = self._transport.peer_pool(command.source_pool, kv)
        except (OSError, ValueError) as error:
            return ImportFailed(migration_id, f"the source's KV cannot be read: {error}")
        reserved = self._scheduler.reserve(request)
        if reserved is None:
            return ImportFailed(migration_id, "no row is free, or too few KV blocks")
        reservation = Reservation(*reserved)
        try:
            handoff = self._transport.open_handoff(migration_id, command.slot)
            handoff.reserve(reservation)
        except OSError as error:
            self._scheduler.remove(request.id)
            return ImportFailed(migration_id, f"the migration's slot cannot be written: {error}")
        self._incoming[request.id] = KVImport(
            command,
            handoff,
            self._scheduler.migrating_in[request.id],
            reservation.num_cached_blocks,
            self._scheduler.allocate_up_to,
            kv,
            peer,
            self.clock(),
        )
        return None

    def check(self) -> None:
        """Every reservation in the scheduler belongs to a migration, and published blocks to an export."""
        reserved = self._scheduler.migrating_in.keys()
        assert reserved == self._incoming.keys(), f"reserved: {reserved}, incoming: {self._incoming.keys()}"
        if self._kv is not None and not self._outgoing:
            num_free, num_blocks = self._kv.num_free, len(self._kv)
            assert num_free == num_blocks, f"{num_free} of {num_blocks} blocks can be published"

    def _find_request(self, request_id: RequestId) -> Request | None:
        return self._scheduler.request(request_id)

    def _reason_to_reject_reservation(self, migration: KVExport, reservation: Reservation) -> str:
        if reservation.num_cached_blocks:
            request, last = (
                self._scheduler.request(migration.command.request_id),
                reservation.num_cached_blocks - 1,
            )
            assert request is not None
            hashes = self._scheduler.prompt_block_hashes(request)
            if hashes[last : last + 1] != (reservation.cached_prefix_hash,):
                return "the destination has another prompt cached, or other weights"
        return ""

    def _open_export(self, command: StartExport) -> KVExport:
        handoff = self._transport.open_handoff(command.migration_id, command.slot)
        request = self._scheduler.request(command.request_id)
        assert request is not None
        return KVExport(command, handoff, request, self._kv if command.carries_kv else None, self.clock())

    def _advance_export(self, migration: KVExport) -> PartialOutput | None:
        request_id = migration.command.request_id
        sequence = self._scheduler.running.get(request_id)
        if sequence is None:  # it waits for a row and has no KV yet
            return None
        is_copied = migration.publish_full_blocks(sequence, self._batch.num_computed_tokens(sequence))
        if not is_copied or request_id in self._scheduler.between_turns:  # export when it decodes again
            return None
        self._scheduler.migrating_out.add(request_id)
        return self._batch.partial_output(sequence)

    def _snapshot(self, migration: KVExport, output: PartialOutput) -> RequestSnapshot:
        sequence = self._scheduler.running[migration.command.request_id]
        kv_format = self._kv_format(sequence.request.version)
        return migration.snapshot(sequence, kv_format, output, self.clock())

    def _release(self, request_id: RequestId) -> None:
        self._scheduler.remove(request_id)

    def _retain(self, request_id: RequestId) -> None:
        self._scheduler.migrating_out.discard(request_id)

    def _advance_import(self, migration: KVImport) -> RequestSnapshot | None:
        migration.copy_published_blocks()
        snapshot = migration.handoff.load_snapshot()
        if snapshot is not None:
            migration.finish(snapshot, self._kv_format(migration.command.request.version))
        return snapshot

    def _resume(self, migration: KVImport, snapshot: RequestSnapshot) -> int:
        sequence = self._scheduler.activate(migration.command.request.id)
        self._kv_cache.add(sequence)
        self._batch.restore(sequence, snapshot.output)
        if not migration.is_token_only:
            return 0
        self._prefill(sequence, migration.num_cached_tokens)
        return snapshot.num_computed - migration.num_cached_tokens

    def _cancel_reservation(self, request_id: RequestId) -> None:
        self._scheduler.remove(request_id)
