"""A model of the two engines of a migration: they follow the protocol in any order and crash at any time."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np

from dora.core.types import RequestId
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import (
    Handoff,
    HandoffMemory,
    HandoffSlot,
    KVFormat,
    RequestSnapshot,
    Reservation,
)
from dora.engine.request import Request, SamplingParams
from dora.runtime.process import messages as m

REQUEST = RequestId(0, 1, 2)
NUM_TOKENS = 7
OUTPUT = PartialOutput(np.arange(NUM_TOKENS), np.zeros((NUM_TOKENS, 3), np.float32), ())
SNAPSHOT = RequestSnapshot(
    KVFormat(1, "", "", "float32", ()),
    Request(REQUEST, REQUEST.group, (1, 2), 0, 0, SamplingParams(1.0, 8)),
    OUTPUT,
    num_computed=8,
    blocks=np.zeros(0, np.int64),
    checksums=np.zeros(0, np.uint64),
    stopped_at_s=0.0,
)


class Engine:
    """One engine of a migration, with delayed messages in both directions."""

    _migration_id: int
    _handoff: Handoff

    def __init__(self, rng: Random) -> None:
        self.inbox: deque[object] = deque()
        self.outbox: deque[object] = deque()
        self._rng, self._memory = rng, HandoffMemory()
        self._is_open = False

    def act(self) -> None:
        """Handle one message, or advance the migration by one step."""
        if self.inbox and self._rng.random() < 0.5:
            self.handle(self.inbox.popleft())
        elif self._is_open:
            self.poll()

    def handle(self, message: object) -> None:
        raise NotImplementedError

    def poll(self) -> None:
        raise NotImplementedError

    def _start(self, migration_id: int, slot: HandoffSlot) -> None:
        self._migration_id, self._is_open = migration_id, True
        self._handoff = self._memory.open(migration_id, slot)

    def _finish(self, reply: object) -> None:
        self._is_open = False
        self.outbox.append(reply)


class Destination(Engine):
    """Reserves a row, imports the request, or gives up."""

    has_imported = False

    def handle(self, message: object) -> None:
        match message:
            case m.ReserveMigration(migration_id, slot=slot):
                self._start(migration_id, slot)
                if self._rng.random() < 0.1:
                    self._finish(m.ImportFailed(migration_id, "no free row"))
                else:
                    self._handoff.reserve(Reservation(0, ""))
            case m.CancelMigration() if self._is_open:
                self._finish(m.ImportFailed(self._migration_id, "cancelled"))
            case _:
                pass

    def poll(self) -> None:
        if self._rng.random() < 0.05:
            self._finish(m.ImportFailed(self._migration_id, "lease expired"))
        elif self._handoff.commit_import():
            self.has_imported = True
            self._finish(m.ImportFinished(self._migration_id, REQUEST, NUM_TOKENS, 512, 0.001, 0.002))


class Source(Engine):
    """Exports the request, and withdraws it unless it was imported."""

    _has_exported = False

    def handle(self, message: object) -> None:
        match message:
            case m.StartExport(migration_id, slot=slot):
                self._start(migration_id, slot)
                if self._rng.random() < 0.1:
                    self._finish(m.ExportFailed(migration_id, "it has finished"))
            case m.CancelMigration() if self._is_open:
                self._withdraw("cancelled")
            case _:
                pass

    def poll(self) -> None:
        if not self._has_exported:
            if self._handoff.reservation() is not None and self._rng.random() < 0.3:
                self._has_exported = True
                self._handoff.export_snapshot(SNAPSHOT)
        elif self._handoff.is_imported:
            self._finish(m.ExportFinished(self._migration_id))
        elif self._rng.random() < 0.1:
            self._withdraw("lease expired")

    def _withdraw(self, reason: str) -> None:
        if not self._has_exported or self._handoff.withdraw_export():
            self._finish(m.ExportFailed(self._migration_id, reason))
