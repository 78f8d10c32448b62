"""The complete demo: what it learns with three seeds, and its wall time under `dora` and `sync`.

Each run is a separate `dora train`. Seeds and policies take turns, so that other load on the machine affects
all of them. --quick runs one seed for 40 steps, enough to measure speed but too few to learn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finished_run import median_of, metrics_of, summary_of, train

from report import Row, parse_options, publish

CONFIG = Path(__file__).parent.parent / "examples" / "gcd.toml"
SEEDS = (0, 1, 2)
POLICIES = ("dora", "sync")
COLUMNS = {
    "sampled_before": "eval_before",
    "sampled_after": "eval_after",
    "greedy_before": "eval_greedy_before",
    "greedy_after": "eval_greedy_after",
    "length_p99": "eval_length_p99_after",
    "cpu_s": "cpu_s",
    "wall_s": "wall_s",
    "tokens_per_s": "tokens_per_s",
    "live_versions": "live_versions_mean",
    "staleness": "staleness_mean",
    "busy": "rollout_utilization",
    "trainer_idle": "trainer_idle_ratio",
    "stall_s": "stall_s",
    "exposed_rollout_s": "exposed_rollout_s",
}


def run_demo(seed: int, changes: Iterable[str], *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run of the demo with overrides: its summary, and the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(CONFIG, out, changes, "--seed", str(seed), *options)
        return summary_of(out), metrics_of(out)


def run(policy: str, seed: int, quick: bool) -> Row:
    """One run of the demo: its summary as the columns above."""
    fewer = ("--steps", "40", "--set", "eval.num_prompts=64") if quick else ()
    summary, _ = run_demo(seed, [f"orchestrator.update_policy={policy}"], *fewer)
    return {"policy": policy, "seed": seed, **{name: summary[key] for name, key in COLUMNS.items()}}


def main() -> None:
    options = parse_options(__doc__ or "")
    seeds = SEEDS[:1] if options.quick else SEEDS
    rows = [run(policy, seed, options.quick) for seed in seeds for policy in POLICIES]

    def median(policy: str, column: str) -> float:
        return median_of(rows, column, policy=policy)

    ratios = {
        "sync_over_dora_wall_s": median("sync", "wall_s") / median("dora", "wall_s"),
        "dora_over_sync_tokens_per_s": median("dora", "tokens_per_s") / median("sync", "tokens_per_s"),
        "dora_over_sync_cpu_s": median("dora", "cpu_s") / median("sync", "cpu_s"),
        "sync_over_dora_exposed_rollout_s": median("sync", "exposed_rollout_s")
        / median("dora", "exposed_rollout_s"),
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
