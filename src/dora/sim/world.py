"""Every station of a run, played in virtual time.

A heap of (time, tie-break, happening): the tie-break makes a seed give the same run for ever.
Orders are carried out by planning what they cause; a happening may tell a fact, or none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from dora.core.actions import Action, Attest, Fetch, Migrate, Publish, Score, Train
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    PromptsFetched,
)
from dora.core.records import GroupId
from dora.sim.ages import Drift
from dora.sim.engines import SimEngine, Stage, Truth
from dora.sim.faults import Luck
from dora.sim.models import WorldConfig
from dora.sim.moves import Moves
from dora.sim.rollout import Rollout
from dora.sim.trainers import Trainers

Happening = Callable[..., Event | None]


class Deadlock(Exception):
    """The run is not done and nothing will ever happen again."""


class World:
    """Carries out orders and tells facts; `now` is virtual seconds."""

    def __init__(self, config: WorldConfig, seed: int) -> None:
        self.config = config
        self.now = 0.0
        self.rng = Random(f"world {seed}")
        self.luck = Luck(config.faults, self.rng)
        self.drift = Drift(config.limits.aging, Random(f"drift {seed}"))
        self.truth = Truth()
        self.moves = Moves(self)
        self.rollout = Rollout(self)
        self.due: deque[Event] = deque()  # facts to be told before all others
        self._heap: list[tuple[float, int, Happening, tuple[Any, ...]]] = []
        self._num_planned = 0
        self._cursor = 0
        self._num_coming = 0  # engines on their way
        self._next_engine = 0
        self._trainers = Trainers(self, seed)
        self._orders: dict[type, Callable[[Any], None]] = {
            Fetch: self._fetch,
            Migrate: self.moves.begin,
            Score: self._score,
            Train: self._trainers.train,
            Publish: self._trainers.publish,
            Attest: self._trainers.publish,
        }
        self._begin()

    def _begin(self) -> None:
        config = self.config
        for kind in range(len(config.engines)):
            self._plan_join(kind, config.late_s[kind] if config.late_s else self.rng.uniform(0.0, 0.1))
        self._plan_mishap(config.loss_interval_s, self._lose_some)
        self._plan_mishap(config.faults.drain_interval_s, self._ask_drain)

    def die(self, cursor: int, from_step: int) -> None:
        """Nothing is left of all stations; new ones start, the dataset goes on at `cursor`, the trainer after
        so many steps.
        """
        self._heap.clear()
        self.due.clear()
        self.truth = Truth()
        self._cursor, self._num_coming, self._next_engine = cursor, 0, 0
        self._trainers.die(from_step)
        self._begin()

    def perform(self, order: Action) -> None:
        """Orders that only the ledger carries out (admit, commit, ...) need nothing here."""
        carry_out = self._orders.get(type(order), self.rollout.carry_out)
        carry_out(order)

    def next_fact(self, until: float | None) -> Event | None:
        """The next fact, or None when `until` comes first. Raises Deadlock if nothing is to come."""
        while not self.due:
            if until is not None and (not self._heap or self._heap[0][0] > until):
                self.now = max(self.now, until)
                return None
            if not self._heap and not self.luck.is_healed:
                self.heal()
            if not self._heap:
                raise Deadlock("everyone waits, and no fact is under way")
            self.now, _, happen, args = heapq.heappop(self._heap)
            if (event := happen(*args)) is not None:
                return event
        return self.due.popleft()

    def heal(self) -> None:
        """From now on nothing fails and nothing is slow; there is at least one engine."""
        self.luck.is_healed = True
        if not self._staying() and not self._num_coming:
            self._plan_join(0, 0.0)

    def at(self, delay_s: float, happen: Happening, *args: Any) -> None:
        """Plan a happening."""
        self._num_planned += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num_planned, happen, args))

    # dataset, rewarder

    def _tell(self, delay_s: float, event: Event) -> None:
        self.at(delay_s, lambda: event)

    def _fetch(self, order: Fetch) -> None:
        size = self.config.num_prompts
        ids = tuple(GroupId(*divmod(self._cursor + k, size)) for k in range(order.count))
        self._tell(0.001, PromptsFetched(self._cursor, ids))
        self._cursor += order.count

    def _score(self, order: Score) -> None:
        delay_s = self.config.reward_s * self.rng.expovariate(1.0)
        if self.luck.fails(self.config.share_failed):
            return self._tell(delay_s, GroupUnscorable(order.group, "simulated reward failure"))
        is_flat = self.rng.random() < self.config.share_flat
        limits = self.config.limits
        size = limits.group_size
        if order.group.is_held_out and limits.evaluation is not None:
            size = limits.evaluation.num_answers
        rewards = tuple(1.0 if is_flat else float(k % 2) for k in range(size))
        self._tell(delay_s, GroupScored(order.group, rewards))

    # engines come and go

    def _plan_join(self, kind: int, delay_s: float, lost: int | None = None) -> None:
        self._num_coming += 1
        self.at(delay_s, self._join, kind, lost)

    def _join(self, kind: int, lost: int | None) -> Event:
        """An engine may be started in the place of one whose loss is known."""
        config, number = self.config, self._next_engine
        self._num_coming -= 1
        self._next_engine += 1  # ids are never used again
        rows, slots = config.engines[kind]
        is_colocated = kind >= len(config.engines) - config.num_colocated
        speed = 1.0 / config.speeds[kind]
        engine = SimEngine(number, kind, rows, slots, speed, is_colocated, is_paused=is_colocated)
        self.truth.engines[number] = engine
        return EngineJoined(number, rows, slots, is_colocated, None if lost in self.truth.engines else lost)

    def _plan_mishap(self, interval_s: float | None, happen: Happening) -> None:
        if interval_s is not None and not self.luck.is_healed:
            self.at(self.rng.expovariate(1.0 / interval_s), happen)

    def _staying(self) -> list[SimEngine]:
        return [e for e in self.truth.engines.values() if not e.is_lost and not e.is_leaving]

    def _lose_some(self) -> None:
        """One engine dies, now and then two at once; a world without engines heals."""
        staying = self._staying()
        if not staying and not self._num_coming:
            self.heal()
        if self.luck.is_healed:
            return
        for engine in self.rng.sample(staying, min(len(staying), 1 + self.luck.fails(0.1))):
            self.lose(engine)
        self._plan_mishap(self.config.loss_interval_s, self._lose_some)

    def lose(self, engine: SimEngine) -> None:
        """It is dead from now on; a request that it had offered may still be taken from its memory."""
        engine.is_lost = True
        for row in engine.rows.values():
            if row.move is None or row.move.stage is not Stage.STOPPED:
                del self.truth.where[row.request]
        engine.rows = {}
        self.at(self.luck.takes(self.config.faults.detect_s), self._bury, engine)
        if self.rng.random() < self.config.faults.share_returning:
            self._plan_join(engine.kind, self.luck.takes(self.config.return_s), engine.id)

    def _bury(self, engine: SimEngine) -> None:
        """Its death is noticed: first what became of its moves is told, then that it is lost."""
        self.due.extend(self.moves.bury(engine))
        self.due.append(EngineLost(engine.id, "simulated loss"))
        del self.truth.engines[engine.id]

    def _ask_drain(self) -> Event | None:
        self._plan_mishap(self.config.faults.drain_interval_s, self._ask_drain)
        staying = self._staying()
        if self.luck.is_healed or not staying:
            return None
        engine = self.rng.choice(staying)
        if self.rng.random() < self.config.faults.share_returning:
            self._plan_join(engine.kind, self.luck.takes(self.config.return_s))
        return DrainAsked(engine.id)
