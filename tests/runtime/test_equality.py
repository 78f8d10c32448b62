"""With `max_staleness = 0`, deterministic and exact, a whole run gives the bits of a loop in one process."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.running import Run
from tests.runtime.straight_line import Result, Task, train
from tests.runtime.tiny import write_task

from dora.model.folder import load_folder

REWARD = """
def reward(prompt, completion, **row):
    return completion.count("7")
"""
PROMPTS = [{"prompt": f"sevens{number}:"} for number in range(100000, 100009)]  # no shorter than answers
STEPS = 10

Start = Callable[..., Run]


def sevens(prompt: str, completion: str) -> float:
    """REWARD. Many groups are filtered at first, where no answer has any."""
    return float(completion.count("7"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("equality")
    write_task(folder, REWARD, PROMPTS)
    return Task(
        folder / "start",
        folder / "prompts.jsonl",
        sevens,
        steps=STEPS,
        batch_size=3,
        group_size=4,
        max_tokens=10,
        lr=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,  # clips about every other step
        micro_batch_tokens=80,
    )


@pytest.fixture(scope="module")
def expected(task: Task) -> Result:
    return train(task)


@pytest.fixture
def start(task: Task, tmp_path: Path) -> Iterator[Start]:
    """Starts `dora train` on the task, or goes on with it; kills what is left of it at the end."""
    runs: list[Run] = []

    def start(is_resumed: bool = False) -> Run:
        changes: dict[str, Any] = {
            "run__steps": task.steps,
            "data__max_prompt_length": 13,
            "sampling__group_size": task.group_size,
            "sampling__max_response_length": task.max_tokens,
            "engine__exact": "true",
            "engine__pace": "4ms",
            "algorithm__filter_groups": "true",
            "trainer__batch_size": task.batch_size,
            "trainer__lr": task.lr,
            "trainer__warmup_steps": task.warmup_steps,
            "trainer__weight_decay": task.weight_decay,
            "trainer__max_grad_norm": task.max_grad_norm,
            "trainer__micro_batch_tokens": task.micro_batch_tokens,
            "trainer__deterministic": "true",
            "trainer__save_freq": 3,
            "orchestrator__max_staleness": 0,
        }
        config = None if is_resumed else task.prompts.with_name("task.toml")
        runs.append(Run(config, tmp_path / "run", **({} if is_resumed else changes)))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()


def differences(out: Path, expected: Result) -> list[str]:
    """What of a finished run is not as expected, to the last bit."""
    with sqlite3.connect(out / "samples.sqlite") as db:
        rows = db.execute("select group_id, sibling, token_ids from samples").fetchall()
    answers = {f"{group}/{sibling}": np.frombuffer(ids, dtype="<i4").tolist() for group, sibling, ids in rows}
    names = sorted(expected.answers.keys() | answers.keys())
    found = [name for name in names if answers.get(name) != expected.answers.get(name)]
    _, flat = load_folder(out / "checkpoints" / f"step-{STEPS}")
    return found + ([] if torch.equal(flat, expected.flat) else ["weights"])


def test_a_run_with_two_engines_has_the_bits_of_a_straight_line(start: Start, expected: Result) -> None:
    run = start()
    ended = run.end()
    assert ended.code == 0, ended
    assert differences(run.out, expected) == []
    assert len(expected.answers) > STEPS * 12, "no group was filtered"


def test_the_bits_stay_when_an_engine_dies_and_then_everything(start: Start, expected: Result) -> None:
    run = start()
    run.wait_for_steps(2)
    run.workers()[0].kill()
    run.wait_for_steps(5)
    os.killpg(run.pid, signal.SIGKILL)
    run.end()
    ended = start(is_resumed=True).end()
    assert ended.code == 0, ended
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
def test_another_learning_rate_or_decay_or_clipping_or_order_of_sums_has_other_bits(
    task: Task, expected: Result, change: dict[str, Any]
) -> None:
    assert not torch.equal(train(replace(task, **change)).flat, expected.flat)
