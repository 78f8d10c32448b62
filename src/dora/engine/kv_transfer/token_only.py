"""Token-only migration: tokens and log-probs move, and the destination prefills the KV again.

It serves engines whose KV other processes cannot read. The source halts the request, waits for its last
tokens and exports them. If the export fails the source continues the request, by a prefill of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from dora.core.types import RequestId
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import (
    HandoffMemory,
    KVFormat,
    RequestSnapshot,
    Reservation,
    TransferError,
)
from dora.engine.kv_transfer.migrator import IncomingMigration, Migrator, OutgoingMigration
from dora.engine.messages import ImportFailed, ReserveMigration, StartExport
from dora.engine.request import Request


class TokenOnlyHost(Protocol):
    """The engine whose requests a `TokenOnlyMigrator` migrates."""

    def kv_format(self, version: int) -> KVFormat:
        """The format of a loaded version, without KV."""

    def find_request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that this engine owns."""

    def reason_to_reject_import(self, request: Request) -> str:
        """Why a request cannot be imported, or an empty string."""

    def resume_imported(self, request: Request, output: PartialOutput) -> None:
        """Continue a request that this engine owns now."""

    def halt(self, request_id: RequestId) -> PartialOutput | None:
        """Halt a request. Returns its output once the engine generates no more for it; call until then."""

    def continue_halted(self, request_id: RequestId) -> None:
        """Continue a request that this engine keeps and may have halted."""

    def release(self, request_id: RequestId) -> None:
        """Forget a request that another engine owns now."""


class TokenOnlyMigrator(Migrator[OutgoingMigration, IncomingMigration]):
    """The token-only migrations of `host`."""

    def __init__(self, host: TokenOnlyHost, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._host, self._handoffs = host, HandoffMemory()

    @property
    def num_reserved(self) -> int:
        """Requests for which a row is reserved."""
        return len(self._incoming)

    def num_reserved_of(self, version: int) -> int:
        """How many of those are of this version."""
        return sum(m.command.request.version == version for m in self._incoming.values())

    def reserve(self, command: ReserveMigration) -> ImportFailed | None:
        self.release_imported()  # the request may be migrating back
        request = command.request
        failure = "the request is on this engine already" if request.id in self._incoming else ""
        if failure := failure or self._host.reason_to_reject_import(request):
            return ImportFailed(command.migration_id, failure)
        try:
            handoff = self._handoffs.open(command.migration_id, command.slot)
            handoff.reserve(Reservation(0, ""))
        except OSError as error:
            return ImportFailed(command.migration_id, f"the migration's slot cannot be written: {error}")
        self._incoming[request.id] = IncomingMigration(command, handoff, self._clock())
        return None

    def _find_request(self, request_id: RequestId) -> Request | None:
        return self._host.find_request(request_id)

    def _open_export(self, command: StartExport) -> OutgoingMigration:
        handoff = self._handoffs.open(command.migration_id, command.slot)
        return OutgoingMigration(command, handoff, self._clock())

    def _advance_export(self, migration: OutgoingMigration) -> PartialOutput | None:
        return self._host.halt(migration.command.request_id)

    def _snapshot(self, migration: OutgoingMigration, output: PartialOutput) -> RequestSnapshot:
        request = self._host.find_request(migration.command.request_id)
        assert request is not None
        return RequestSnapshot(
            format=self._host.kv_format(request.version).without_kv(),
            request=request,
            output=output,
            num_computed=len(request.prompt_ids) + len(output.token_ids) - 1,
            blocks=np.zeros(0, np.int64),
            checksums=np.zeros(0, np.uint64),
            stopped_at_s=self._clock(),
        )

    def _release(self, request_id: RequestId) -> None:
        self._host.release(request_id)

    def _retain(self, request_id: RequestId) -> None:
        self._host.continue_halted(request_id)

    def _advance_import(self, migration: IncomingMigration) -> RequestSnapshot | None:
        snapshot, request = migration.handoff.load_snapshot(), migration.command.request
        if snapshot is not None:
            own_format = self._host.kv_format(request.version)
            snapshot.check(own_format.without_kv(), request)
            _check_weights(snapshot.output, request, own_format)
        return snapshot

    def _resume(self, migration: IncomingMigration, snapshot: RequestSnapshot) -> int:
        self._host.resume_imported(migration.command.request, snapshot.output)
        return snapshot.num_computed

    def _cancel_reservation(self, request_id: RequestId) -> None:
        """Nothing is reserved but the row that `num_reserved` counts."""


def _check_weights(output: PartialOutput, request: Request, own_format: KVFormat) -> None:
    """Raises TransferError if other weights generated the tokens than those that continue them (C1)."""
    generated_by = {(chunk.version, chunk.digest) for chunk in output.chunks}
    if not generated_by <= {(request.version, own_format.weight_digest)}:
        raise TransferError(f"other weights generated its tokens: {sorted(generated_by)}")
