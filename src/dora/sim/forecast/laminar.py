"""One version a trajectory without a bound, as Laminar does: an engine takes the newest once it has run dry.

Every few seconds tails of a version are packed together, best fit by rows, so that engines run dry
sooner. Nothing else holds samples back than how many the trainer has in store.
"""

from __future__ import annotations

from dora.core.actions import Action, Migrate
from dora.core.events import Event, Migrated, MigrationFailed
from dora.core.records import Limits, RequestId
from dora.sim.forecast.foreign import Foreign, Seats

REPACK_S = 5.0
STORED = 2  # batches of finished groups at which engines begin nothing more


class Laminar(Foreign):
    """Engines by themselves, and a trainer that takes what was finished first."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._moving: dict[RequestId, int] = {}
        self._packed_s = 0.0

    def _hear(self, event: Event) -> list[Action]:
        if isinstance(event, Migrated | MigrationFailed):
            destination = self._moving.pop(event.request)
            if isinstance(event, MigrationFailed) or event.request not in self.where:
                return []
            del self.engines[self.where[event.request]].running[event.request]
            self.engines[destination].running[event.request] = None
            self.where[event.request] = destination
            return []
        return super()._hear(event)

    def _decide(self, now: float) -> list[Action]:
        orders = self._fetch(2 * self.limits.batch_size) + self._train()
        if self.newest is None:
            return orders
        is_packing = now >= self._packed_s + REPACK_S
        if is_packing:
            self._packed_s = now
            orders += self._pack()
        coming = set(self._moving.values())
        for engine in self.engines.values():
            if not engine.running and engine.loading is None and engine.id not in coming:
                orders += self._renew(engine)
        return orders

    def _renew(self, engine: Seats) -> list[Action]:
        """It has run dry: the newest weights, then as many new groups as it has rows."""
        if engine.held is None or engine.held != self.newest:
            return [self._load(engine)]
        orders: list[Action] = []
        size = self.limits.group_size
        is_full = len(self.ready) >= STORED * self.limits.batch_size
        while self.prompts and engine.free >= min(size, engine.rows) and not is_full:
            order, requests = self._begin(self.prompts.popleft(), engine.held)
            orders += [order, self._seat(engine, requests)]
        return orders

    def _pack(self) -> list[Action]:
        """Empty engines that decode few rows into those of their version that these fit best."""
        orders: list[Action] = []
        coming: dict[int, int] = {}
        for destination in self._moving.values():
            coming[destination] = coming.get(destination, 0) + 1
        leaving = {self.where[request] for request in self._moving if request in self.where}
        for engine in sorted(self.engines.values(), key=lambda e: (len(e.running), e.id)):
            if not engine.running or 2 * len(engine.running) > engine.rows or engine.id in coming:
                continue
            fit = [
                (other.free - coming.get(other.id, 0), other.id)
                for other in self.engines.values()
                if other is not engine and other.held == engine.held and other.running
                and other.id not in leaving and other.loading is None
                and other.free - coming.get(other.id, 0) >= len(engine.running) <= len(other.running)
            ]  # fmt: skip
            if not fit or engine.id in leaving or engine.held is None:
                continue
            _, host = min(fit)
            leaving.add(engine.id)
            coming[host] = coming.get(host, 0) + len(engine.running)
            for request in engine.running:
                self._moving[request] = host
                orders.append(Migrate(request, engine.id, host, engine.held, "repack"))
        return orders
