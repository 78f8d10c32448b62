"""On-policy distillation beside GRPO: after how many samples the demo's policy is as accurate as asked.

The teacher is the demo's own policy after a whole GRPO run. Then policies start from the demo's model, with
the same prompts, batches and learning rate: `grpo` learns from rewards, `distillation` from the teacher's
log-probs alone, `both` from their sum. `samples_to_SHARE` is the number of trained samples until the sampled
accuracy on held-out prompts has gone SHARE of the way from the initial policy's to the teacher's, at one of
the evaluations, every 10 steps; none: not reached. `accuracy` is that after the last step. Methods and seeds
take turns. --quick runs one seed and few steps, too few to learn.

    python benchmarks/distillation.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import finished_run
from demo import CONFIG, SEEDS

from report import Row, parse_options, publish

SHARES = (0.5, 0.8, 0.9, 0.95)
NUM_STEPS, EVERY, NUM_PROMPTS, BATCH = 240, 10, 256, 64  # BATCH: samples of a step


def train(out: Path, seed: int, num_steps: int, changes: tuple[str, ...]) -> list[tuple[int, float]]:
    """A run of the demo: trained samples and sampled accuracy at each evaluation."""
    sets = (f"run.seed={seed}", f"run.steps={num_steps}", f"eval.num_prompts={NUM_PROMPTS}", *changes)
    finished_run.train(CONFIG, out, sets)
    during = [
        (line["val/version"] * BATCH, line["val/reward_mean"])
        for line in finished_run.metrics_of(out)
        if "val/version" in line
    ]
    summary = finished_run.summary_of(out)
    ends = {0: summary["eval_before"], num_steps * BATCH: summary["eval_after"]}
    return sorted((dict(during) | ends).items())


def main() -> None:
    options = parse_options(__doc__ or "")
    seeds, num_steps = (SEEDS[:1], 6) if options.quick else (SEEDS, NUM_STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder, teacher_steps = Path(name), 6 if options.quick else 400
        curve = train(folder / "teacher", 9, teacher_steps, ())
        before, after = curve[0][1], curve[-1][1]
        teacher = f"distillation.teachers=['{folder}/teacher/checkpoints/step-{teacher_steps}']"
        methods = {"grpo": (), "distillation": (teacher,), "both": (teacher, "distillation.reward_coef=1.0")}
        rows: list[Row] = []
        for seed in seeds:
            for method, changes in methods.items():
                found = train(folder / f"{method}-{seed}", seed, num_steps, (f"eval.every={EVERY}", *changes))
                row: Row = {"method": method, "seed": seed, "teacher": after, "accuracy": found[-1][1]}
                for share in SHARES:
                    wanted = before + share * (after - before)
                    reached = next((samples for samples, accuracy in found if accuracy >= wanted), None)
                    row[f"samples_to_{share:g}"] = "none" if reached is None else reached
                rows.append(row)
    publish(options, rows, ratios_of(rows))


def ratios_of(rows: list[Row]) -> dict[str, float]:
    """GRPO's samples over those of distillation, medians of the seeds, for shares that all runs reached."""
    ratios = {}
    for share in SHARES:
        key = f"samples_to_{share:g}"
        found = {
            method: [row[key] for row in rows if row["method"] == method]
            for method in ("grpo", "distillation")
        }
        if all(isinstance(number, int) and number for numbers in found.values() for number in numbers):
            medians = {method: statistics.median(map(int, numbers)) for method, numbers in found.items()}
            ratios[f"grpo_over_distillation_samples_to_{share:g}"] = medians["grpo"] / medians["distillation"]
    return ratios


if __name__ == "__main__":
    main()
