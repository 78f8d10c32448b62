"""What it brings that tasks hand on samples one by one: rollout, two judges, a reference and a trainer.

The demo with a KL term, a second judge that answers as late as a model behind a network, and a trainer that
computes every layer twice (checkpointing). Three workflows of the same processes: `task_by_task` judges
when all answers of a batch are there, and trains (reference included) when all are judged; `streamed`
hands on each group at once, with a process for the reference, still on-policy; `pipelined` also lets
generation go on while a batch is trained (max_staleness = 2). Once with engines as fast as this machine
can, once paced to 2 ms a decode step, like an accelerator's: then no stage takes another's cores.
`step_s` is the time of a step after the first one, which warms up. --quick leaves out `streamed`.

    python benchmarks/workflow.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from report import Row, parse_options, publish
from rich.console import Console

from dora import settings
from dora.core.actions import Action, Score
from dora.observe import audit
from dora.runtime import local, run

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
JUDGE_S = 0.003  # for each answer, of 64 in a batch: less than the trainer takes
JUDGE = f"""
[[task]]
name = "remote"
class = "{Path(__file__).resolve()}:RemoteJudge"
weight = 0.1
"""
WORKFLOWS = {
    "task_by_task": {"orchestrator.update_policy": "sync", "trainer.streaming": "false"},
    "streamed": {"orchestrator.update_policy": "sync", "trainer.stations": '["reference"]'},
    "pipelined": {"orchestrator.max_staleness": 2, "trainer.stations": '["reference"]'},
}
WORKLOADS = {"demo": {}, "paced": {"engine.pace": "2ms", "orchestrator.rush": "false"}}
COLUMNS = {
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "trainer_idle": "trainer_idle_ratio",
    "busy": "engine_busy_ratio",
    "stall_s": "stall_s",
    "staleness": "staleness_mean",
}


class RemoteJudge:
    """Likes short answers, and takes its time."""

    def __call__(self, prompt: str, completion: str, **row: object) -> float:
        time.sleep(JUDGE_S)
        return 1.0 / (1.0 + len(completion))


class TaskByTask(local.LocalHands):
    """Nothing is judged before all answers of the batch are there; without staleness there is one batch."""

    def perform(self, order: Action) -> None:
        if isinstance(order, Score):
            self._held = [*getattr(self, "_held", []), order]
            if len(self._held) < self.plan.limits.batch_size:
                return
            orders, self._held = self._held, []
            for held in orders:
                super().perform(held)
        else:
            super().perform(order)


def measure(workload: str, workflow: str, num_steps: int, seed: int) -> Row:
    """One run; its summary in the columns above."""
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
    run.LocalHands = TaskByTask if workflow == "task_by_task" else local.LocalHands
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "workflow.toml", Path(folder) / "run"
        path.write_text(EXAMPLE.read_text(encoding="utf-8") + JUDGE, encoding="utf-8")
        config = settings.read(path, [f"{key}={value}" for key, value in changes.items()])
        run.train(config, out, Console(quiet=True))
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        verdict = audit.check(out)
    assert verdict.c1
    assert verdict.c2
    assert verdict.c3
    ends_s = [json.loads(line)["t_s"] for line in lines]
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
        chosen = [row for row in rows if (row["workload"], row["workflow"]) == (workload, workflow)]
        return statistics.median(float(row["step_s"]) for row in chosen)

    ratios = {
        f"task_by_task_over_{workflow}_step_s_{workload}": median(workload, "task_by_task")
        / median(workload, workflow)
        for workload in WORKLOADS
        for workflow in workflows[1:]
    }
    publish(options, rows, ratios | {"judge_ms": 1e3 * JUDGE_S})


if __name__ == "__main__":
    main()
