"""Many seeds, each a whole world.

Every one must keep the guarantees after every event and come to its end.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass

from dora.core import invariants
from dora.core.actions import Action
from dora.core.events import EngineLost, Event, Woken
from dora.core.orchestrator import Orchestrator
from dora.core.records import ProtocolError
from dora.sim.checker import Ledger, Violation
from dora.sim.models import WorldConfig, draw_config
from dora.sim.world import Deadlock, World

MAX_EVENTS = 50_000  # per world; more means it runs in circles


@dataclass(slots=True)
class Outcome:
    """How one world ended: "ok", "deadlock", or the broken guarantee."""

    seed: int
    verdict: str
    num_events: int
    max_staleness: int
    record: list[tuple[float, Event, list[Action]]]


def run_world(seed: int, config: WorldConfig | None = None) -> Outcome:
    """Run one world to its end, checking after every event."""
    config = config or draw_config(seed)
    world, core, ledger = World(config, seed), Orchestrator(config.limits), Ledger(config.limits)
    outcome = Outcome(seed, "ok", 0, 0, [])
    try:
        _live(world, core, ledger, outcome)
    except (Violation, ProtocolError, AssertionError) as error:
        outcome.verdict = f"{type(error).__name__}: {error}"
    except Deadlock:
        outcome.verdict = "deadlock"
    outcome.max_staleness = ledger.max_seen_staleness
    return outcome


def _live(world: World, core: Orchestrator, ledger: Ledger, outcome: Outcome) -> None:
    orders = core.start(world.now)
    while True:
        for order in orders:
            ledger.obey(order)
            world.perform(order)
        if core.done:
            return ledger.close()
        event = world.next_fact(core.next_wakeup()) or Woken()
        ledger.hear(event)
        orders = core.handle(event, world.now)
        outcome.record.append((world.now, event, orders))
        outcome.num_events += 1
        if broken := invariants.check(core.snapshot()):
            raise Violation("; ".join(broken))
        if outcome.num_events > MAX_EVENTS:
            raise Deadlock("it runs in circles")


def replays_alike(outcome: Outcome, config: WorldConfig) -> bool:
    """Whether a fresh core gives the same orders for the recorded facts."""
    core = Orchestrator(config.limits)
    core.start(0.0)
    return all(core.handle(event, now) == orders for now, event, orders in outcome.record)


def main(num_seeds: int, as_json: bool, first_seed: int = 0) -> int:
    """Run seeds first..first + num - 1; exit code 1 if any of them failed."""
    began_s = time.process_time()
    tally: Counter[str] = Counter()
    failures: list[dict[str, object]] = []
    for seed in range(first_seed, first_seed + num_seeds):
        outcome = run_world(seed)
        tally["events"] += outcome.num_events
        tally["engine_losses"] += sum(isinstance(event, EngineLost) for _, event, _ in outcome.record)
        tally["orders"] += sum(len(orders) for _, _, orders in outcome.record)
        if outcome.verdict == "ok":
            continue
        tally["deadlocks" if outcome.verdict == "deadlock" else "violations"] += 1
        failures.append({"seed": seed, "verdict": outcome.verdict})
        print(f"seed {seed}: {outcome.verdict} after {outcome.num_events} events")
    summary = {
        "seeds": num_seeds,
        "events": tally["events"],
        "violations": tally["violations"],
        "deadlocks": tally["deadlocks"],
        "orders": tally["orders"],
        "engine_losses": tally["engine_losses"],
        "cpu_s": round(time.process_time() - began_s, 2),
        "failures": failures,
    }
    if as_json:
        print(json.dumps(summary))
    else:
        print(", ".join(f"{key} {value}" for key, value in summary.items() if key != "failures"))
    return 1 if failures else 0
