"""The demo with samples up to four versions old: unchanged, with an adaptive bound, weighted by staleness.

Each run is a separate `dora train`; the three settings take turns for each seed. `kl_1e3` is the mean of the
batches (off_policy/kl_k3, 0.001 nats per token), and `ess_min` the smallest effective sample size of a batch
(fraction of its tokens). `allowed_*` is the mean staleness bound in each quarter of the run; it is 4 if the
bound is fixed. max_kl is lower than the default, because the demo's batches have little KL. --quick runs one
seed for 16 steps, too few to learn.
"""

from __future__ import annotations

from statistics import fmean

from demo import SEEDS, run_demo
from finished_run import median_of

from report import Row, parse_options, publish

MAX_STALENESS, MAX_KL, AGE_DECAY = 4, 2e-4, 0.8
MODES = {
    "fixed": (),
    "adaptive": ("orchestrator.staleness_mode=adaptive", f"orchestrator.max_kl={MAX_KL}"),
    "age_decay": (f"correction.staleness_decay={AGE_DECAY}",),
}
QUICK = ("--steps", "16", "--set", "eval.num_prompts=16")
COLUMNS = {
    "sampled_before": "eval_before",
    "sampled_after": "eval_after",
    "greedy_after": "eval_greedy_after",
    "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max",
    "wall_s": "wall_s",
    "stall_s": "stall_s",
    "trainer_idle": "trainer_idle_ratio",
}


def run(mode: str, seed: int, quick: bool) -> Row:
    """One run of the demo: final accuracy, staleness of its samples, and the bounds."""
    changes = (f"orchestrator.max_staleness={MAX_STALENESS}", *MODES[mode])
    summary, lines = run_demo(seed, changes, *(QUICK if quick else ()))
    steps = [line for line in lines if "step" in line and "staleness/bound" in line]
    measured = [step for step in steps if "off_policy/ess" in step]
    allowed = [step["staleness/bound"] for step in steps]
    size = len(allowed) / 4
    quarters = [allowed[round(k * size) : round((k + 1) * size)] for k in range(4)]
    return {
        "mode": mode,
        "seed": seed,
        **{name: summary[key] for name, key in COLUMNS.items()},
        "kl_1e3": 1e3 * fmean(step["off_policy/kl_k3"] for step in measured),
        "ess_min": min(step["off_policy/ess"] for step in measured),
        **{f"allowed_{k}": fmean(quarter) for k, quarter in enumerate(quarters, start=1)},
        "allowed_min": min(allowed),
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    seeds = SEEDS[:1] if options.quick else SEEDS
    rows = [run(mode, seed, options.quick) for seed in seeds for mode in MODES]

    def median(mode: str, column: str) -> float:
        return median_of(rows, column, mode=mode)

    compared = {
        "accuracy": "sampled_after",
        "staleness": "staleness_mean",
        "kl": "kl_1e3",
        "wall_s": "wall_s",
    }
    ratios = {
        f"{mode}_over_fixed_{name}": median(mode, column) / median("fixed", column)
        for mode in MODES
        for name, column in compared.items()
        if mode != "fixed"
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
