"""Search for a learning rate and a group size with Optuna, which stops runs that learn slowly.

    pip install optuna
    python examples/sweep.py --trials 12 --steps 60 --out runs/sweep

Each trial is a run in a folder of its own; `dora report` compares them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import optuna

import dora

CONFIG = Path(__file__).with_name("gcd.toml")
POLL_INTERVAL_S = 0.5
SETTINGS = {  # smaller than the demo: a search needs many runs
    "run.steps": 60,
    "sampling.max_response_length": 200,
    "trainer.batch_size": 4,
    "trainer.warmup_steps": 0,
    "eval.num_prompts": 0,
}


def objective(trial: optuna.Trial, num_steps: int, out: Path) -> float:
    """The mean reward of the last fifth of the steps."""
    changes = SETTINGS | {
        "run.steps": num_steps,
        "trainer.lr": trial.suggest_float("trainer.lr", 3e-5, 1e-3, log=True),
        "sampling.group_size": trial.suggest_categorical("sampling.group_size", [4, 8]),
    }
    run = dora.train(CONFIG, out / f"trial-{trial.number}", changes, wait=False)
    try:
        report_rewards(trial, run)
    finally:
        run.stop()  # of a run that has ended: does nothing
    run.wait(progress=False)  # raises the error of a run that failed
    rewards = run.metrics().column("reward/mean")[-max(1, num_steps // 5) :]
    return sum(rewards) / len(rewards)


def report_rewards(trial: optuna.Trial, run: dora.Run) -> None:
    """Report the reward of each step until the run ends. Raises TrialPruned if it is worse than others."""
    num_reported, is_running = 0, True
    while is_running:
        is_running = run.status.state == "running"  # before the metrics are read, so that none is missed
        rows = [row for row in run.metrics() if "reward/mean" in row]
        for row in rows[num_reported:]:
            trial.report(row["reward/mean"], row["step"])
        num_reported = len(rows)
        if is_running and trial.should_prune():
            raise optuna.TrialPruned
        time.sleep(POLL_INTERVAL_S)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--trials", type=int, default=12)
    options.add_argument("--steps", type=int, default=60, help="of each run")
    options.add_argument("--out", type=Path, default=Path("runs/sweep"), help="a new folder")
    given = options.parse_args()
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=given.steps // 4)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner
    )
    study.optimize(lambda trial: objective(trial, given.steps, given.out), n_trials=given.trials)
    best = study.best_trial
    print(f"best: trial {best.number}, reward {best.value:.3f}, {best.params}")


if __name__ == "__main__":
    main()
