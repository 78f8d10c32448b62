"""The migration protocol of one engine, in both directions.

`Migrator` is the state machine. Its subclasses move the data: `KVMigrator` copies KV between block pools,
`ServerMigrator` moves tokens and log-probs, and the KV in files or by tickets. Each side replies once to each
command of a migration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from dora.core.types import RequestId
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import Handoff, RequestSnapshot, Reservation, TransferError
from dora.engine.messages import (
    ExportFailed,
    ExportFinished,
    ImportFailed,
    ImportFinished,
    MigrationReply,
    ReserveMigration,
    StartExport,
)
from dora.engine.request import Request

CommandT = TypeVar("CommandT", bound=StartExport | ReserveMigration)


class Migration(Generic[CommandT]):
    """One side of a migration. Its lease expires `lease_s` after the last progress, or after the start."""

    def __init__(self, command: CommandT, handoff: Handoff, now_s: float) -> None:
        self.command, self.handoff = command, handoff
        self.failure = ""  # why the migration must end, once there is a reason
        self._expires_s, self._num_copied_before = now_s + command.lease_s, 0

    @property
    def num_copied(self) -> int:
        """Blocks that the destination has copied."""
        return 0

    def check(self, now_s: float) -> str:
        """Why the migration must end, or an empty string.

        Renews the lease first if more blocks are copied than at the last check.
        """
        if self.failure:
            return self.failure
        if (num_copied := self.num_copied) != self._num_copied_before:
            self._num_copied_before, self._expires_s = num_copied, now_s + self.command.lease_s
        return "the lease has expired" if now_s > self._expires_s else ""


class OutgoingMigration(Migration[StartExport]):
    """A request that this engine exports."""

    reservation: Reservation | None = None  # None: the destination has not reserved a row yet
    is_exported = False

    def close(self) -> None:
        """Free what the export has occupied, beside the request."""


class IncomingMigration(Migration[ReserveMigration]):
    """A request that this engine imports."""

    copy_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of KV copied."""
        return 0


OutgoingT = TypeVar("OutgoingT", bound=OutgoingMigration)
IncomingT = TypeVar("IncomingT", bound=IncomingMigration)


class Migrator(ABC, Generic[OutgoingT, IncomingT]):
    """The migrations of one engine. Leases expire by `clock`, which all engines of a run share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._outgoing: dict[RequestId, OutgoingT] = {}
        self._incoming: dict[RequestId, IncomingT] = {}
        self._replies: list[MigrationReply] = []

    def __len__(self) -> int:
        """Migrations in progress, and replies that `poll` has not returned yet."""
        return len(self._outgoing) + len(self._incoming) + len(self._replies)

    @abstractmethod
    def reserve(self, command: ReserveMigration) -> ImportFailed | None:
        """Reserve the row, and the blocks if any, that the request needs on this engine."""

    def start_export(self, command: StartExport) -> ExportFailed | None:
        """Begin an export, which waits for the destination's reservation.

        The request is decoded until it is exported.
        """
        failure = self._reason_not_to_export(command)
        if not failure:
            try:
                self._outgoing[command.request_id] = self._open_export(command)
            except OSError as error:
                failure = f"the migration's slot cannot be read: {error}"
        return ExportFailed(command.migration_id, failure) if failure else None

    def cancel(self, migration_id: int) -> None:
        """End a migration at its next poll, unless its import is committed by then."""
        migrations: list[OutgoingMigration | IncomingMigration]
        migrations = [*self._outgoing.values(), *self._incoming.values()]
        for migration in migrations:
            if migration.command.migration_id == migration_id:
                migration.failure = "the migration was cancelled"

    def fail_export(self, request_id: RequestId, failure: str) -> None:
        """End the export of a request, if there is one, at its next poll."""
        if request_id in self._outgoing:
            self._outgoing[request_id].failure = failure

    def reclaim(self, request_id: RequestId) -> bool:
        """Withdraw the export of a request that is to be aborted. False if another engine owns it."""
        migration = self._outgoing.get(request_id)
        if migration is not None:
            if migration.is_exported and not migration.handoff.withdraw_export():
                return False
            migration.is_exported, migration.failure = False, "the request was aborted"
        return True

    def is_exported(self, request_id: RequestId) -> bool:
        """Whether another engine may have imported the request."""
        return request_id in self._outgoing and self._outgoing[request_id].is_exported

    def release_imported(self) -> None:
        """Free requests that other engines have imported since the last poll.

        The driver may act on an import that this engine has not polled yet: it may drop the version, or send
        the request back.
        """
        for request_id, migration in list(self._outgoing.items()):
            if migration.is_exported and migration.handoff.is_imported:
                self._finish_export(request_id, migration)

    def poll(self) -> list[MigrationReply]:
        """Advance every migration and return new replies. Afterwards other rows may decode than before."""
        for request_id, outgoing in list(self._outgoing.items()):
            self._poll_outgoing(request_id, outgoing)
        for request_id, incoming in list(self._incoming.items()):
            self._poll_incoming(request_id, incoming)
        replies, self._replies = self._replies, []
        return replies

    # the data, by a subclass

    @abstractmethod
    def _find_request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that this engine owns."""

    @abstractmethod
    def _open_export(self, command: StartExport) -> OutgoingT:
        """Raises OSError if the slot of the migration cannot be opened."""

    def _reason_to_reject_reservation(self, migration: OutgoingT, reservation: Reservation) -> str:
        """Why what the destination has cached is not a part of the request, or an empty string."""
        return ""

    @abstractmethod
    def _advance_export(self, migration: OutgoingT) -> PartialOutput | None:
        """Copy more. Once all full blocks are copied, stop to decode the request and return its output."""

    @abstractmethod
    def _snapshot(self, migration: OutgoingT, output: PartialOutput) -> RequestSnapshot:
        """What to export of a request that is not decoded any more."""

    @abstractmethod
    def _release(self, request_id: RequestId) -> None:
        """Free a request that another engine owns now."""

    @abstractmethod
    def _retain(self, request_id: RequestId) -> None:
        """Decode a request again whose export has failed."""

    @abstractmethod
    def _advance_import(self, migration: IncomingT) -> RequestSnapshot | None:
        """Copy more. Returns the snapshot once everything is here. Raises TransferError."""

    @abstractmethod
    def _resume(self, migration: IncomingT, snapshot: RequestSnapshot) -> int:
        """Decode a request that this engine owns now. Returns how many tokens it prefilled again."""

    @abstractmethod
    def _cancel_reservation(self, request_id: RequestId) -> None:
        """Free the reservation of an import that has failed."""

    # the protocol

    def _reason_not_to_export(self, command: StartExport) -> str:
        if self._find_request(command.request_id) is None:
            return "the request is not on this engine"
        return "the request is being migrated already" if command.request_id in self._outgoing else ""

    def _poll_outgoing(self, request_id: RequestId, migration: OutgoingT) -> None:
        if migration.is_exported and migration.handoff.is_imported:
            self._finish_export(request_id, migration)
            return
        is_reserved = migration.is_exported or self._is_reserved(migration)
        if failure := migration.check(self.clock()):
            if migration.is_exported and not migration.handoff.withdraw_export():
                self._finish_export(request_id, migration)
            else:
                self._end_export(request_id, migration, failure)
        elif (
            is_reserved
            and not migration.is_exported
            and (output := self._advance_export(migration)) is not None
        ):
            try:
                migration.handoff.export_snapshot(self._snapshot(migration, output))
            except OSError as error:
                self._end_export(request_id, migration, f"the snapshot cannot be written: {error}")
            else:
                migration.is_exported = True

    def _is_reserved(self, migration: OutgoingT) -> bool:
        """Whether the destination has reserved a row that this engine can export to."""
        if migration.reservation is None and (found := migration.handoff.reservation()) is not None:
            migration.reservation = found
            migration.failure = migration.failure or self._reason_to_reject_reservation(migration, found)
        return migration.reservation is not None

    def _finish_export(self, request_id: RequestId, migration: OutgoingT) -> None:
        del self._outgoing[request_id]
        migration.close()
        self._release(request_id)
        self._replies.append(ExportFinished(migration.command.migration_id))

    def _end_export(self, request_id: RequestId, migration: OutgoingT, failure: str) -> None:
        del self._outgoing[request_id]
        migration.close()
        self._retain(request_id)
        self._replies.append(ExportFailed(migration.command.migration_id, failure))

    def _poll_incoming(self, request_id: RequestId, migration: IncomingT) -> None:
        failure, snapshot = migration.check(self.clock()), None
        if not failure:
            try:
                snapshot = self._advance_import(migration)
            except TransferError as error:
                failure = str(error)
        if snapshot is not None and not migration.handoff.commit_import():
            failure = "the source has withdrawn the export"
        if failure:
            del self._incoming[request_id]
            self._cancel_reservation(request_id)
            self._replies.append(ImportFailed(migration.command.migration_id, failure))
        elif snapshot is not None:
            self._finish_import(request_id, migration, snapshot)

    def _finish_import(self, request_id: RequestId, migration: IncomingT, snapshot: RequestSnapshot) -> None:
        del self._incoming[request_id]
        num_prefilled = self._resume(migration, snapshot)
        self._replies.append(
            ImportFinished(
                migration.command.migration_id,
                request_id,
                num_tokens=len(snapshot.output.token_ids),
                num_bytes=migration.num_bytes,
                copy_s=migration.copy_s,
                stop_s=max(0.0, self.clock() - snapshot.stopped_at_s),
                num_prefilled=num_prefilled,
            )
        )
