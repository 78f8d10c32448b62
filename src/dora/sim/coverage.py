"""Coverage marks: counts of the situations that simulated worlds reach.

A swarm that never reaches a situation does not test the rule for it. Marks are derived from events, actions,
the checker and the orchestrator's state; the orchestrator itself does not count anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dora.core import actions, events
from dora.core.bound import num_admissible
from dora.core.staleness import AdaptiveStaleness
from dora.core.state import State
from dora.sim.checker import Checker

MARKS = (
    "admit: adaptive staleness allows fresh samples only",
    "admit: adaptive staleness raised the bound again",
    "admit: at an older version that engines hold",
    "admit: blocked by adaptive staleness",
    "admit: blocked by batches_per_version",
    "admit: blocked by slack",
    "admit: blocked by the bound",
    "admit: deadline before that of open groups",
    "commit: passes a straggler",
    "decode only: ended",
    "decode only: started",
    "drain: rejected, all other engines were lost",
    "drain: rejected, no other engine stays",
    "drain: requested for an engine with requests",
    "evaluation: an engine loads its older version",
    "evaluation: at an older version",
    "evaluation: continues after a crash of the run",
    "evaluation: continues after the last step",
    "evaluation: during a step",
    "evaluation: generates a response again after a loss",
    "evaluation: of the last version",
    "evaluation: skipped, another is running",
    "evaluation: started",
    "evaluation: waits for its version after a crash of the run",
    "generate: a row is still used by an aborted request",
    "generate: again after a failure",
    "generate: again after a loss",
    "generate: siblings on two engines",
    "generate: two versions on an engine",
    "generate: with a newer version than its group's",
    "join: replaces a lost engine",
    "load: a pinned version that no engine held",
    "load: a version that was skipped",
    "load: an engine waits for its turn",
    "load: failed",
    "load: leaves out a version",
    "lost: an engine that drained",
    "lost: an engine with migrations",
    "lost: an engine with requests",
    "migrate: flip",
    "migrate: gather",
    "migrate: kv",
    "migrate: leave",
    "migrate: level",
    "migrate: queue",
    "migrate: reclaim",
    "migrate: slow",
    "migration: a request migrates again",
    "migration: completed during an abort",
    "migration: failed, an engine is lost",
    "migration: failed, the destination refused it",
    "migration: failed, the lease expired",
    "migration: failed, the request finished first",
    "migration: failed, the request was aborted",
    "pause: a step waits for it",
    "progress: KV usage above the watermark",
    "request: continues with newer versions",
    "request: finished before it was aborted",
    "resume: requests wait for a version that is trained again",
    "resume: with complete batches that were not trained",
    "resume: with more steps",
    "resume: with more steps, after the last one",
    "skip: an engine skips a version",
    "step: measured before",
    "train: again after a failure",
    "train: at the bound",
    "train: older than adaptive staleness now allows",
    "trainer: a replacement is lost before it is ready",
    "trainer: lost during a step",
    "trainer: lost while an engine loads",
    "trainer: lost while it trains steps again",
    "trainer: replaced, with nothing to train again",
    "trainer: replaced, with steps to train again",
)


class CoverageMarks:
    """Counts events and actions by kind, and situations by the names of MARKS.

    Call `observe` before the checker follows an event or action, and `on_state` periodically.
    """

    def __init__(self, checker: Checker) -> None:
        self.counts: Counter[str] = Counter()
        self._checker, self._fleet = checker, checker.fleet
        self._last_event: events.Event | None = None
        self._migrated: set[object] = set()
        self._lost: set[object] = set()  # requests
        self._failed: set[object] = set()  # requests
        self._bound = checker.limits.max_staleness  # at the last admission
        self._newest_load: dict[int, int] = {}  # engine -> newest version that it was to load
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.DrainRequested: self._on_drain_requested,
            events.EngineJoined: self._on_joined,
            events.EngineLost: self._on_lost,
            events.LoadFailed: lambda event: self._mark("load: failed"),
            events.Migrated: self._on_migrated,
            events.MigrationFailed: self._on_migration_failed,
            events.ProgressReported: self._on_progress,
            events.RequestFinished: self._on_finished,
            events.RequestFailed: lambda event: self._failed.add(event.request),
            events.Resumed: self._on_resumed,
            events.Trained: self._on_trained,
            events.TrainerLost: self._on_trainer_lost,
            events.TrainerReplaced: self._on_trainer_replaced,
            actions.Admit: self._admit,
            actions.StartEvaluation: lambda action: self._mark("evaluation: started"),
            actions.SkipEvaluation: lambda action: self._mark("evaluation: skipped, another is running"),
            actions.Commit: self._commit,
            actions.Generate: self._generate,
            actions.Load: self._load,
            actions.Migrate: lambda action: self._mark(f"migrate: {action.reason}"),
            actions.RejectDrain: self._reject_drain,
            actions.DecodeOnly: self._decode_only,
            actions.SkipLoad: lambda action: self._mark("skip: an engine skips a version"),
            actions.Train: self._train,
        }

    def observe(self, record: events.Event | actions.Action) -> None:
        """Count an event or action."""
        kind = type(record)
        self.counts[kind.__name__] += 1
        if isinstance(record, events.Event):
            self._last_event = record
        if (handler := self._handlers.get(kind)) is not None:
            handler(record)

    def on_state(self, state: State) -> None:
        """Count situations that only the orchestrator's state shows."""
        version = max((v for v in state.admission_rows if v in state.stored_versions), default=None)
        if version is not None and state.prompts:
            has_free_rows = state.admission_rows[version] > state.num_waiting(version)
            is_complete = state.next_step == state.limits.num_steps
            if has_free_rows and not is_complete and num_admissible(state, version) == 0:
                self._mark(f"admit: blocked by {_what_blocks_admission(state, version)}")
        if state.load_queue:
            self._mark("load: an engine waits for its turn")
        trainer_waits = state.training_step is None and state.newest_published in state.batches
        if trainer_waits and not state.is_device_free:
            self._mark("pause: a step waits for it")

    def _mark(self, name: str) -> None:
        self.counts[name] += 1

    # Events

    def _on_drain_requested(self, event: events.DrainRequested) -> None:
        if self._fleet.engines[event.engine].running:
            self._mark("drain: requested for an engine with requests")

    def _on_joined(self, event: events.EngineJoined) -> None:
        if event.replaces is not None:
            self._mark("join: replaces a lost engine")

    def _on_lost(self, event: events.EngineLost) -> None:
        engine = self._fleet.engines[event.engine]
        self._lost.update(engine.running)
        if engine.running:
            self._mark("lost: an engine with requests")
        if engine.is_draining:
            self._mark("lost: an engine that drained")

    def _on_migrated(self, event: events.Migrated) -> None:
        if event.request in self._fleet.aborting:
            self._mark("migration: completed during an abort")
        if event.request in self._migrated:
            self._mark("migration: a request migrates again")
        self._migrated.add(event.request)

    def _on_migration_failed(self, event: events.MigrationFailed) -> None:
        if event.reason.endswith("is lost"):
            self._mark("lost: an engine with migrations")
            self._mark("migration: failed, an engine is lost")
        else:
            self._mark(f"migration: failed, {event.reason}")

    def _on_progress(self, event: events.ProgressReported) -> None:
        if event.kv_usage > self._checker.limits.kv_watermark:
            self._mark("progress: KV usage above the watermark")

    def _on_finished(self, event: events.RequestFinished) -> None:
        if event.request in self._fleet.aborting:
            self._mark("request: finished before it was aborted")
        if len(event.chunks) > 1:
            self._mark("request: continues with newer versions")

    def _on_trained(self, event: events.Trained) -> None:
        if event.step < self._checker.adaptive_staleness.next_step:
            self._mark("step: measured before")

    def _on_resumed(self, event: events.Resumed) -> None:
        checker, evaluated = self._checker, self._checker.evaluation.version
        self._newest_load.clear()
        if evaluated is not None and evaluated > event.from_step:
            self._mark("evaluation: waits for its version after a crash of the run")
        elif evaluated is not None:
            self._mark("evaluation: continues after a crash of the run")
        if any(count and version > event.from_step for version, count in checker.pins.items()):
            self._mark("resume: requests wait for a version that is trained again")
        if checker.next_step > checker.steps.num_trained:
            self._mark("resume: with complete batches that were not trained")
        if event.num_steps is not None:
            is_over = checker.steps.num_trained == checker.limits.num_steps
            self._mark(
                "resume: with more steps, after the last one" if is_over else "resume: with more steps"
            )

    def _on_trainer_lost(self, event: events.TrainerLost) -> None:
        steps = self._checker.steps
        if steps.is_trainer_lost:
            self._mark("trainer: a replacement is lost before it is ready")
        if steps.is_redo:
            self._mark("trainer: lost while it trains steps again")
        if steps.training is not None:
            self._mark("trainer: lost during a step")
        if any(engine.loading is not None for engine in self._fleet.engines.values()):
            self._mark("trainer: lost while an engine loads")

    def _on_trainer_replaced(self, event: events.TrainerReplaced) -> None:
        self._mark(f"trainer: replaced, with {'steps' if event.redone else 'nothing'} to train again")

    # Actions

    def _admit(self, action: actions.Admit) -> None:
        checker, bound = self._checker, self._checker.adaptive_staleness.bound
        if action.version < max(checker.store):
            self._mark("admit: at an older version that engines hold")
        elif any(count and deadline > action.deadline for deadline, count in checker.num_open.items()):
            self._mark("admit: deadline before that of open groups")
        if bound == 0 < checker.limits.max_staleness:
            self._mark("admit: adaptive staleness allows fresh samples only")
        if bound > self._bound:
            self._mark("admit: adaptive staleness raised the bound again")
        self._bound = bound

    def _commit(self, action: actions.Commit) -> None:
        deadline = self._checker.groups.deadlines[action.group]
        if any(count and earlier < deadline for earlier, count in self._checker.num_open.items()):
            self._mark("commit: passes a straggler")

    def _generate(self, action: actions.Generate) -> None:
        engine = self._fleet.engines[action.engine]
        if engine.needed_versions - {action.version}:
            self._mark("generate: two versions on an engine")
        if any(request in self._fleet.aborting for request in engine.running):
            self._mark("generate: a row is still used by an aborted request")
        if not self._lost.isdisjoint(action.requests):
            self._mark("generate: again after a loss")
        if not self._failed.isdisjoint(action.requests):
            self._mark("generate: again after a failure")
        first = action.requests[0]
        if first.is_held_out:
            return self._generate_held_out(action)
        if action.version > self._checker.groups.admitted[first.group]:
            self._mark("generate: with a newer version than its group's")
        if first.sibling and first not in self._lost:
            self._mark("generate: siblings on two engines")

    def _generate_held_out(self, action: actions.Generate) -> None:
        checker = self._checker
        if not self._lost.isdisjoint(action.requests):
            self._mark("evaluation: generates a response again after a loss")
        if action.version < max(checker.store):
            self._mark("evaluation: at an older version")
        if checker.steps.training is not None:
            self._mark("evaluation: during a step")
        if checker.steps.num_trained == checker.limits.num_steps:
            is_last = action.version == checker.limits.num_steps
            self._mark(f"evaluation: {'of the last version' if is_last else 'continues after the last step'}")

    def _load(self, action: actions.Load) -> None:
        checker, version = self._checker, action.version
        is_held = self._fleet.num_holders(version) > 0
        if checker.pins[version] and not is_held:
            self._mark("load: a pinned version that no engine held")
        if version == checker.evaluation.version and version < max(checker.store) and not is_held:
            self._mark("evaluation: an engine loads its older version")
        if checker.loads.skipped.get(action.engine) == version:
            self._mark("load: a version that was skipped")
        newest = self._newest_load.get(action.engine, version)
        if version > newest + 1:
            self._mark("load: leaves out a version")
        self._newest_load[action.engine] = max(version, newest)

    def _reject_drain(self, action: actions.RejectDrain) -> None:
        is_new = isinstance(self._last_event, events.DrainRequested)
        self._mark(f"drain: rejected, {'no other engine stays' if is_new else 'all other engines were lost'}")

    def _decode_only(self, action: actions.DecodeOnly) -> None:
        self._mark(f"decode only: {'started' if action.requests else 'ended'}")

    def _train(self, action: actions.Train) -> None:
        checker = self._checker
        if checker.steps.is_failed:
            self._mark("train: again after a failure")
        oldest = action.step - min(checker.groups.admitted[group] for group in action.groups)
        if oldest == checker.limits.max_staleness:
            self._mark("train: at the bound")
        if oldest > checker.adaptive_staleness.bound:
            self._mark("train: older than adaptive staleness now allows")


def _what_blocks_admission(state: State, version: int) -> str:
    """The limit without which a group would be admissible. Leaves the state as it is."""
    limits = state.limits
    for name, unlimited in (("slack", 0), ("batches_per_version", None)):
        state.limits = replace(limits, **{name: unlimited})  # type: ignore[arg-type]
        is_cause = num_admissible(state, version) > 0
        state.limits = limits
        if is_cause:
            return name
    adaptive_staleness, state.adaptive_staleness = state.adaptive_staleness, AdaptiveStaleness()
    is_cause = num_admissible(state, version) > 0
    state.adaptive_staleness = adaptive_staleness
    return "adaptive staleness" if is_cause else "the bound"
