"""The gain of an elastic trainer, which decodes while it waits for its batch: one engine, two cores.

The demo's task with one engine and the trainer, in three modes: the trainer is idle while it waits for its
batch (`apart`), it decodes meanwhile (`elastic`), or engine and trainer take turns on one device
(`colocated`). At full speed the trainer is slower than the engine. With engines paced to 8 ms per step it
waits most of the time.

    python benchmarks/elastic.py [--quick] [--json FILE]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from finished_run import audited_summary, median_of
from rich.console import Console

from dora.config import load
from dora.runtime import run
from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
WAYS = {
    "apart": {},
    "elastic": {"trainer.elastic": "true"},
    "colocated": {"orchestrator.placement": "colocated"},
}
WORKLOADS = {
    "demo": {},
    "paced": {"engine.min_step_time": "8ms", "orchestrator.prioritize_stragglers": "false"},
}
COLUMNS = {
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "trainer_idle": "trainer_idle_ratio",
    "busy": "rollout_utilization",
    "stall_s": "stall_s",
    "staleness": "staleness_mean",
    "migrations": "migrations",
    "reprefill_tokens": "reprefill_tokens",
}


def measure(workload: str, way: str, num_steps: int, seed: int) -> Row:
    """One run: its summary as the columns above."""
    changes = {"run.steps": num_steps, "engine.num_engines": 1, "eval.num_prompts": 0, "run.seed": seed}
    changes |= WORKLOADS[workload] | WAYS[way]
    config = load.read_config(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run.train(config, out, Console(quiet=True))
        summary = audited_summary(out)
    named = {"workload": workload, "way": way, "seed": seed, "steps": num_steps}
    return named | {column: summary[key] for column, key in COLUMNS.items()}


def main() -> None:
    options = parse_options(str(__doc__))
    num_steps = {"demo": 10, "paced": 4} if options.quick else {"demo": 60, "paced": 16}
    seeds = (0,) if options.quick else (0, 1)
    rows = [measure(work, way, num_steps[work], seed) for seed in seeds for work in WORKLOADS for way in WAYS]

    def median(workload: str, way: str, column: str) -> float:
        return median_of(rows, column, workload=workload, way=way)

    ratios = {
        f"apart_over_{way}_wall_s_{workload}": median(workload, "apart", "wall_s")
        / median(workload, way, "wall_s")
        for workload in WORKLOADS
        for way in ("elastic", "colocated")
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
