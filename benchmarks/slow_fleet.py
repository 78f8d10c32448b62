"""The cost of an engine that is ten times slower than the others, with and without the rules for it.

The production orchestrator runs a simulated fleet of four engines in virtual time, with long-tailed lengths
and with delays of migrations and loads. `all alike` has no slow engine; `three` has three engines, none of
them slow. With `both` rules, engines are measured and late requests migrate from slow ones. `first` leaves
out the migrations; `neither` leaves out the measurement, too, so that new requests go to the engine with the
most free rows. The simulator checks every event and action.

    python benchmarks/slow_fleet.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from dora.core import stragglers
from dora.core.types import Limits
from dora.sim.random_config import WorldConfig
from dora.sim.swarm import run_world
from report import Row, parse_options, publish

RULES_LEFT_OUT = {
    "both": (),
    "first": ("migrate_stragglers",),
    "neither": ("update_lags", "migrate_stragglers"),
}
TOKEN_S, SLOWDOWN, ROWS = 0.01, 10.0, 8
FLEETS = {"all alike": (1.0,) * 4, "one slow": (1.0, 1.0, 1.0, SLOWDOWN), "three": (1.0,) * 3}


def world(fleet: str, max_staleness: int, num_steps: int) -> WorldConfig:
    """Batches of 8 groups of 4, and 8 rows per engine."""
    slowdowns = FLEETS[fleet]
    return WorldConfig(
        limits=Limits(num_steps, 8, 4, max_staleness, rebalance_interval_s=1.0),
        num_prompts=1000,
        engines=((ROWS, 2),) * len(slowdowns),
        seconds_per_token=tuple(TOKEN_S * slowdown for slowdown in slowdowns),
        max_length=512,
        tail=0.8,
        reward_s=0.01,
        step_s=0.2,
        load_s=0.05,
        report_interval_s=1.0,
        kv_copy_s=0.01,
        kv_stop_s=0.01,
        scoring_failure_rate=0.0,
        request_failure_rate=0.0,
        equal_reward_rate=0.0,
        engine_loss_interval_s=None,
        engine_restart_s=1.0,
    )


def measure(fleet: str, rules: str, max_staleness: int, num_steps: int, seeds: range) -> Row:
    """Mean virtual seconds of a step over the seeds, and the migrations away from slow engines."""
    step_s, num_migrations = [], 0
    with rules_left(rules):
        for seed in seeds:
            outcome = run_world(seed, world(fleet, max_staleness, num_steps))
            assert outcome.verdict == "ok", outcome.verdict
            step_s.append(outcome.record[-1][0] / num_steps)
            num_migrations += outcome.coverage["migrate: slow"]
    return {
        "fleet": fleet,
        "rules": rules,
        "S": max_staleness,
        "steps": num_steps,
        "seeds": len(seeds),
        "step_s": statistics.fmean(step_s),
        "slow_moves": num_migrations,
    }


@contextmanager
def rules_left(rules: str) -> Iterator[None]:
    """Run with these rules for slow engines: both, the first, or neither."""
    saved = {name: getattr(stragglers, name) for name in RULES_LEFT_OUT[rules]}
    for name in saved:
        setattr(stragglers, name, lambda state: [])
    try:
        yield
    finally:
        for name, rule in saved.items():
            setattr(stragglers, name, rule)


def main() -> None:
    options = parse_options(str(__doc__))
    num_steps, seeds = (20, range(2)) if options.quick else (40, range(4))
    rows = [
        measure(fleet, rules, max_staleness, num_steps, seeds)
        for max_staleness in (1, 4)
        for fleet in FLEETS
        for rules in (("both", "first", "neither") if fleet == "one slow" else ("both",))
    ]
    step_s = {(row["fleet"], row["rules"], row["S"]): float(row["step_s"]) for row in rows}
    ratios = {}
    for staleness in (1, 4):
        both = step_s["one slow", "both", staleness]
        ratios[f"without_over_with_S{staleness}"] = step_s["one slow", "neither", staleness] / both
        ratios[f"one_slow_over_all_alike_S{staleness}"] = both / step_s["all alike", "both", staleness]
        ratios[f"three_over_one_slow_S{staleness}"] = step_s["three", "both", staleness] / both
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
