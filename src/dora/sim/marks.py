"""Coverage marks: which situations the worlds came into, counted by name.

A swarm that never met a rule says nothing about it. Marks are read off facts, orders, the
checker's ledger and the state; nothing in the core knows of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dora.core.actions import (
    Action,
    Admit,
    BeginEvaluation,
    Commit,
    Generate,
    Load,
    Migrate,
    RefuseDrain,
    Rush,
    Skip,
    SkipEvaluation,
    Train,
)
from dora.core.aging import Aging
from dora.core.bound import num_admissible
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLost,
    Event,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Progressed,
    RequestFinished,
    Resumed,
    Trained,
    TrainerLost,
    TrainerReplaced,
)
from dora.core.state import State
from dora.sim.checker import Ledger

GOES_ON = "goes on after everything died"
MARKS = (
    "admit: aging allows fresh samples only",
    "admit: aging allows more again",
    "admit: at an old version that engines keep",
    "admit: due before groups of an older version",
    "admit: held back by aging",
    "admit: held back by the bound",
    "admit: held back by the one live version",
    "admit: held back by slack",
    "commit: a straggler is passed",
    "drain: asked of an engine with requests",
    "drain: refused, for it has become the only engine",
    "drain: refused, for it is the only engine that stays",
    "evaluation: an answer again, after a loss",
    "evaluation: at a version that is not the newest",
    "evaluation: begun",
    "evaluation: goes on after everything died",
    "evaluation: goes on after the last step",
    "evaluation: lent an engine",
    "evaluation: of a version that waits to be redone",
    "evaluation: skipped, for one is under way",
    "evaluation: while a step is trained",
    "generate: a failed group's row is still in use",
    "generate: again, after a loss",
    "generate: siblings on two engines",
    "generate: two versions on an engine",
    "generate: with a newer version than its group's",
    "join: in the place of a lost engine",
    "load: a pinned version that no engine had",
    "load: a version that was left out",
    "load: an engine waits for its turn",
    "load: failed",
    "load: skipped a version",
    "lost: an engine that was drained",
    "lost: an engine with requests",
    "lost: an engine with moves under way",
    "migrate: flip",
    "migrate: gather",
    "migrate: kv",
    "migrate: leave",
    "migrate: level",
    "migrate: reclaim",
    "migrate: slow",
    "move: came too late to give it up",
    "move: failed, for it ended first",
    "move: failed, for an engine is dead",
    "move: failed, for it was given up",
    "move: failed, for the destination refused it",
    "move: failed, for the lease was over",
    "move: one request several times",
    "pause: a step waits for it",
    "progress: KV above the watermark",
    "request: finished before it could be given up",
    "request: goes on with newer versions",
    "resume: requests wait for a version to be redone",
    "resume: with batches that were complete",
    "rush: begun",
    "rush: lifted",
    "skip: a version is left out",
    "step: measured before",
    "train: older than aging allows by now",
    "train: repeated",
    "train: the bound is used up",
    "trainer: again where it was, with nothing to redo",
    "trainer: lost again while steps are redone",
    "trainer: lost in a step",
    "trainer: lost while an engine loads",
    "trainer: replaced, with steps to redo",
)


class Marks:
    """Counts facts and orders by kind, and situations by the names of MARKS."""

    def __init__(self, ledger: Ledger) -> None:
        self.seen: Counter[str] = Counter()
        self._ledger, self._seats = ledger, ledger.seats
        self._moved: set[object] = set()
        self._lost: set[object] = set()
        self._staleness = ledger.limits.max_staleness  # at the last admission
        self._newest_of: dict[int, int] = {}  # engine -> newest version it was told to load
        self._of_fact: dict[type, Callable[[Any], None]] = {
            DrainAsked: self._drain_asked,
            EngineJoined: self._engine_joined,
            EngineLost: self._engine_lost,
            LoadFailed: lambda fact: self._mark("load: failed"),
            Migrated: self._migrated,
            MigrationFailed: self._move_failed,
            Progressed: self._progressed,
            RequestFinished: self._finished,
            Resumed: self._resumed,
            Trained: self._trained,
            TrainerLost: self._trainer_lost,
            TrainerReplaced: self._trainer_replaced,
        }
        self._of_order: dict[type, Callable[[Any], None]] = {
            Admit: self._admit,
            BeginEvaluation: lambda order: self._mark("evaluation: begun"),
            SkipEvaluation: lambda order: self._mark("evaluation: skipped, for one is under way"),
            Commit: self._commit,
            Generate: self._generate,
            Load: self._load,
            Migrate: lambda order: self._mark(f"migrate: {order.reason}"),
            RefuseDrain: lambda order: self._mark(f"drain: refused, for {order.reason}"),
            Rush: lambda order: self._mark("rush: begun" if order.requests else "rush: lifted"),
            Skip: lambda order: self._mark("skip: a version is left out"),
            Train: self._train,
        }

    def hear(self, event: Event) -> None:
        """Before the ledger hears of it."""
        kind = type(event)
        self.seen[kind.__name__] += 1
        if (look := self._of_fact.get(kind)) is not None:
            look(event)

    def obey(self, order: Action) -> None:
        """Before the ledger hears of it."""
        kind = type(order)
        self.seen[kind.__name__] += 1
        if (look := self._of_order.get(kind)) is not None:
            look(order)

    def look(self, state: State) -> None:
        """At the state itself, now and then."""
        version = max((v for v in state.fresh_rows if v in state.store), default=None)
        if version is not None and state.prompts and state.fresh_rows[version] > state.num_waiting(version):
            limits = state.limits
            if num_admissible(state, version) == 0 and state.next_step < limits.num_steps:
                self._why_held_back(state, version)
        if state.line:
            self._mark("load: an engine waits for its turn")
        trainer_waits = state.training is None and state.newest in state.batches
        if trainer_waits and not state.is_device_free:
            self._mark("pause: a step waits for it")

    def _why_held_back(self, state: State, version: int) -> None:
        limits = state.limits
        for field, free, name in (
            ("slack", 0, "slack"),
            ("batches_per_version", None, "the one live version"),
        ):
            state.limits = replace(limits, **{field: free})  # type: ignore[arg-type]
            is_cause = num_admissible(state, version) > 0
            state.limits = limits
            if is_cause:
                return self._mark(f"admit: held back by {name}")
        aging, state.aging = state.aging, Aging()
        is_cause = num_admissible(state, version) > 0
        state.aging = aging
        self._mark("admit: held back by aging" if is_cause else "admit: held back by the bound")

    def _mark(self, name: str) -> None:
        self.seen[name] += 1

    # facts

    def _drain_asked(self, fact: DrainAsked) -> None:
        if self._seats.engines[fact.engine].seats:
            self._mark("drain: asked of an engine with requests")

    def _engine_joined(self, fact: EngineJoined) -> None:
        if fact.replaces is not None:
            self._mark("join: in the place of a lost engine")

    def _engine_lost(self, fact: EngineLost) -> None:
        engine = self._seats.engines[fact.engine]
        self._lost.update(engine.seats)
        if engine.seats:
            self._mark("lost: an engine with requests")
        if engine.is_draining:
            self._mark("lost: an engine that was drained")

    def _migrated(self, fact: Migrated) -> None:
        if fact.request in self._seats.aborting:
            self._mark("move: came too late to give it up")
        if fact.request in self._moved:
            self._mark("move: one request several times")
        self._moved.add(fact.request)

    def _move_failed(self, fact: MigrationFailed) -> None:
        if fact.reason.endswith("is dead"):
            self._mark("lost: an engine with moves under way")
            self._mark("move: failed, for an engine is dead")
        else:
            self._mark(f"move: failed, for {fact.reason}")

    def _progressed(self, fact: Progressed) -> None:
        if fact.kv_share > self._ledger.limits.kv_watermark:
            self._mark("progress: KV above the watermark")

    def _finished(self, fact: RequestFinished) -> None:
        if fact.request in self._seats.aborting:
            self._mark("request: finished before it could be given up")
        if len(fact.chunks) > 1:
            self._mark("request: goes on with newer versions")

    def _trained(self, fact: Trained) -> None:
        if fact.step < self._ledger.ages.next_step:
            self._mark("step: measured before")

    def _resumed(self, fact: Resumed) -> None:
        ledger = self._ledger
        self._newest_of.clear()
        if ledger.held_out.version is not None:
            is_void = ledger.held_out.version > fact.from_step
            self._mark(f"evaluation: {'of a version that waits to be redone' if is_void else GOES_ON}")
        if any(count and version > fact.from_step for version, count in ledger.pins.items()):
            self._mark("resume: requests wait for a version to be redone")
        if ledger.next_step > ledger.steps.num_trained:
            self._mark("resume: with batches that were complete")

    def _trainer_lost(self, fact: TrainerLost) -> None:
        steps = self._ledger.steps
        if steps.is_redo:
            self._mark("trainer: lost again while steps are redone")
        if steps.training is not None:
            self._mark("trainer: lost in a step")
        if any(engine.loading is not None for engine in self._seats.engines.values()):
            self._mark("trainer: lost while an engine loads")

    def _trainer_replaced(self, fact: TrainerReplaced) -> None:
        is_there = (
            "replaced, with steps to redo" if fact.redone else "again where it was, with nothing to redo"
        )
        self._mark(f"trainer: {is_there}")

    # orders

    def _admit(self, order: Admit) -> None:
        ledger, staleness = self._ledger, self._ledger.ages.staleness
        if order.version < max(ledger.store):
            self._mark("admit: at an old version that engines keep")
        elif any(count and deadline > order.deadline for deadline, count in ledger.open.items()):
            self._mark("admit: due before groups of an older version")
        if staleness == 0 < ledger.limits.max_staleness:
            self._mark("admit: aging allows fresh samples only")
        if staleness > self._staleness:
            self._mark("admit: aging allows more again")
        self._staleness = staleness

    def _commit(self, order: Commit) -> None:
        ledger = self._ledger
        deadline = ledger.deadline_of[order.group]
        if any(count and earlier < deadline for earlier, count in ledger.open.items()):
            self._mark("commit: a straggler is passed")

    def _generate(self, order: Generate) -> None:
        seats = self._seats
        engine = seats.engines[order.engine]
        if any(count and version != order.version for version, count in engine.num_of.items()):
            self._mark("generate: two versions on an engine")
        if any(request in seats.aborting for request in engine.seats):
            self._mark("generate: a failed group's row is still in use")
        if not self._lost.isdisjoint(order.requests):
            self._mark("generate: again, after a loss")
        first = order.requests[0]
        if first.is_held_out:
            return self._generate_held_out(order)
        if order.version > self._ledger.version_of[first.group]:
            self._mark("generate: with a newer version than its group's")
        if first.sibling and first not in self._lost:
            self._mark("generate: siblings on two engines")

    def _generate_held_out(self, order: Generate) -> None:
        ledger = self._ledger
        if not self._lost.isdisjoint(order.requests):
            self._mark("evaluation: an answer again, after a loss")
        if order.version < max(ledger.store):
            self._mark("evaluation: at a version that is not the newest")
        if ledger.steps.training is not None:
            self._mark("evaluation: while a step is trained")
        if ledger.steps.num_trained == ledger.limits.num_steps:
            self._mark("evaluation: goes on after the last step")

    def _load(self, order: Load) -> None:
        ledger, version = self._ledger, order.version
        if ledger.pins[version] and not self._seats.copies[version]:
            self._mark("load: a pinned version that no engine had")
        is_lent = version == ledger.held_out.version and version < max(ledger.store)
        if is_lent and not self._seats.copies[version]:
            self._mark("evaluation: lent an engine")
        if ledger.loads.skipped.get(order.engine) == version:
            self._mark("load: a version that was left out")
        newest = self._newest_of.get(order.engine, version)
        if version > newest + 1:
            self._mark("load: skipped a version")
        self._newest_of[order.engine] = max(version, newest)

    def _train(self, order: Train) -> None:
        ledger = self._ledger
        if ledger.steps.failed is not None:
            self._mark("train: repeated")
        oldest = order.step - min(ledger.version_of[group] for group in order.groups)
        if oldest == ledger.limits.max_staleness:
            self._mark("train: the bound is used up")
        if oldest > ledger.ages.staleness:
            self._mark("train: older than aging allows by now")
