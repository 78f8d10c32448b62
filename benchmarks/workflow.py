"""Step time of three workflows of rollout, two reward tasks, a reference and a trainer.

The run is the demo with a KL term, a second reward as slow as a model behind a network, and activation
checkpointing. `task_by_task` scores once all answers of a batch are finished, and trains (reference included)
once all are scored; `streamed` passes on each group at once, with a process for the reference, still
on-policy; `pipelined` also generates while a batch is trained (max_staleness = 2). The workload `demo` runs
engines at full speed; `paced` pads every decode step to 2 ms, like an accelerator's, so that stages do not
compete for cores. `step_s` is the mean time of a step after the first one, which warms up. --quick leaves out
`streamed`.

    python benchmarks/workflow.py [--quick] [--json FILE]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from finished_run import audited_summary, median_of, metrics_of
from rich.console import Console

from dora.config import load
from dora.core.actions import Action, Score
from dora.runtime import executor, run
from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
REWARD_S = 0.003  # per answer, of 64 in a batch: less than the time of the trainer
REWARD_TASK = f"""
[[reward_task]]
name = "remote"
class = "{Path(__file__).resolve()}:RemoteReward"
weight = 0.1
"""
WORKFLOWS = {
    "task_by_task": {"orchestrator.update_policy": "sync", "trainer.streaming": "false"},
    "streamed": {"orchestrator.update_policy": "sync", "trainer.aux_workers": '["reference"]'},
    "pipelined": {"orchestrator.max_staleness": 2, "trainer.aux_workers": '["reference"]'},
}
WORKLOADS = {
    "demo": {},
    "paced": {"engine.min_step_time": "2ms", "orchestrator.prioritize_stragglers": "false"},
}
COLUMNS = {
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "trainer_idle": "trainer_idle_ratio",
    "busy": "rollout_utilization",
    "stall_s": "stall_s",
    "staleness": "staleness_mean",
}


class RemoteReward:
    """A slow reward, higher for short answers."""

    def __call__(self, prompt: str, completion: str, **row: object) -> float:
        time.sleep(REWARD_S)
        return 1.0 / (1.0 + len(completion))


class TaskByTask(executor.ProcessExecutor):
    """Scores no group before all answers of the batch are finished; without staleness there is one batch."""

    def execute(self, action: Action) -> None:
        if isinstance(action, Score):
            self._delayed = [*getattr(self, "_delayed", []), action]
            if len(self._delayed) < self.setup.limits.batch_size:
                return
            actions, self._delayed = self._delayed, []
            for delayed in actions:
                super().execute(delayed)
        else:
            super().execute(action)


def measure(workload: str, workflow: str, num_steps: int, seed: int) -> Row:
    """The summary of one run in the columns above."""
    changes = {
        "run.steps": num_steps,
        "run.seed": seed,
        "model.path": EXAMPLE.parent / "gcd-start",
        "algorithm.kl_loss_coef": 0.01,
        "trainer.activation_checkpointing": "true",
        "eval.num_prompts": 0,
        **WORKLOADS[workload],
        **WORKFLOWS[workflow],
    }
    run.ProcessExecutor = TaskByTask if workflow == "task_by_task" else executor.ProcessExecutor
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "workflow.toml", Path(folder) / "run"
        path.write_text(EXAMPLE.read_text(encoding="utf-8") + REWARD_TASK, encoding="utf-8")
        config = load.read_config(path, [f"{key}={value}" for key, value in changes.items()])
        run.train(config, out, Console(quiet=True))
        summary = audited_summary(out)
        ends_s = [line["t_s"] for line in metrics_of(out)]
    step_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    named = {"workload": workload, "workflow": workflow, "seed": seed, "steps": num_steps, "step_s": step_s}
    return named | {column: summary[key] for column, key in COLUMNS.items()}


def main() -> None:
    options = parse_options(str(__doc__))
    num_steps = 6 if options.quick else 40
    seeds = (0,) if options.quick else (0, 1, 2)
    workflows = [name for name in WORKFLOWS if name != "streamed" or not options.quick]
    rows = [
        measure(workload, workflow, num_steps, seed)
        for seed in seeds
        for workload in WORKLOADS
        for workflow in workflows
    ]

    def median(workload: str, workflow: str) -> float:
        return median_of(rows, "step_s", workload=workload, workflow=workflow)

    ratios = {
        f"task_by_task_over_{workflow}_step_s_{workload}": median(workload, "task_by_task")
        / median(workload, workflow)
        for workload in WORKLOADS
        for workflow in workflows[1:]
    }
    publish(options, rows, ratios | {"judge_ms": 1e3 * REWARD_S})


if __name__ == "__main__":
    main()
