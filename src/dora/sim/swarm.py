"""Many seeds, each a whole world.

Every one must keep the guarantees after every event while things go wrong, and come to its end
once the world has healed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from dora.core import invariants, snapshot
from dora.core.actions import Action
from dora.core.events import Event, Progressed, Trained, Woken
from dora.core.orchestrator import Orchestrator
from dora.core.records import ProtocolError
from dora.sim.checker import Ledger, Violation
from dora.sim.deaths import Deaths
from dora.sim.marks import Marks
from dora.sim.models import WorldConfig, draw_config
from dora.sim.world import Deadlock, World

MAX_EVENTS = 20_000  # per world; more means it runs in circles
COMPARED = 10  # facts after a crash for which the orchestrator that died hears on
RECOUNT_EVERY = 40  # events between two recounts of the core's whole state


@dataclass(slots=True)
class Outcome:
    """How one world ended: "ok", "deadlock: ...", or the broken guarantee."""

    seed: int
    verdict: str = "ok"
    num_events: int = 0
    num_orders: int = 0
    max_staleness: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # marks and kinds of facts
    record: list[tuple[float, Event, list[Action]]] = field(default_factory=list)


def run_world(seed: int, config: WorldConfig | None = None) -> Outcome:
    """Run one world to its end: every fact and order is checked, and now and then the whole state."""
    config = config or draw_config(seed)
    run = Run(seed, config)
    try:
        run.live()
    except (Violation, ProtocolError, AssertionError, LookupError) as error:
        run.outcome.verdict = f"{type(error).__name__}: {error}"
    except Deadlock as error:
        run.outcome.verdict = f"deadlock: {error}"
    run.outcome.max_staleness = run.ledger.max_seen_staleness
    run.outcome.seen = run.marks.seen
    return run.outcome


class Run:
    """One world with its orchestrator, its checkers and its marks."""

    def __init__(self, seed: int, config: WorldConfig) -> None:
        self.config = config
        self.world, self.core = World(config, seed), Orchestrator(config.limits)
        self.ledger = Ledger(config.limits)
        self.marks = Marks(self.ledger)
        self.outcome = Outcome(seed)
        self._last_progress_s = 0.0
        self._dead: Orchestrator | None = None  # crashed lately; hears on, to be compared
        self._num_compared = 0
        self._deaths = Deaths(seed, config.faults.die_every)

    def live(self) -> None:
        """Until the core is done. Raises what a checker finds."""
        world, config = self.world, self.config
        orders = self.core.start(world.now)
        while True:
            self._obey(orders)
            if self.core.done:
                return self.ledger.close()
            if self.outcome.num_events % RECOUNT_EVERY == 0:
                self._recount()
            event = self._death() or world.next_fact(self.core.next_wakeup()) or Woken()
            self._check_progress(event)
            self.marks.hear(event)
            self.ledger.hear(event)
            if isinstance(event, Trained):
                self._deaths.note(event, self.core.snapshot())
            orders = self.core.handle(event, world.now)
            if self._dead is not None:
                self._compare(self._dead, event, orders)
            self.outcome.record.append((world.now, event, orders))
            self.outcome.num_events += 1
            if self.outcome.num_events == config.faults.heal_after:
                world.heal()
            if config.faults.crash_every and self.outcome.num_events % config.faults.crash_every == 0:
                self._crash()

    def _obey(self, orders: list[Action]) -> None:
        self.outcome.num_orders += len(orders)
        for order in orders:
            self.marks.obey(order)
            self.ledger.obey(order)
            self.world.perform(order)

    def _recount(self) -> None:
        state = self.core.snapshot()
        if broken := invariants.check(state):
            raise Violation("; ".join(broken))
        self.marks.look(state)
        self.ledger.check_idleness()
        if not self.world.due:  # what is true, but not told yet, cannot agree
            self.ledger.seats.compare(self.world.truth)

    def _check_progress(self, event: Event) -> None:
        """A healed world goes on: something other than waking up and reporting happens in time."""
        if type(event) not in (Woken, Progressed) or not self.world.luck.is_healed:
            self._last_progress_s = self.world.now
        elif self.world.now - self._last_progress_s > self.config.patience_s:
            raise Deadlock("nothing but waking up and reporting happens any more")
        if self.outcome.num_events > MAX_EVENTS:
            raise Deadlock("it runs in circles")

    def _death(self) -> Event | None:
        """Everything dies, and goes on with this fact."""
        if self.world.luck.is_healed or not self._deaths.is_due(self.outcome.num_events):
            return None
        state, self._dead = self.core.snapshot(), None
        resumed = self._deaths.resume(state)
        self.world.die(state.next_index, resumed.from_step)
        return resumed

    def _crash(self) -> None:
        """The orchestrator dies and another goes on from what was written of its state."""
        written = json.dumps(snapshot.to_json(self.core.snapshot()))
        self._dead, self._num_compared = self.core, 0
        self.core = Orchestrator(self.config.limits, snapshot.from_json(json.loads(written)))
        self.marks.seen["crash"] += 1

    def _compare(self, dead: Orchestrator, event: Event, orders: list[Action]) -> None:
        """For some facts after a crash: the same orders as if there had been none."""
        missed = dead.handle(event, self.world.now)
        if missed != orders:
            raise Violation(f"a resumed orchestrator orders {orders}, not {missed}")
        self._num_compared += 1
        if self._num_compared == COMPARED:
            self._dead = None


def replays_alike(outcome: Outcome, core: Orchestrator) -> bool:
    """Whether a fresh core, which never crashes, gives the same orders for the recorded facts."""
    core.start(0.0)
    return all(core.handle(event, now) == orders for now, event, orders in outcome.record)


def main(num_seeds: int, as_json: bool, first_seed: int = 0) -> int:
    """Run seeds first..first + num - 1; exit code 1 if any of them failed."""
    began_s = time.process_time()
    tally: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    num_events: list[int] = []
    failures: list[dict[str, object]] = []
    for seed in range(first_seed, first_seed + num_seeds):
        outcome = run_world(seed)
        num_events.append(outcome.num_events)
        tally["orders"] += outcome.num_orders
        seen.update(outcome.seen)
        if outcome.verdict == "ok":
            continue
        tally["deadlocks" if outcome.verdict.startswith("deadlock") else "violations"] += 1
        failures.append({"seed": seed, "verdict": outcome.verdict})
        print(f"seed {seed}: {outcome.verdict} after {outcome.num_events} events", flush=True)
    summary = {
        "seeds": num_seeds,
        "events": sum(num_events),
        "median_events_per_world": statistics.median(num_events),
        "violations": tally["violations"],
        "deadlocks": tally["deadlocks"],
        "orders": tally["orders"],
        "engine_losses": seen["EngineLost"],
        "migrations": seen["Migrated"],
        "migrations_failed": seen["MigrationFailed"],
        "steps_repeated": seen["StepFailed"],
        "trainer_losses": seen["TrainerLost"],
        "crashes": seen["crash"],
        "deaths": seen["Resumed"],
        "drains": seen["EngineLeft"],
        "cpu_s": round(time.process_time() - began_s, 2),
    }
    if as_json:
        print(json.dumps(summary | {"failures": failures, "marks": dict(sorted(seen.items()))}))
    else:
        print(", ".join(f"{key} {value}" for key, value in summary.items()))
    return 1 if failures else 0
