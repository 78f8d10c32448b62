"""Migration of the requests of a server: tokens and log-probs move, and the KV if the server can export it.

It serves engines whose block pools other processes cannot read. The source halts the request, waits for its
last tokens, and for its KV if that moves too, and exports them. Without KV the destination prefills the
tokens again. If the export fails the source continues the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from dora.core.types import RequestId
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import (
    ExportedKV,
    HandoffMemory,
    KVFormat,
    RequestSnapshot,
    Reservation,
    TransferError,
)
from dora.engine.kv_transfer.migrator import IncomingMigration, Migrator, OutgoingMigration
from dora.engine.messages import ImportFailed, OpenHandoff, ReserveMigration, StartExport
from dora.engine.request import Request


class HaltedRequest(NamedTuple):
    """What a halted request has so far. `kv` is None if its tokens must be prefilled again."""

    output: PartialOutput
    kv: ExportedKV | None
    stopped_at_s: float  # when the engine began to halt it, by the clock of the migrations


class ServerHost(Protocol):
    """The engine whose requests a `ServerMigrator` migrates."""

    def kv_format(self, version: int) -> KVFormat:
        """The format of a loaded version."""

    def find_request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that this engine owns."""

    def reason_to_reject_import(self, request: Request) -> str:
        """Why a request cannot be imported, or an empty string."""

    def check_exported_kv(self, request: Request, output: PartialOutput, kv: ExportedKV) -> ExportedKV:
        """The KV of a request, with its size. Raises TransferError if this engine cannot use it."""

    def resume_imported(self, request: Request, output: PartialOutput, kv: ExportedKV | None) -> None:
        """Continue a request that this engine owns now."""

    def halt(self, request_id: RequestId, carries_kv: bool) -> HaltedRequest | None:
        """Halt a request. Returns it once the engine generates no more for it; call until then."""

    def continue_halted(self, request_id: RequestId) -> None:
        """Continue a request that this engine keeps and may have halted."""

    def release(self, request_id: RequestId) -> None:
        """Forget a request that another engine owns now."""


class ServerExport(OutgoingMigration):
    """The source's side."""

    halted: HaltedRequest | None = None


class ServerImport(IncomingMigration):
    """The destination's side."""

    kv: ExportedKV | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.kv is None else self.kv.num_bytes


class ServerMigrator(Migrator[ServerExport, ServerImport]):
    """The migrations of `host`."""

    def __init__(
        self,
        host: ServerHost,
        open_handoff: OpenHandoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_handoff` and `clock`: see `MigratesBetweenMachines`."""
        super().__init__(clock)
        self._host = host
        self._open_handoff = open_handoff or HandoffMemory().open

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
            handoff = self._open_handoff(command.migration_id, command.slot)
            handoff.reserve(Reservation(0, ""))
        except OSError as error:
            return ImportFailed(command.migration_id, f"the migration's slot cannot be written: {error}")
        self._incoming[request.id] = ServerImport(command, handoff, self.clock())
        return None

    def _find_request(self, request_id: RequestId) -> Request | None:
        return self._host.find_request(request_id)

    def _open_export(self, command: StartExport) -> ServerExport:
        handoff = self._open_handoff(command.migration_id, command.slot)
        return ServerExport(command, handoff, self.clock())

    def _advance_export(self, migration: ServerExport) -> PartialOutput | None:
        command = migration.command
        migration.halted = self._host.halt(command.request_id, command.carries_kv)
        return None if migration.halted is None else migration.halted.output

    def _snapshot(self, migration: ServerExport, output: PartialOutput) -> RequestSnapshot:
        request, halted = self._host.find_request(migration.command.request_id), migration.halted
        assert request is not None
        assert halted is not None
        own_format = self._host.kv_format(request.version)
        return RequestSnapshot(
            format=own_format.without_kv() if halted.kv is None else own_format,
            request=request,
            output=output,
            num_computed=len(request.prompt_ids) + len(output.token_ids) - 1,
            blocks=np.zeros(0, np.int64),
            checksums=np.zeros(0, np.uint64),
            stopped_at_s=halted.stopped_at_s,
            exported_kv=halted.kv,
        )

    def _release(self, request_id: RequestId) -> None:
        self._host.release(request_id)

    def _retain(self, request_id: RequestId) -> None:
        self._host.continue_halted(request_id)

    def _advance_import(self, migration: ServerImport) -> RequestSnapshot | None:
        snapshot, request = migration.handoff.load_snapshot(), migration.command.request
        if snapshot is not None:
            own_format, kv = self._host.kv_format(request.version), snapshot.exported_kv
            snapshot.check(own_format if kv is not None else own_format.without_kv(), request)
            _check_weights(snapshot.output, request, own_format)
            if kv is not None:
                migration.kv = self._host.check_exported_kv(request, snapshot.output, kv)
        return snapshot

    def _resume(self, migration: ServerImport, snapshot: RequestSnapshot) -> int:
        self._host.resume_imported(migration.command.request, snapshot.output, migration.kv)
        return snapshot.num_computed if migration.kv is None else 0

    def _cancel_reservation(self, request_id: RequestId) -> None:
        """Nothing is reserved but the row that `num_reserved` counts."""


def _check_weights(output: PartialOutput, request: Request, own_format: KVFormat) -> None:
    """Raises TransferError if other weights generated the tokens than those that continue them (C1)."""
    generated_by = {(chunk.version, chunk.digest) for chunk in output.chunks}
    if not generated_by <= {(request.version, own_format.weight_digest)}:
        raise TransferError(f"other weights generated its tokens: {sorted(generated_by)}")
