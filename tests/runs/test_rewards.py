"""Reward functions that fail: their groups fail with the reason, and too many of them stop the run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.runs.conftest import StartRun
from tests.runs.resumable import write_held_task
from tests.runtime.running import Run, dora, journal, metrics, query, summary, undocumented
from tests.runtime.tiny import REWARD, write_task

FAILING = """
import os, time

async def reward(prompt, completion, *, behavior, **row):
    match behavior:
        case "raises":
            raise KeyError("missing key")
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
BEHAVIORS = ("raises", "is nan", "is a string", "hangs", "exits", "good", "good", "good", "good")
REASONS = {
    "reward raised KeyError",
    "reward returned nan",
    "reward returned str",
    "reward took longer than reward.timeout_s = 1",
    "reward ended its process: reward worker exited with code 7",
}


def test_groups_that_cannot_be_scored_fail_with_a_reason_and_the_run_finishes(
    start_run: StartRun, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"{number}:", "behavior": behavior} for number, behavior in enumerate(BEHAVIORS)]
    config = write_task(tmp_path, reward=FAILING, prompts=prompts)
    limits = {"reward__timeout_s": 1.0, "reward__max_failed_fraction": 1.0, "data__shuffle": "false"}
    run = start_run(config, run__steps=2, **limits)
    result = run.succeed()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (4, 5, 0)
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "fail"} == REASONS
    assert all(f"failed: {reason}" in result.out for reason in REASONS)
    assert "4 trained + 0 filtered + 5 failed + 0 pending" in run.audit()


FINISHED = """
def reward(prompt, completion, finish_reason):
    return {"stop": 2.0, "length": 0.5}[finish_reason] + len(set(completion)) / 100
"""


def test_a_reward_may_depend_on_why_a_response_ended(start_run: StartRun, tmp_path: Path) -> None:
    config = write_task(tmp_path, reward=FINISHED)
    held_out = {"eval__path": tmp_path / "prompts.jsonl", "eval__num_prompts": 3}
    run = start_run(config, run__steps=2, sampling__stop='["7"]', **held_out)
    run.succeed()
    for kind in ("group_id >= '0'", "group_id < '0'"):
        query_of_kind = f"select finish_reason, min(reward), max(reward) from samples where {kind} group by 1"
        (length, *lowest), (stop, *highest) = query(run.out, query_of_kind)
        assert (length, stop) == ("length", "stop")
        assert 0.5 < lowest[0] <= lowest[1] < 2 < highest[0]
    assert "rewards ok  8 responses scored again" in run.audit("--deep", "8")


LENGTH = """

class Length:
    def __init__(self, unit):
        self.unit = unit

    def __call__(self, completions, **columns):
        return [self.unit * len(text) for text in completions]
"""
LENGTH_TASK = """
[[reward_task]]
name = "length"
class = "task.py:Length"
options = {unit = 0.5}
weight = -2.0
"""
EVALUATIONS: dict[str, Any] = {
    "eval__num_prompts": 2,
    "eval__num_samples": 2,
    "eval__greedy": "true",
    "eval__every": 1,
    "trainer__lr_decay": "constant",  # so that the run can get more steps
}


def test_rewards_are_summed_also_after_kills_of_the_reward_workers_and_of_the_run(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_task(tmp_path, reward=REWARD + LENGTH)
    config.write_text(config.read_text() + LENGTH_TASK)
    run = start_run(config, run__steps=6, engine__min_step_time="60ms")
    run.wait_for_steps(2)
    for reward_worker in run.workers()[-2:]:
        reward_worker.kill()
    run.wait_for_steps(3)
    run.kill_all()
    Run(None, run.out).succeed()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (12, 0, 0)
    for reward, by_task in query(run.out, "select reward, task_rewards from samples"):
        rewards = json.loads(by_task)
        assert rewards["length"] > 0
        assert reward == rewards["reward"] - 2.0 * rewards["length"]
    for line in metrics(run.out):
        total = line["reward/reward/mean"] - 2.0 * line["reward/length/mean"]
        assert line["reward/mean"] == pytest.approx(total)
    assert "12 trained + 0 filtered + 0 failed + 0 pending" in run.audit()


def test_an_evaluation_has_the_mean_of_each_reward_after_resumes_within_it_and_after_it(
    start_run: StartRun, tmp_path: Path
) -> None:
    """One of its prompts is scored before the run is killed; the last response to the other is held."""
    config, fifo = write_held_task(tmp_path, num_scored=5)
    (tmp_path / "task.py").write_text((tmp_path / "task.py").read_text() + LENGTH)
    config.write_text(config.read_text() + LENGTH_TASK)
    run = start_run(config, run__steps=2, eval__path=tmp_path / "prompts.jsonl", **EVALUATIONS)
    run.wait_until(lambda: num_scored(run.out) == 1, "the first rewards")
    run.kill()
    fifo.unlink()
    Run(None, run.out).succeed()
    lines = check_evaluations(run.out)
    Run(None, run.out, run__steps=3).succeed()
    assert check_evaluations(run.out)[: len(lines)] == lines
    run.check_records()

    lines = check_evaluations(run.out)
    query(run.out, "update samples set task_rewards = null where group_id < '0'")  # as earlier versions did
    Run(None, run.out, run__steps=4).succeed()
    assert evaluation_lines(run.out)[: len(lines)] == lines
    first, *_, last = summary(run.out)["evaluations"]
    assert ("reward/length/mean" in first, "reward/length/mean" in last) == (False, True)
    run.check_records()


def num_scored(out: Path) -> int:
    """Prompts of the evaluation of version 0 with rewards in the journal."""
    return sum(line["kind"] == "group_scored" and line["group"][0] == -1 for line in journal(out))


def evaluation_lines(out: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(out) if "val/version" in line]


def check_evaluations(out: Path) -> list[dict[str, Any]]:
    """Each evaluation has the means of both rewards, also in summary.json; returns those of metrics.jsonl."""
    lines = evaluation_lines(out)
    found = [{name: line[name] for name in line if name.startswith("val/")} for line in lines]
    assert [{f"val/{name}": own[name] for name in own} for own in summary(out)["evaluations"]] == found
    for line in lines:
        for kind, siblings in (("reward", "sibling > 0"), ("greedy_reward", "sibling = 0")):
            where = f"group_id like '{-1 - line['val/version']}/%' and {siblings}"
            rows = query(out, f"select task_rewards from samples where {where}")
            rewards = [json.loads(by_task) for (by_task,) in rows]
            means = {task: fmean(own[task] for own in rewards) for task in ("reward", "length")}
            assert {task: line[f"val/{kind}/{task}/mean"] for task in means} == pytest.approx(means)
            assert line[f"val/{kind}_mean"] == pytest.approx(means["reward"] - 2.0 * means["length"])
    assert undocumented(out) == set()
    return lines


def test_a_run_whose_groups_all_fail_stops_with_the_first_traceback_and_resumes_once_corrected(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = "def reward(prompt, completion):\n    raise ValueError('cannot score')\n"
    run = start_run(write_task(tmp_path, reward=reward))
    result = run.end()
    assert result.code == 1, result
    assert "more than reward.max_failed_fraction = 0.2 allows; correct the cause and resume" in result.err
    assert "Traceback (most recent call last)" in result.err
    assert "task.py" in result.err
    assert result.err.rstrip().endswith("ValueError: cannot score")
    assert "orchestrator.py" not in result.err
    num_failed = summary(run.out)["failed_groups"]
    assert num_failed >= 1
    run.audit()
    write_task(tmp_path)
    resumed = dora("train", "--resume", run.out)
    assert resumed.code == 0, resumed
    assert summary(run.out)["failed_groups"] == num_failed
    run.check_records()


def test_a_missing_reward_function_is_an_input_error_and_leaves_no_files(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run(write_task(tmp_path), reward__function=f"{tmp_path}/task.py:rewrad")
    result = run.end()
    assert result.code == 2, result
    assert "has no 'rewrad'; it has reward" in result.err
    assert "Traceback" not in result.err
    assert not run.out.exists()


def test_groups_of_equal_rewards_are_filtered_and_replaced(start_run: StartRun, tmp_path: Path) -> None:
    reward = "def reward(prompt, completion):\n    return float(len(completion) > 3)\n"
    run = start_run(write_task(tmp_path, reward=reward), algorithm__filter_groups="true")
    run.succeed()
    s = summary(run.out)
    assert s["filtered_groups"] > 0
    assert s["pending_groups"] == 0
    assert s["trained_groups"] == s["steps"] * 2
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "filter"} == {"zero_variance"}
    run.audit()


def test_a_run_whose_groups_are_all_filtered_stops_with_the_reason(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = "def reward(prompt, completion):\n    return 1.0\n"
    run = start_run(write_task(tmp_path, reward=reward), algorithm__filter_groups="true")
    result = run.end()
    assert result.code == 1, result
    assert "groups were all filtered" in result.err
    assert summary(run.out)["trained_groups"] == 0


FIRST_FAILS = """
import time

failed = []

def reward(prompt, completion, **row):
    if not failed:
        failed.append(prompt)
        raise KeyError("the first response of a group")
    if prompt in failed:
        time.sleep(3600)
    return len(set(completion)) / 10
"""


def test_the_rest_of_a_failed_group_is_not_scored(start_run: StartRun, tmp_path: Path) -> None:
    prompts = [{"prompt": f"{number}:"} for number in range(9)]
    config = write_task(tmp_path, reward=FIRST_FAILS, prompts=prompts)
    run = start_run(config, run__steps=2, reward__timeout_s=30.0, reward__max_failed_fraction=1.0)
    run.succeed()
    assert [line["reason"] for line in journal(run.out) if line["kind"] == "fail"] == [
        "reward raised KeyError"
    ]


def test_an_evaluation_whose_responses_cannot_be_scored_stops_the_run(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = "def reward(prompt, completion):\n    raise ValueError('cannot score')\n"
    held_out = {"eval__path": tmp_path / "prompts.jsonl", "eval__num_prompts": 7}
    run = start_run(write_task(tmp_path, reward=reward), **held_out)
    result = run.end()
    assert result.code == 1, result
    assert "2 of 7 evaluation prompts could not be scored" in result.err
    assert "cannot score" in result.err
