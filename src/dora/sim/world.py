"""Every station of a run, played in virtual time.

A heap of (time, tie-break, fact): the tie-break makes a seed give the same run for ever. Orders
are carried out by scheduling the facts they cause; a lost engine's facts are never delivered.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import singledispatchmethod
from random import Random

from dora.core.actions import (
    Abort,
    Action,
    Drop,
    Fetch,
    Generate,
    Load,
    Publish,
    Score,
    Train,
)
from dora.core.events import (
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    Progressed,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.records import Chunk, GroupId, RequestId
from dora.sim.models import WorldConfig, draw_length


class Deadlock(Exception):
    """The run is not done and nothing will ever happen again."""


def digest_of(version: int) -> str:
    """What stands for the digest of a version's bytes in simulated runs."""
    return f"sim-{version:08x}"


@dataclass(slots=True)
class SimEngine:
    """One life of an engine; its facts are void once it is lost."""

    id: int
    held: set[int] = field(default_factory=set)
    ends: dict[RequestId, tuple[float, int]] = field(default_factory=dict)  # -> end time, tokens
    is_lost: bool = False


class World:
    """Carries out orders and tells facts; `now` is virtual seconds."""

    def __init__(self, config: WorldConfig, seed: int) -> None:
        self.config = config
        self.now = 0.0
        self._rng = Random(f"world {seed}")
        self._heap: list[tuple[float, int, SimEngine | None, Event]] = []
        self._num_told = 0
        self._cursor = 0
        self._is_loss_planned = config.loss_interval_s is None  # None: as if the plan never came true
        self.engines: dict[int, SimEngine] = {}
        for engine_id in range(len(config.engines)):
            self._join(engine_id, self._rng.uniform(0.0, 0.1))

    def next_fact(self, until: float | None) -> Event | None:
        """The next fact, or None when `until` comes first. Raises Deadlock if nothing is to come."""
        while self._heap and self._is_void(self._heap[0]):
            heapq.heappop(self._heap)
        if until is not None and (not self._heap or self._heap[0][0] > until):
            self.now = max(self.now, until)
            return None
        if not self._heap:
            raise Deadlock("everyone waits, and no fact is under way")
        self.now, _, engine, event = heapq.heappop(self._heap)
        self._happen(engine, event)
        return event

    @singledispatchmethod
    def perform(self, order: Action) -> None:
        """Orders that only the ledger carries out (admit, commit, ...) need nothing here."""

    @perform.register
    def _(self, order: Fetch) -> None:
        size = self.config.num_prompts
        ids = tuple(GroupId(*divmod(self._cursor + k, size)) for k in range(order.count))
        self._tell(0.001, PromptsFetched(self._cursor, ids))
        self._cursor += order.count

    @perform.register
    def _(self, order: Generate) -> None:
        engine = self.engines[order.engine]
        for request in order.requests:
            length = draw_length(Random(f"length {request}"), self.config)
            took_s = length * self.config.speeds[order.engine] * self._rng.uniform(0.9, 1.1)
            engine.ends[request] = (self.now + took_s, length)
            if self._rng.random() < self.config.share_refused:
                self._tell(
                    0.0, RequestFailed(order.engine, request, "refused by the simulated engine"), engine
                )
                continue
            chunk = Chunk(order.version, digest_of(order.version), length)
            fact = RequestFinished(order.engine, request, order.version, length, (chunk,), "stop")
            self._tell(took_s, fact, engine)

    @perform.register
    def _(self, order: Abort) -> None:
        engine = self.engines[order.engine]
        given_up = tuple(r for r in order.requests if r in engine.ends)
        for request in given_up:
            del engine.ends[request]
        self._tell(
            self._rng.uniform(0.0, 0.01), RequestsAborted(order.engine, given_up, len(given_up)), engine
        )

    @perform.register
    def _(self, order: Score) -> None:
        rng = self._rng
        delay_s = self.config.reward_s * rng.expovariate(1.0)
        if rng.random() < self.config.share_failed:
            self._tell(delay_s, GroupUnscorable(order.group, "simulated reward failure"))
            return
        size = self.config.limits.group_size
        flat = rng.random() < self.config.share_flat
        rewards = tuple(1.0 if flat else float(k % 2) for k in range(size))
        self._tell(delay_s, GroupScored(order.group, rewards))

    @perform.register
    def _(self, order: Train) -> None:
        self._tell(self.config.step_s * self._rng.uniform(0.5, 1.5), Trained(order.step))

    @perform.register
    def _(self, order: Publish) -> None:
        self._tell(0.001, Published(order.version, digest_of(order.version)))

    @perform.register
    def _(self, order: Load) -> None:
        fact = Loaded(order.engine, order.version, digest_of(order.version))
        self._tell(self.config.load_s * self._rng.uniform(0.1, 2.0), fact, self.engines[order.engine])

    @perform.register
    def _(self, order: Drop) -> None:
        self.engines[order.engine].held.discard(order.version)

    def _tell(self, delay_s: float, event: Event, engine: SimEngine | None = None) -> None:
        self._num_told += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num_told, engine, event))

    def _is_void(self, entry: tuple[float, int, SimEngine | None, Event]) -> bool:
        _, _, engine, event = entry
        if engine is not None and engine.is_lost:
            return True
        if engine is None or not isinstance(event, RequestFinished | RequestFailed):
            return False
        return event.request not in engine.ends  # it was aborted meanwhile

    def _happen(self, engine: SimEngine | None, event: Event) -> None:
        """What a fact changes in the world itself."""
        if isinstance(event, RequestFinished | RequestFailed):
            assert engine is not None
            del engine.ends[event.request]
        elif isinstance(event, Loaded):
            self.engines[event.engine].held.add(event.version)
        elif isinstance(event, EngineJoined):
            self.engines[event.engine] = SimEngine(event.engine)
            self._tell(1.0, Progressed(event.engine, ()), self.engines[event.engine])
            self._plan_loss()
        elif isinstance(event, EngineLost):
            self.engines.pop(event.engine).is_lost = True
            self._join(event.engine, self.config.return_s)
            self._is_loss_planned = False
            self._plan_loss()
        elif isinstance(event, Progressed):
            self._report(self.engines[event.engine])

    def _report(self, engine: SimEngine) -> None:
        speed = self.config.speeds[engine.id]
        lengths = tuple((r, max(0, n - int((end - self.now) / speed))) for r, (end, n) in engine.ends.items())
        self._tell(1.0, Progressed(engine.id, lengths), engine)

    def _join(self, engine_id: int, delay_s: float) -> None:
        rows, slots = self.config.engines[engine_id]
        self._tell(delay_s, EngineJoined(engine_id, rows, slots))

    def _plan_loss(self) -> None:
        """One loss is planned at a time, of an engine alive now; after the last, the world is healed."""
        if self._is_loss_planned or not self.engines:
            return
        self._is_loss_planned = True
        if self._rng.random() < 0.02:
            return
        assert self.config.loss_interval_s is not None
        victim = self._rng.choice(list(self.engines.values()))
        delay_s = self._rng.expovariate(1.0 / self.config.loss_interval_s)
        self._tell(delay_s, EngineLost(victim.id, "simulated loss"), victim)
