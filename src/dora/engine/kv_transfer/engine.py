"""An engine whose running requests migrate with their KV."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.core.types import RequestId
from dora.engine.decode_batch import DecodeBatch, KVCache, PartialOutput
from dora.engine.episodes import EpisodeEngine
from dora.engine.kernels.workspace import DTYPES
from dora.engine.kv_transfer.handoff import FORMAT_VERSION, KVFormat, RequestSnapshot
from dora.engine.kv_transfer.migrator import Migrator
from dora.engine.kv_transfer.pool import KVBlocks, bytes_per_block, create_pool, view_as_blocks
from dora.engine.kv_transfer.transfer import KVExport, KVImport, KVTransport
from dora.engine.messages import (
    ExportFailed,
    ImportFailed,
    MigrationReply,
    MigrationReserved,
    ReserveMigration,
    StartExport,
)
from dora.engine.request import Completion, Request, Sequence
from dora.engine.runner import PrefillInput
from dora.engine.scheduler import Scheduler, SchedulerOutput
from dora.model.config import ModelConfig


class MigratingEngine(EpisodeEngine):
    """An engine on the CPU that exports and imports running requests.

    Its KV is in the file `pool`, where other engines can read it. `transport` reaches the other engines.
    Leases expire by `clock`, which all engines of a run share. `settings` are those of `Engine`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pool: Path,
        clock: Callable[[], float] = time.monotonic,
        transport: KVTransport | None = None,
        dtype: str = "float32",
        **settings: Any,
    ) -> None:
        def allocate_in_pool(shape: tuple[int, ...]) -> Tensor:
            kind = DTYPES[dtype]
            kv_bytes = create_pool(pool, math.prod(shape) * kind.itemsize)
            return torch.from_numpy(kv_bytes).view(kind).view(shape)

        super().__init__(config, kv_allocator=allocate_in_pool, dtype=dtype, **settings)
        self._dtype, kv = dtype, self._workspace.kv
        self.blocks = view_as_blocks(kv.flatten().view(torch.uint8).numpy(), len(kv))
        self._migrator = KVMigrator(
            self._scheduler,
            self._batch,
            self._kv_cache,
            self.blocks,
            kv_format=self._kv_format,
            prefill=self._prefill_again,
            transport=transport or KVTransport(),
            clock=clock,
        )

    @property
    def num_migrations(self) -> int:
        """Migrations in progress, in both directions."""
        return len(self._migrator)

    def reserve_migration(self, command: ReserveMigration) -> MigrationReserved | ImportFailed:
        """Reserve a row and KV blocks for a request that another engine decodes."""
        self._migrator.release_imported()  # the request may be migrating back
        if reason := self._reason_to_reject(command.request):
            return ImportFailed(command.migration_id, reason)
        return self._migrator.reserve(command)

    def start_export(self, command: StartExport) -> ExportFailed | None:
        """Begin to export a request, which this engine decodes meanwhile."""
        return self._migrator.start_export(command)

    def cancel_migration(self, migration_id: int) -> None:
        """End a migration at the next poll, unless its import is committed by then."""
        self._migrator.cancel(migration_id)

    def poll_migrations(self) -> list[MigrationReply]:
        """Advance all migrations and return new replies. Call it between steps."""
        replies = self._migrator.poll()
        self._update_batch()
        return replies

    def drop(self, version: int) -> None:
        """See Engine. A reserved import is an unfinished request of its version."""
        self._migrator.release_imported()
        super().drop(version)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """See Engine. Requests that another engine has imported are ignored."""
        own = [i for i in ids if self._scheduler.request(i) is not None and self._migrator.reclaim(i)]
        return super().abort(own)

    def progress(self) -> dict[RequestId, int]:
        """See Engine. Requests that another engine may have imported are omitted."""
        return {i: num for i, num in super().progress().items() if not self._migrator.is_exported(i)}

    def check(self) -> None:
        super().check()
        self._migrator.check()

    def _schedule(self) -> SchedulerOutput:
        output = super()._schedule()
        for sequence in output.swapped_out:
            self._migrator.fail_export(
                sequence.request.id, "the request was swapped out: too few KV blocks are free"
            )
        return output

    def _collect(self, done: list[Sequence]) -> list[Completion]:
        completions = super()._collect(done)
        for completion in completions:
            self._migrator.fail_export(completion.id, "the request finished before it was exported")
        return completions

    def _prefill_again(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Compute the KV of a sequence, without its first `num_cached_tokens` tokens and its next input."""
        request, stop = sequence.request, self._batch.num_computed_tokens(sequence)
        tokens = (*request.prompt_ids, *self._batch.partial_output(sequence).token_ids.tolist())[:stop]
        slot = self._loaded[request.version].slot
        self._runner.prefill(slot, [PrefillInput(tokens, num_cached_tokens, sequence.block_table)])

    def _kv_format(self, version: int) -> KVFormat:
        shape = tuple(self._workspace.kv.shape[1:])
        return KVFormat(FORMAT_VERSION, self._model_digest, self._loaded[version].digest, self._dtype, shape)


class KVMigrator(Migrator[KVExport, KVImport]):
    """The migrations of a `MigratingEngine`, on its scheduler, batch and KV cache.

    `blocks` is the engine's pool. `kv_format(version)` is the format of a loaded version. `prefill(sequence,
    num_cached_tokens)` computes the KV of a sequence that arrived without it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: DecodeBatch,
        kv_cache: KVCache,
        blocks: KVBlocks,
        *,
        kv_format: Callable[[int], KVFormat],
        prefill: Callable[[Sequence, int], None],
        transport: KVTransport,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self._scheduler, self._batch, self._kv_cache, self._blocks = scheduler, batch, kv_cache, blocks
        self._kv_format, self._prefill, self._transport = kv_format, prefill, transport

    def reserve(self, command: ReserveMigration) -> MigrationReserved | ImportFailed:
        """Reserve a row and the first blocks for a request that can run here."""
        request, migration_id, peer = command.request, command.migration_id, None
        try:
            if command.source_pool is not None:
                peer = self._transport.peer_pool(command.source_pool, bytes_per_block(self._blocks))
        except (OSError, ValueError) as error:
            return ImportFailed(migration_id, f"the source's KV cannot be read: {error}")
        reserved = self._scheduler.reserve(request)
        if reserved is None:
            return ImportFailed(migration_id, "no row is free, or too few KV blocks")
        num_cached_blocks, cached_prefix_hash = reserved
        try:
            self._incoming[request.id] = KVImport(
                command,
                self._transport.migration_files(command.folder, migration_id),
                self._scheduler.migrating_in[request.id],
                num_cached_blocks,
                self._scheduler.allocate_up_to,
                self._blocks,
                peer,
                self._clock(),
            )
        except OSError as error:
            self._scheduler.remove(request.id)
            return ImportFailed(migration_id, f"the migration's files cannot be written: {error}")
        return MigrationReserved(migration_id, num_cached_blocks, cached_prefix_hash)

    def check(self) -> None:
        """Every reservation in the scheduler belongs to a migration."""
        reserved = self._scheduler.migrating_in.keys()
        assert reserved == self._incoming.keys(), f"reserved: {reserved}, incoming: {self._incoming.keys()}"

    def _find_request(self, request_id: RequestId) -> Request | None:
        return self._scheduler.request(request_id)

    def _reason_not_to_export(self, command: StartExport) -> str:
        if reason := super()._reason_not_to_export(command):
            return reason
        if command.num_cached_blocks:
            request, last = self._scheduler.request(command.request_id), command.num_cached_blocks - 1
            assert request is not None
            hashes = self._scheduler.prompt_block_hashes(request)
            if hashes[last : last + 1] != (command.cached_prefix_hash,):
                return "the destination has another prompt cached, or other weights"
        return ""

    def _open_export(self, command: StartExport) -> KVExport:
        files = self._transport.migration_files(command.folder, command.migration_id)
        return KVExport(command, files, self._blocks, self._clock())

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
        return migration.snapshot(sequence, kv_format, output, self._clock())

    def _release(self, request_id: RequestId) -> None:
        self._scheduler.remove(request_id)

    def _retain(self, request_id: RequestId) -> None:
        self._scheduler.migrating_out.discard(request_id)

    def _advance_import(self, migration: KVImport) -> RequestSnapshot | None:
        migration.copy_published_blocks()
        snapshot = migration.files.load_snapshot()
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
