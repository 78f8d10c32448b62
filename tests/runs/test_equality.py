"""With max_staleness = 0, deterministic and exact, a run gives the bits of a loop in one process.

The loop is examples/synchronous.py. It in turn gives the bits of a loop whose trainer is written out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import synchronous
from examples.synchronous import Task
from tests.runs.plain_trainer import PlainTrainer
from tests.runtime.running import Run, query
from tests.runtime.tiny import write_task
from torch import Tensor

from dora.data.dataset import Dataset
from dora.model.pretrained import load_pretrained
from dora.trainer.trainer import Trainer, TrainerSettings

REWARD = """
def reward(prompt, completion, **row):
    return completion.count("7")
"""
PROMPTS = [{"prompt": f"sevens{number}:"} for number in range(100000, 100009)]  # no shorter than responses
STEPS = 10
SETTINGS = TrainerSettings(
    lr=1e-2,
    num_steps=STEPS,
    warmup_steps=2,
    weight_decay=0.1,
    max_grad_norm=0.5,  # clips about every second step
    micro_batch_tokens=80,
)

Start = Callable[..., Run]


@dataclass(frozen=True)
class Result:
    """The last weights [numel], and the tokens of every response by the name of its request."""

    flat: Tensor
    responses: dict[str, list[int]]


def sevens(prompt: str, completion: str) -> float:
    """REWARD. At first many groups are filtered, because no response has a seven."""
    return float(completion.count("7"))


def train(task: Task, trainer_class: type[Trainer] = Trainer) -> Result:
    """All steps of the loop."""
    responses: dict[str, list[int]] = {}
    for step in synchronous.train(task, trainer_class):
        for completions in step.responses.values():
            responses |= {str(c.id): c.token_ids.tolist() for c in completions}
    return Result(step.flat, responses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts, reward and configuration."""
    folder = tmp_path_factory.mktemp("equality")
    write_task(folder, REWARD, PROMPTS)
    return folder


@pytest.fixture(scope="module")
def task(folder: Path) -> Task:
    return Task(
        folder / "start",
        Dataset.from_path(folder / "prompts.jsonl"),
        sevens,
        SETTINGS,
        batch_size=3,
        group_size=4,
        max_response_length=10,
        kernels="eager",
    )


@pytest.fixture(scope="module")
def expected(task: Task) -> Result:
    return train(task)


@pytest.fixture
def start(task: Task, folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts or resumes `dora train` on the task; kills its processes at the end."""
    runs: list[Run] = []

    def start(is_resumed: bool = False) -> Run:
        changes: dict[str, Any] = {
            "run__steps": STEPS,
            "data__max_prompt_length": 13,
            "sampling__group_size": task.group_size,
            "sampling__max_response_length": task.max_response_length,
            "engine__exact_logprobs": "true",
            "engine__min_step_time": "8ms",
            "algorithm__filter_groups": "true",
            "trainer__batch_size": task.batch_size,
            "trainer__lr": SETTINGS.lr,
            "trainer__warmup_steps": SETTINGS.warmup_steps,
            "trainer__weight_decay": SETTINGS.weight_decay,
            "trainer__max_grad_norm": SETTINGS.max_grad_norm,
            "trainer__micro_batch_tokens": SETTINGS.micro_batch_tokens,
            "trainer__deterministic": "true",
            "trainer__save_freq": 3,
            "orchestrator__max_staleness": 0,
        }
        config = None if is_resumed else folder / "task.toml"
        runs.append(Run(config, tmp_path / "run", **({} if is_resumed else changes)))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()


def differences(out: Path, expected: Result) -> list[str]:
    """Names of the responses of a finished run that differ in any bit, and "weights" if they do."""
    rows = query(out, "select group_id, sibling, token_ids from samples")
    responses = {
        f"{group}/{sibling}": np.frombuffer(ids, dtype="<i4").tolist() for group, sibling, ids in rows
    }
    names = sorted(expected.responses.keys() | responses.keys())
    differing = [name for name in names if responses.get(name) != expected.responses.get(name)]
    _, flat = load_pretrained(out / "checkpoints" / f"step-{STEPS}")
    return differing + ([] if torch.equal(flat, expected.flat) else ["weights"])


def test_a_run_with_two_engines_has_the_bits_of_the_loop(start: Start, expected: Result) -> None:
    run = start()
    run.succeed()
    assert differences(run.out, expected) == []
    assert len(expected.responses) > STEPS * 12, "no group was filtered"


def test_crashes_of_an_engine_and_of_the_run_do_not_change_the_bits(start: Start, expected: Result) -> None:
    run = start()
    run.wait_for_steps(2)
    run.workers()[0].kill()
    run.wait_for_steps(5)
    os.killpg(run.pid, signal.SIGKILL)
    run.end()
    start(is_resumed=True).succeed()
    assert differences(run.out, expected) == []


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1e-2 * (1 + 1e-6)},
        {"warmup_steps": 0},
        {"weight_decay": 0.1 * (1 + 1e-3)},
        {"max_grad_norm": 0.5 * (1 + 1e-6)},
        {"micro_batch_tokens": 60},
    ],
)
def test_another_learning_rate_decay_clipping_or_order_of_sums_changes_the_bits(
    task: Task, expected: Result, change: dict[str, Any]
) -> None:
    changed = replace(task, settings=replace(SETTINGS, **change))
    assert not torch.equal(train(changed).flat, expected.flat)


def test_the_trainer_has_the_bits_of_arithmetic_written_out(task: Task, expected: Result) -> None:
    plain = train(task, PlainTrainer)
    assert torch.equal(plain.flat, expected.flat)
    assert plain.responses == expected.responses


def test_the_example_prints_rewards_and_accuracies(capsys: pytest.CaptureFixture[str]) -> None:
    synchronous.main(num_steps=2, num_held_out=8)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["accuracy", "step", "step", "accuracy"]
    assert all(" reward 0." in line for line in lines[1:-1])
