"""Learning curves of the demo by staleness bound, with and without correction.

Each setting has three seeds, and a quarter of the demo's steps. `none` is the demo's clipped loss around the
sampling policy; `tis` does not clip: it weights each token by the probability ratio of the
trainer's policy before the step to the sampling policy, truncated at 2. `at_25` to `at_100` are mean rewards
of the answers trained in the tenth of the run that ends at that percentage. With max_staleness = 0 no sample
is stale, so there is nothing to correct. --quick runs one seed of two settings for 30 steps, too few to
learn.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean

from demo import SEEDS, run_demo
from finished_run import median_of

from report import Row, parse_options, publish

CORRECTIONS = {"none": (), "tis": ("correction.proximal=recomputed", "correction.token=tis")}
SETTINGS = [(s, c) for s, c in product((0, 1, 2, 4), CORRECTIONS) if s or c == "none"]
QUICK = [(2, "none"), (2, "tis")]
QUARTERS = (25, 50, 75, 100)
NUM_STEPS, NUM_PROMPTS = 100, 256


def run(max_staleness: int, correction: str, seed: int, quick: bool) -> Row:
    """One run of the demo: its learning curve and final results."""
    num_steps, num_prompts = (30, 32) if quick else (NUM_STEPS, NUM_PROMPTS)
    changes = (
        f"orchestrator.max_staleness={max_staleness}",
        f"eval.num_prompts={num_prompts}",
        *CORRECTIONS[correction],
    )
    summary, lines = run_demo(seed, changes, "--steps", str(num_steps))
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    ends = {percent: len(rewards) * percent // 100 for percent in QUARTERS}
    width = max(1, len(rewards) // 10)
    return {
        "max_staleness": max_staleness,
        "correction": correction,
        "seed": seed,
        "staleness_mean": summary["staleness_mean"],
        **{f"at_{percent}": fmean(rewards[end - width : end]) for percent, end in ends.items()},
        "sampled_before": summary["eval_before"],
        "sampled_after": summary["eval_after"],
        "greedy_after": summary["eval_greedy_after"],
        "length_p99": summary["eval_length_p99_after"],
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    seeds, settings = (SEEDS[:1], QUICK) if options.quick else (SEEDS, SETTINGS)
    rows = [run(*setting, seed, options.quick) for seed in seeds for setting in settings]

    def median(max_staleness: int, correction: str) -> float:
        return median_of(rows, "sampled_after", max_staleness=max_staleness, correction=correction)

    base = median(*settings[0])
    ratios = {f"accuracy_s{s}_{c}_over_s{settings[0][0]}": median(s, c) / base for s, c in settings[1:]}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
