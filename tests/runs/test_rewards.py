"""Reward functions that misbehave: their groups fail by name, and too many of them end the run."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, metrics, summary
from tests.runtime.tiny import REWARD, write_task

MOODY = """
import os, time

async def reward(prompt, completion, *, mood, **row):
    match mood:
        case "raises":
            raise KeyError("nothing there")
        case "is nan":
            return float("nan")
        case "is a string":
            return "1.0"
        case "hangs":
            time.sleep(3600)
        case "exits":
            os._exit(7)
    return len(set(completion)) / 10
"""
MOODS = ("raises", "is nan", "is a string", "hangs", "exits", "good", "good", "good", "good")
REASONS = {
    "reward raised KeyError",
    "reward returned nan",
    "reward returned str",
    "reward took longer than reward.timeout_s = 1",
    "reward ended its process: rewarder ended with exit code 7",
}


def test_groups_that_cannot_be_scored_fail_by_name_and_the_run_goes_on(
    start_run: StartRun, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"{number}:", "mood": mood} for number, mood in enumerate(MOODS)]
    config = write_task(tmp_path, reward=MOODY, prompts=prompts)
    limits = {"reward__timeout_s": 1.0, "reward__max_failed_fraction": 1.0, "data__shuffle": "false"}
    run = start_run(config, run__steps=2, **limits)
    ended = run.end()
    assert ended.code == 0, ended
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (4, 5, 0)
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "fail"} == REASONS
    assert all(f"failed: {reason}" in ended.out for reason in REASONS)
    assert "4 trained + 0 filtered + 5 failed + 0 pending" in dora("audit", run.out).out


LENGTH = """

class Length:
    def __init__(self, unit):
        self.unit = unit

    def __call__(self, completions, **columns):
        return [self.unit * len(text) for text in completions]
"""
SECOND = """
[[reward_task]]
name = "length"
class = "task.py:Length"
options = {unit = 0.5}
weight = -2.0
"""


def test_rewards_are_added_and_a_killed_rewarder_costs_nothing_nor_does_the_death_of_all(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_task(tmp_path, reward=REWARD + LENGTH)
    config.write_text(config.read_text() + SECOND)
    run = start_run(config, run__steps=6)
    run.wait_for_steps(2)
    for rewarder in run.workers()[-2:]:
        rewarder.kill()
    run.wait_for_steps(3)
    run.kill_all()
    again = Run(None, run.out)
    ended = again.end()
    assert ended.code == 0, ended
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (12, 0, 0)
    with sqlite3.connect(run.out / "samples.sqlite") as db:
        rows = db.execute("select reward, task_rewards from samples").fetchall()
    for reward, by_task in rows:
        own = json.loads(by_task)
        assert own["length"] > 0
        assert reward == own["reward"] - 2.0 * own["length"]
    for line in metrics(run.out):
        total = line["reward/reward/mean"] - 2.0 * line["reward/length/mean"]
        assert line["reward/mean"] == pytest.approx(total)
    assert "12 trained + 0 filtered + 0 failed + 0 pending" in dora("audit", run.out).out


def test_a_run_whose_groups_all_fail_stops_with_the_first_traceback(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = "def reward(prompt, completion):\n    raise ValueError('no such answer')\n"
    run = start_run(write_task(tmp_path, reward=reward))
    ended = run.end()
    assert ended.code == 1, ended
    assert "more than reward.max_failed_fraction = 0.2 allows; the first failure:\n" in ended.err
    assert "Traceback (most recent call last)" in ended.err
    assert "task.py" in ended.err
    assert ended.err.rstrip().endswith("ValueError: no such answer")
    assert "orchestrator.py" not in ended.err
    assert summary(run.out)["failed_groups"] >= 1
    assert dora("audit", run.out).code == 0


def test_a_reward_function_that_is_not_there_is_bad_input_and_leaves_nothing(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run(write_task(tmp_path), reward__function=f"{tmp_path}/task.py:rewrad")
    ended = run.end()
    assert ended.code == 2, ended
    assert "has no 'rewrad'; it has reward" in ended.err
    assert "Traceback" not in ended.err
    assert not run.out.exists()


def test_groups_of_equal_rewards_are_filtered_by_name_and_replaced(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = "def reward(prompt, completion):\n    return float(len(completion) > 3)\n"
    run = start_run(write_task(tmp_path, reward=reward), algorithm__filter_groups="true")
    ended = run.end()
    assert ended.code == 0, ended
    s = summary(run.out)
    assert s["filtered_groups"] > 0
    assert s["pending_groups"] == 0
    assert s["trained_groups"] == s["steps"] * 2
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "filter"} == {"zero_variance"}
    assert dora("audit", run.out).code == 0


def test_a_run_whose_groups_are_all_filtered_stops_and_says_why(start_run: StartRun, tmp_path: Path) -> None:
    reward = "def reward(prompt, completion):\n    return 1.0\n"
    run = start_run(write_task(tmp_path, reward=reward), algorithm__filter_groups="true")
    ended = run.end()
    assert ended.code == 1, ended
    assert "groups were all filtered" in ended.err
    assert summary(run.out)["trained_groups"] == 0


PATCHY = """
import time

calls = 0

def reward(prompt, completion, **row):
    global calls
    calls += 1
    if calls == 1:
        raise KeyError("the first answer of the first group")
    if calls == 2 and prompt == "0:":
        time.sleep(3600)
    return len(set(completion)) / 10
"""


def test_a_group_that_failed_is_not_judged_on_at_the_cost_of_the_next(
    start_run: StartRun, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"{number}:"} for number in range(9)]
    config = write_task(tmp_path, reward=PATCHY, prompts=prompts)
    run = start_run(config, run__steps=2, reward__timeout_s=1.0, reward__max_failed_fraction=1.0)
    ended = run.end()
    assert ended.code == 0, ended
    assert [line["reason"] for line in journal(run.out) if line["kind"] == "fail"] == [
        "reward raised KeyError"
    ]


def test_evaluation_stops_too_when_its_answers_cannot_be_scored(start_run: StartRun, tmp_path: Path) -> None:
    reward = "def reward(prompt, completion):\n    raise ValueError('no such answer')\n"
    held_out = {"eval__path": tmp_path / "prompts.jsonl", "eval__num_prompts": 7}
    run = start_run(write_task(tmp_path, reward=reward), **held_out)
    ended = run.end()
    assert ended.code == 1, ended
    assert "2 of 7 evaluation prompts could not be scored" in ended.err
    assert "no such answer" in ended.err
