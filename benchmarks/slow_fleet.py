"""What an engine costs that is ten times slower than the others, with the rules for slow engines and without.

A simulated fleet of four engines in virtual time, led by the orchestrator of every run; lengths are
long-tailed, moves and loads take time. `all alike` has no slow engine, `three` has three engines, none of
them slow. Without `escape` what is late stays where it is (`first`); with `neither` rule new requests go to
whoever has most free rows, too. Every fact and order is checked by the simulator.

    python benchmarks/slow_fleet.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from report import Row, parse_options, publish

from dora.core import slowness
from dora.core.records import Limits
from dora.sim.models import WorldConfig
from dora.sim.swarm import run_world

TOKEN_S, SLOWNESS, ROWS = 0.01, 10.0, 8
FLEETS = {"all alike": (1.0,) * 4, "one slow": (1.0, 1.0, 1.0, SLOWNESS), "three": (1.0,) * 3}


def world(fleet: str, max_staleness: int, num_steps: int) -> WorldConfig:
    """Batches of 8 groups of 4; 32 rows in all, where there are four engines."""
    paces = FLEETS[fleet]
    return WorldConfig(
        limits=Limits(num_steps, 8, 4, max_staleness, rebalance_interval_s=1.0),
        num_prompts=1000,
        engines=((ROWS, 2),) * len(paces),
        speeds=tuple(TOKEN_S * pace for pace in paces),
        max_length=512,
        tail=0.8,
        reward_s=0.01,
        step_s=0.2,
        load_s=0.05,
        report_s=1.0,
        move_s=0.01,
        stop_s=0.01,
        share_failed=0.0,
        share_refused=0.0,
        share_flat=0.0,
        loss_interval_s=None,
        return_s=1.0,
    )


def measure(fleet: str, rules: str, max_staleness: int, num_steps: int, seeds: range) -> Row:
    """Virtual seconds of a step, over the seeds, and moves for slowness."""
    took_s, num_moves = [], 0
    with without(rules):
        for seed in seeds:
            outcome = run_world(seed, world(fleet, max_staleness, num_steps))
            assert outcome.verdict == "ok", outcome.verdict
            took_s.append(outcome.record[-1][0] / num_steps)
            num_moves += outcome.seen["migrate: slow"]
    return {
        "fleet": fleet,
        "rules": rules,
        "S": max_staleness,
        "steps": num_steps,
        "seeds": len(seeds),
        "step_s": statistics.fmean(took_s),
        "slow_moves": num_moves,
    }


@contextmanager
def without(rules: str) -> Iterator[None]:
    """Leave rules out."""
    measured, escape = slowness.measure, slowness.escape
    module: Any = slowness
    try:
        if rules == "neither":
            module.measure = _nothing
        if rules in ("neither", "first"):
            module.escape = _no_moves
        yield
    finally:
        module.measure, module.escape = measured, escape


_nothing: Callable[..., None] = lambda state: None  # noqa: E731
_no_moves: Callable[..., list[object]] = lambda state: []  # noqa: E731


def main() -> None:
    options = parse_options(str(__doc__))
    num_steps, seeds = (20, range(2)) if options.quick else (40, range(4))
    rows = [
        measure(fleet, rules, max_staleness, num_steps, seeds)
        for max_staleness in (1, 4)
        for fleet in FLEETS
        for rules in (("both", "first", "neither") if fleet == "one slow" else ("both",))
    ]
    found = {(row["fleet"], row["rules"], row["S"]): float(row["step_s"]) for row in rows}
    ratios = {}
    for staleness in (1, 4):
        both = found["one slow", "both", staleness]
        ratios[f"without_over_with_S{staleness}"] = found["one slow", "neither", staleness] / both
        ratios[f"one_slow_over_all_alike_S{staleness}"] = both / found["all alike", "both", staleness]
        ratios[f"three_over_one_slow_S{staleness}"] = found["three", "both", staleness] / both
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
