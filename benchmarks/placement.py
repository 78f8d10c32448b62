"""Utilisation of engines with long-tailed answers: orchestrated against static placement.

Four engines with one version slot are paced to 8 ms per decode step, like an accelerator whose step time does
not depend on the number of rows. Tokens, trainer and migrations are real. Lengths are forced: log-normal,
max/mean about 10, p99 over 10 times the median, and each request has the same length in every run. With
`static` placement, requests do not migrate and engines do not change their versions early.

    python benchmarks/placement.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from random import Random

from finished_run import audited_summary, median_of, metrics_of
from rich.console import Console

from dora.config import load
from dora.core.types import RequestId
from dora.engine.request import SamplingParams
from dora.runtime import run
from dora.runtime.run_setup import RunSetup
from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
PACE_MS, NUM_ENGINES, MAX_ROWS = 8, 4, 8
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 20, 1.15, 400
COLUMNS = {
    "busy": "rollout_utilization",
    "stall_s": "stall_s",
    "wall_s": "wall_s",
    "tokens_per_s": "tokens_per_s",
    "staleness": "staleness_mean",
    "live_versions": "live_versions_mean",
    "migrations": "migrations",
    "reprefill_tokens": "reprefill_tokens",
}


def length_of(request: RequestId) -> int:
    """Tokens of an answer, drawn from the request alone."""
    drawn = MEDIAN_TOKENS * Random(f"length {request}").lognormvariate(0.0, SPREAD)
    return min(MAX_TOKENS, max(1, round(drawn)))


def reward(prompt: str, completion: str, **row: object) -> float:
    """A reward that differs among siblings, so that the trainer trains on every token."""
    return float(len(completion) % 2)


class ForcedLengths(RunSetup):
    """Answers end exactly at their forced length."""

    def sampling_of(self, request: RequestId) -> SamplingParams:
        return SamplingParams(self.config.sampling.temperature, length_of(request), ())


def measure(placement: str, max_staleness: int, batch_size: int, num_steps: int) -> Row:
    """One run: its summary as the columns above."""
    changes = {
        "run.steps": num_steps,
        "reward.function": f"{Path(__file__).resolve()}:reward",
        "engine.num_engines": NUM_ENGINES,
        "engine.max_num_seqs": MAX_ROWS,
        "engine.version_slots": 1,
        "engine.min_step_time": f"{PACE_MS}ms",
        "trainer.batch_size": batch_size,
        "trainer.lr": 1e-6,
        "trainer.micro_batch_tokens": 4096,
        "orchestrator.max_staleness": max_staleness,
        "orchestrator.placement": placement,
        "orchestrator.prioritize_stragglers": "false",  # a paced step is no faster with fewer rows
        "eval.num_prompts": 0,
    }
    if placement == "dynamic":
        changes["orchestrator.rebalance_interval_s"] = 0.1
    config = load.read_config(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run.train(config, out, Console(quiet=True), ForcedLengths)
        summary = audited_summary(out)
        busy = busy_while_admitting(out, max_staleness)
    named = {"placement": placement, "S": max_staleness, "batch": batch_size, "steps": num_steps}
    figures = {name: summary[key] for name, key in COLUMNS.items()}
    return {**named, "busy_while_admitting": busy, **figures}


def busy_while_admitting(out: Path, max_staleness: int) -> float:
    """Mean utilisation of rows from the end of the first step until the last prompts are admitted.

    The last answers of a run and its first load leave rows empty with any placement.
    """
    steps = metrics_of(out)
    ends_s = [step["t_s"] for step in steps]
    busy = [step["rollout/utilization"] for step in steps]
    spans = range(1, len(steps) - max_staleness)
    took_s = [ends_s[i] - ends_s[i - 1] for i in spans]
    return sum(took * busy[i] for took, i in zip(took_s, spans, strict=True)) / sum(took_s)


def main() -> None:
    options = parse_options(str(__doc__))
    lengths = sorted(length_of(RequestId(0, row, 0)) for row in range(10_000))
    shape: Row = {
        "max_over_mean": max(lengths) / statistics.fmean(lengths),
        "p99_over_median": lengths[9900] / statistics.median(lengths),
        "pace_ms": PACE_MS,
        "rows": NUM_ENGINES * MAX_ROWS,
    }
    # The ratios are those of the first setting.
    settings_of = [(4, 64, 12)] if options.quick else [(4, 64, 16), (4, 32, 24), (2, 64, 12), (4, 64, 16)]
    rows = [
        measure(placement, staleness, batch_size, num_steps)
        for staleness, batch_size, num_steps in settings_of
        for placement in ("dynamic", "static")
    ]

    def median(placement: str, column: str) -> float:
        return median_of(rows, column, placement=placement, S=staleness, batch=batch_size)

    staleness, batch_size, num_steps = settings_of[0]
    ratios = {
        "occupancy_orchestrated": median("dynamic", "busy"),
        "occupancy_static": median("static", "busy"),
        "occupancy_while_admitting_orchestrated": median("dynamic", "busy_while_admitting"),
        "occupancy_while_admitting_static": median("static", "busy_while_admitting"),
        "static_over_orchestrated_wall_s": median("static", "wall_s") / median("dynamic", "wall_s"),
        "stall_s_orchestrated": median("dynamic", "stall_s"),
        "stall_s_static": median("static", "stall_s"),
        "S": staleness,
        "batch": batch_size,
        "steps": num_steps,
    }
    publish(options, [shape, *rows], ratios)


if __name__ == "__main__":
    main()
