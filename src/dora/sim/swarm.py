"""Runs many random worlds. Each must keep the guarantees after every event, and finish once it has healed."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from dora.core import codec, invariants
from dora.core.actions import Action
from dora.core.events import Event, ProgressReported, Resumed, TimerFired, Trained
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import BatchMember, ProtocolError
from dora.sim.checker import Checker
from dora.sim.coverage import CoverageMarks
from dora.sim.event_queue import Deadlock
from dora.sim.ground_truth import Violation
from dora.sim.random_config import WorldConfig, draw_world_config
from dora.sim.world import MAX_REDONE_STEPS, World

MAX_EVENTS = 20_000  # maximum events of a world; a run with more makes no progress
MAX_RUN_CRASHES = 4  # in a world
EXTENSION_RATE = 0.3  # of resumptions that give the run more steps, and of finished runs that resume
MAX_MORE_STEPS = 5
NUM_COMPARED = 10  # events after an orchestrator crash that the crashed one handles, too
CHECK_STATE_EVERY = 40  # events between two checks of the orchestrator's whole state


@dataclass(slots=True)
class WorldOutcome:
    """The end of one world. `verdict` is "ok", "deadlock: ..." or the broken guarantee."""

    seed: int
    verdict: str = "ok"
    num_events: int = 0
    num_actions: int = 0
    max_staleness: int = 0  # of a trained group
    coverage: Counter[str] = field(default_factory=Counter)
    record: list[tuple[float, Event, list[Action]]] = field(default_factory=list)


def run_swarm(num_seeds: int, as_json: bool) -> int:
    """Run `num_seeds` worlds, print a summary, and return the exit code: 1 if a world failed."""
    started_s = time.process_time()
    totals: Counter[str] = Counter()
    coverage: Counter[str] = Counter()
    num_events: list[int] = []
    failures: list[dict[str, object]] = []
    for seed in range(num_seeds):
        outcome = run_world(seed)
        num_events.append(outcome.num_events)
        totals["actions"] += outcome.num_actions
        coverage.update(outcome.coverage)
        if outcome.verdict == "ok":
            continue
        totals["deadlocks" if outcome.verdict.startswith("deadlock") else "violations"] += 1
        failures.append({"seed": seed, "verdict": outcome.verdict})
        print(f"seed {seed}: {outcome.verdict} after {outcome.num_events} events", flush=True)
    summary = {
        "seeds": num_seeds,
        "events": sum(num_events),
        "median_events_per_world": statistics.median(num_events),
        "violations": totals["violations"],
        "deadlocks": totals["deadlocks"],
        "actions": totals["actions"],
        "engine_losses": coverage["EngineLost"],
        "migrations": coverage["Migrated"],
        "migrations_failed": coverage["MigrationFailed"],
        "steps_failed": coverage["StepFailed"],
        "trainer_losses": coverage["TrainerLost"],
        "orchestrator_crashes": coverage["orchestrator crash"],
        "run_crashes": coverage["Resumed"],
        "engines_removed": coverage["EngineRemoved"],
        "cpu_s": round(time.process_time() - started_s, 2),
    }
    if as_json:
        print(json.dumps(summary | {"failures": failures, "coverage": dict(sorted(coverage.items()))}))
    else:
        print(", ".join(f"{key} {value}" for key, value in summary.items()))
    return 1 if failures else 0


def run_world(seed: int, config: WorldConfig | None = None) -> WorldOutcome:
    """Run one world to its end. Every event and action is checked, and the whole state periodically."""
    run = _SimulatedRun(seed, config or draw_world_config(seed))
    try:
        run.run()
    except (Violation, ProtocolError, AssertionError, LookupError) as error:
        run.outcome.verdict = f"{type(error).__name__}: {error}"
    except Deadlock as error:
        run.outcome.verdict = f"deadlock: {error}"
    run.outcome.max_staleness = max(run.checker.groups.staleness, default=0)
    run.outcome.coverage = run.marks.counts
    return run.outcome


class _SimulatedRun:
    """One world with its orchestrator, checker and coverage marks."""

    def __init__(self, seed: int, config: WorldConfig) -> None:
        self.config = config
        self.world, self.orchestrator = World(config, seed), Orchestrator(config.limits)
        self.checker = Checker(config.limits, config.num_prompts)
        self.marks = CoverageMarks(self.checker)
        self.outcome = WorldOutcome(seed)
        self._last_progress_s = 0.0
        self._crashed: Orchestrator | None = None  # it still handles events, and its actions are compared
        self._num_compared = 0
        self._run_crashes = _RunCrashes(seed, config.faults.run_crash_every)

    def run(self) -> None:
        """Run until the orchestrator is done. Raises what a check finds."""
        world, outcome = self.world, self.outcome
        actions = self.orchestrator.start(world.now)
        while True:
            self._execute(actions)
            if self.orchestrator.done:
                self.checker.finish()
                if not self._run_crashes.takes_end_for_crash():
                    return
            if outcome.num_events % CHECK_STATE_EVERY == 0:
                self._check_state()
            event = self._crash_run() or world.next_event(self.orchestrator.next_wakeup()) or TimerFired()
            self._check_progress(event)
            self.marks.observe(event)
            self.checker.observe(event)
            if isinstance(event, Trained):
                self._run_crashes.on_trained(event, self.orchestrator.snapshot())
            actions = self.orchestrator.handle(event, world.now)
            if self._crashed is not None:
                self._compare(self._crashed, event, actions)
            outcome.record.append((world.now, event, actions))
            outcome.num_events += 1
            self._inject_faults(outcome.num_events)

    def _execute(self, actions: list[Action]) -> None:
        self.outcome.num_actions += len(actions)
        for action in actions:
            self.marks.observe(action)
            self.checker.check(action)
            self.world.execute(action)

    def _check_state(self) -> None:
        """Recompute the orchestrator's whole state, and compare it with the ground truth."""
        state = self.orchestrator.snapshot()
        if broken := invariants.check(state):
            raise Violation("; ".join(broken))
        num_kept = self.checker.audit.versions.num_kept_tokens
        if not 0 <= state.num_kept_tokens == num_kept:
            raise Violation(f"the core counts {state.num_kept_tokens} kept tokens, the audit {num_kept}")
        self.marks.on_state(state)
        self.checker.fleet.check_idle(self.checker.pins)
        if not self.world.urgent_events:  # the ground truth is ahead of these
            self.checker.fleet.compare(self.world.truth)

    def _check_progress(self, event: Event) -> None:
        """In a healed world, some event other than a timer or progress report happens in time."""
        if type(event) not in (TimerFired, ProgressReported) or not self.world.faults.is_healed:
            self._last_progress_s = self.world.now
        elif self.world.now - self._last_progress_s > self.config.deadlock_timeout_s:
            raise Deadlock("no event but timers and progress reports happens any more")
        if self.outcome.num_events > MAX_EVENTS:
            raise Deadlock(f"the run is not done after {MAX_EVENTS} events")

    def _inject_faults(self, num_events: int) -> None:
        faults = self.config.faults
        if num_events == faults.heal_after_events:
            self.world.heal()
        if faults.orchestrator_crash_every and num_events % faults.orchestrator_crash_every == 0:
            self._crash_orchestrator()

    def _crash_run(self) -> Event | None:
        """Crash every process if a crash is due, and return the event that resumes the run; a run that is
        done gets more steps.
        """
        is_due = not self.world.faults.is_healed and self._run_crashes.is_due(self.outcome.num_events)
        if not (is_due or self.orchestrator.done):
            return None
        state, self._crashed = self.orchestrator.snapshot(), None
        resumed = self._run_crashes.resume(state)
        self.world.restart(state.next_index, resumed.from_step)
        return resumed

    def _crash_orchestrator(self) -> None:
        """Replace the orchestrator by another that reads its state from JSON."""
        written = json.dumps(codec.state_to_json(self.orchestrator.snapshot()))
        self._crashed, self._num_compared = self.orchestrator, 0
        self.orchestrator = Orchestrator(self.config.limits, codec.state_from_json(json.loads(written)))
        self.marks.counts["orchestrator crash"] += 1

    def _compare(self, crashed: Orchestrator, event: Event, actions: list[Action]) -> None:
        """For some events after a crash: the crashed orchestrator gives the same actions as its
        replacement.
        """
        expected = crashed.handle(event, self.world.now)
        if expected != actions:
            raise Violation(f"a resumed orchestrator gives the actions {actions}, not {expected}")
        self._num_compared += 1
        if self._num_compared == NUM_COMPARED:
            self._crashed = None


class _RunCrashes:
    """Schedules crashes of all processes of a run, and chooses the checkpoint from which the run resumes.

    Some runs get more steps when they resume, and some resume after their last step for that.
    """

    def __init__(self, seed: int, every: int | None) -> None:
        """`every`: events between two crashes; None: no crashes."""
        self._rng = Random(f"deaths {seed}")
        self._steps_rng = Random(f"more steps {seed}")
        self._continues_after_end = self._steps_rng.random() < EXTENSION_RATE
        self._every = every
        self._num_crashes = self._from_step = 0
        self._batches: dict[int, tuple[BatchMember, ...]] = {}  # of trained steps, as a journal has them

    def on_trained(self, event: Trained, state: State) -> None:
        """Keep the batch of a step, before the orchestrator handles the event and forgets it."""
        if event.step in state.batches:
            self._batches[event.step] = state.batch_members(event.step)

    def is_due(self, num_events: int) -> bool:
        is_due = self._every is not None and num_events > 0 and num_events % self._every == 0
        return is_due and self._num_crashes < MAX_RUN_CRASHES

    def takes_end_for_crash(self) -> bool:
        """Whether a run that is done resumes with more steps; at most once."""
        is_due, self._continues_after_end = self._continues_after_end, False
        return is_due

    def resume(self, state: State) -> Resumed:
        """Resume from a checkpoint that is no older than that of the previous crash."""
        self._num_crashes += 1
        num_trained = state.num_trained // state.limits.batch_size
        first = max(self._from_step, num_trained - MAX_REDONE_STEPS)
        self._from_step = self._rng.randint(first, num_trained)
        stored = sorted(state.stored_versions.items())
        kept = tuple((version, digest) for version, digest in stored if version < self._from_step)
        redone = tuple(self._batches[step] for step in range(self._from_step, num_trained))
        num_steps = None
        if state.is_stopped or self._steps_rng.random() < EXTENSION_RATE:
            num_steps = state.limits.num_steps + self._steps_rng.randint(1, MAX_MORE_STEPS)
        return Resumed(self._from_step, kept, redone, num_steps)
