"""The driver's side of live migrations: starts both engines of each, and reports how it ended.

The engines decide in shared memory which of them owns the request (`dora.engine.kv_transfer.handoff`). Once
both sides have ended, that memory shows how the migration has ended. The orchestrator gets exactly one event
about each migration, whichever process crashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestFailed, RequestFinished
from dora.engine.kv_transfer.handoff import Handoff, HandoffSlot, HandoffSlots, HandoffState
from dora.engine.messages import MigrationReply
from dora.engine.request import Request
from dora.runtime.process import messages as m


@dataclass
class MigrationInProgress:
    """A migration. A side is open from its first message to its last reply, or until its engine is lost."""

    id: int
    action: Migrate
    slot: HandoffSlot
    is_destination_open: bool = True
    is_source_open: bool = True
    has_lost_side: bool = False  # its engine was lost before its last reply
    imported: m.ImportFinished | None = None
    failure: str = ""  # why the migration must end: the first reason
    delayed_events: list[Event] = field(default_factory=list)  # reported after the migration's own event

    @property
    def is_finished(self) -> bool:
        return not (self.is_source_open or self.is_destination_open)

    def involves(self, engine: int) -> bool:
        return engine in (self.action.source, self.action.destination)


class Migrations:
    """Executes `Migrate` actions."""

    def __init__(
        self,
        folder: Path,
        lease_s: float,
        events: deque[Event],
        send: Callable[[int, object], bool],
    ) -> None:
        """`folder` gets the file of the migrations' slots.

        A side that copies nothing for `lease_s` ends the migration.
        `send(engine, message)` returns False if the engine is lost.
        """
        self._slots, self._lease_s, self._events, self._send = HandoffSlots(folder), lease_s, events, send
        self._num_started = 0
        self.in_progress: dict[int, MigrationInProgress] = {}

    def start(self, action: Migrate, request: Request, source_pool: Any) -> None:
        """Start both sides; `source_pool` as in `ReserveMigration`, None: token-only."""
        number = self._num_started
        self._num_started += 1
        try:
            slot = self._slots.allocate(number, request)
        except OSError as error:
            self.reject(action, f"no memory for its slot: {error}")
            return
        reservation = m.ReserveMigration(number, request, source_pool, slot, self._lease_s)
        if not self._send(action.destination, reservation):
            self._slots.free(slot)
            self.reject(action)
            return
        migration = self.in_progress[number] = MigrationInProgress(number, action, slot)
        export = m.StartExport(number, action.request, slot, self._lease_s, source_pool is not None)
        migration.is_source_open = self._send(action.source, export)
        if not migration.is_source_open:
            self._cancel(migration, "an engine is lost")

    def reject(self, action: Migrate, reason: str = "an engine is lost") -> None:
        """Fail a migration that cannot start."""
        # Before all queued events: the loss of one of its engines may be among them.
        self._events.appendleft(_failed(action, reason))

    def on_reply(self, reply: MigrationReply) -> None:
        """Handle a reply of one side. A reply about a finished migration is ignored."""
        migration = self.in_progress.get(reply.migration_id)
        if migration is None:
            return
        match reply:
            case m.ImportFinished():
                migration.is_destination_open, migration.imported = False, reply
            case m.ImportFailed(_, reason):
                migration.is_destination_open = False
                self._cancel(migration, reason)
            case m.ExportFinished():
                migration.is_source_open = False
            case m.ExportFailed(_, reason):
                migration.is_source_open = False
                self._cancel(migration, reason)
        self._report_if_finished(migration)

    def on_engine_lost(self, engine: int) -> None:
        """The process of `engine` has exited: cancel its migrations on the other side."""
        for migration in [each for each in self.in_progress.values() if each.involves(engine)]:
            if engine == migration.action.destination:
                migration.has_lost_side |= migration.is_destination_open
                migration.is_destination_open = False
            else:
                migration.has_lost_side |= migration.is_source_open
                migration.is_source_open = False
            self._cancel(migration, f"engine {engine} is lost")
            self._report_if_finished(migration)

    def report(self, event: Event) -> None:
        """Queue an event of an engine; one about a request that it just imported only after `Migrated`.

        `Migrated` waits until the source has replied, so that actions which follow find its row free.
        """
        if isinstance(event, RequestFinished | RequestFailed):
            for migration in self.in_progress.values():
                if (migration.action.request, migration.action.destination) == (event.request, event.engine):
                    migration.delayed_events.append(event)
                    return
        self._events.append(event)

    def state_of(self, migration: MigrationInProgress) -> HandoffState:
        """How far the two engines have come."""
        return self._slots.open(migration.id, migration.slot).state

    def is_involved(self, engine: int) -> bool:
        """Whether a migration from or to `engine` is in progress."""
        return any(migration.involves(engine) for migration in self.in_progress.values())

    def _cancel(self, migration: MigrationInProgress, reason: str) -> None:
        """One side has ended: cancel the other, which replies."""
        migration.failure = migration.failure or reason
        if migration.is_destination_open:
            self._send(migration.action.destination, m.CancelMigration(migration.id))
        if migration.is_source_open:
            self._send(migration.action.source, m.CancelMigration(migration.id))

    def _report_if_finished(self, migration: MigrationInProgress) -> None:
        """Report the outcome, which no side can change any more."""
        if not migration.is_finished:
            return
        outcome: Event
        if self.state_of(migration) is HandoffState.IMPORTED:
            outcome = _migrated(migration, self._slots.open(migration.id, migration.slot))
        else:
            outcome = _failed(migration.action, migration.failure)
        self._events.extend([outcome, *migration.delayed_events])
        del self.in_progress[migration.id]
        if not migration.has_lost_side:  # its process may write to the slot until it has exited
            self._slots.free(migration.slot)


def _migrated(migration: MigrationInProgress, handoff: Handoff) -> Migrated:
    action, imported = migration.action, migration.imported
    if imported is None:  # the destination crashed between its commit and its reply
        length = handoff.num_imported_tokens()
        imported = m.ImportFinished(migration.id, action.request, length, 0, 0.0, 0.0)
    return Migrated(
        action.request,
        action.source,
        action.destination,
        imported.num_tokens,
        imported.num_bytes,
        imported.copy_s,
        imported.stop_s,
        imported.num_prefilled,
    )


def _failed(action: Migrate, reason: str) -> MigrationFailed:
    return MigrationFailed(action.request, action.source, action.destination, reason)
