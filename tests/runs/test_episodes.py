"""Runs of episodes that lose an engine or are resumed: episodes continue, and loss masks stay correct."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, journal, metrics, query, summary
from tests.runtime.tiny import write_task

ECHO = """
from pathlib import Path
from dora.envs.base import Environment, Step

def log(call):
    with Path(__file__).with_name("calls").open("a") as file:
        file.write(call + "\\n")

class Echo(Environment):
    async def reset(self, row, seed):
        log("reset")
        self.num_steps = 0
        return row["prompt"]

    async def step(self, action):
        log("step")
        self.num_steps += 1
        return Step("77:", action.count("7") + len(action) / 100, self.num_steps == 3)

    def snapshot(self):
        return bytes([self.num_steps])

    def restore(self, state):
        (self.num_steps,) = state
"""


def write_echo(folder: Path) -> Path:
    config = write_task(folder)
    (folder / "echo.py").write_text(ECHO)
    reward = '[reward]\nfunction = "task.py:reward"\n'
    config.write_text(config.read_text().replace(reward, '[env]\nenvironment = "echo.py:Echo"\n'))
    return config


TURNS: dict[str, object] = {"sampling__max_turn_length": 5, "run__steps": 1, "orchestrator__max_staleness": 0}


def calls(folder: Path) -> Counter[str]:
    """How often the environments were called."""
    path = folder / "calls"
    return Counter(path.read_text().split() if path.exists() else ())


def token_ids(out: Path) -> dict[tuple[str, int], bytes]:
    """(group, sibling) -> tokens."""
    rows = query(out, "select group_id, sibling, token_ids from samples")
    return {(group, sibling): ids for group, sibling, ids in rows}


def test_turns_are_credited_with_their_rewards(start_run: StartRun, tmp_path: Path) -> None:
    """Also after a kill of the whole run, which loses nothing of what is stored."""
    gigpo = {"algorithm__adv_estimator": "gigpo", "algorithm__gamma": 0.9, "algorithm__step_advantage_w": 0.5}
    settings = {**TURNS, "run__steps": 3, "trainer__deterministic": "true", **gigpo}
    run = start_run(write_echo(tmp_path), engine__min_step_time="20ms", **settings)
    run.wait_until(lambda: len(metrics(run.out)) == 1, "the first step")
    run.kill()
    run = Run(None, run.out)
    run.succeed()
    rows = query(run.out, "select reward, advantage, json_array_length(turn_rewards) from samples")
    assert len(rows) == 12
    assert {(advantage, num) for _, advantage, num in rows} == {(None, 3)}
    assert all(step["actor/grad_norm"] > 0 for step in metrics(run.out))
    turns = ("num_turns/mean", "num_turns/min", "num_turns/max", "num_turns/clip_ratio")
    assert {tuple(step[name] for name in turns) for step in metrics(run.out)} == {(3, 3, 3, 0)}
    assert all(step["actor/frac_compared_turns"] == 1.0 for step in metrics(run.out))
    run.check_records()
    undisturbed = Run(tmp_path / "task.toml", tmp_path / "undisturbed", **settings)  # type: ignore[arg-type]
    undisturbed.succeed()
    assert token_ids(run.out) == token_ids(undisturbed.out)


def test_episodes_of_a_lost_engine_continue_and_repeat_no_step(start_run: StartRun, tmp_path: Path) -> None:
    config = write_echo(tmp_path)
    run = start_run(config, engine__min_step_time="100ms", **TURNS)
    run.wait_until(lambda: calls(tmp_path)["step"] >= 3, "three steps of environments")
    used = next(line["engine"] for line in journal(run.out) if line["kind"] == "generate")
    run.workers()[used].kill()
    run.succeed()
    assert calls(tmp_path) == {"reset": 4, "step": 12}
    s = summary(run.out)
    assert s["engine_failures"] == 1
    assert s["kept_tokens"] > 0
    audit = run.audit()
    assert f"engines, or the whole run, were lost 1 time: {s['kept_tokens']} token" in audit
    undisturbed = Run(config, tmp_path / "undisturbed", **TURNS)  # type: ignore[arg-type]
    undisturbed.succeed()
    assert token_ids(run.out) == token_ids(undisturbed.out)


def test_episodes_continue_in_a_resumed_run(start_run: StartRun, tmp_path: Path) -> None:
    """After SIGKILL of everything, steps that the driver had a reply to are not repeated."""
    config = write_echo(tmp_path)
    run = start_run(config, engine__min_step_time="100ms", **TURNS)
    run.wait_until(lambda: calls(tmp_path)["step"] >= 5, "five steps of environments")
    run.kill()
    num_steps = calls(tmp_path)["step"]
    resumed = Run(None, run.out)
    resumed.succeed()
    assert calls(tmp_path)["reset"] == 4
    assert 12 <= calls(tmp_path)["step"] <= 12 + 4 < 12 + num_steps
    (event,) = (line for line in journal(run.out) if line["kind"] == "resumed")
    assert sum(num_tokens for _, num_tokens in event["kept_tokens"]) > 0
    audit = run.audit()
    assert "0 requests restarted from the prompt" in audit
    undisturbed = Run(config, tmp_path / "undisturbed", **TURNS)  # type: ignore[arg-type]
    undisturbed.succeed()
    assert token_ids(run.out) == token_ids(undisturbed.out)


def test_episodes_survive_a_lost_engine_and_a_resume(start_run: StartRun, tmp_path: Path) -> None:
    turns = {"sampling__max_turn_length": 5, "trainer__save_freq": 2, "run__steps": 8}
    turns["engine__num_kv_blocks"] = 4  # of which a row takes up to 3: the others are swapped out
    run = start_run(write_echo(tmp_path), orchestrator__balance_running="true", **turns)
    run.wait_for_steps(1)
    run.workers()[0].kill()
    run.wait_until(lambda: any(x["kind"] == "engine_lost" for x in journal(run.out)), "the loss")
    run.wait_for_steps(4)
    driver = psutil.Process(run.pid)

    def stops_with_an_untrained_group() -> bool:
        driver.suspend()
        if not untrained(run.out):
            driver.resume()
        return len(untrained(run.out)) > 0 and driver.status() == psutil.STATUS_STOPPED

    run.wait_until(stops_with_an_untrained_group, "a scored group that is not trained")
    run.kill_all()
    unscore(run.out)
    resumed = Run(None, run.out)
    try:
        resumed.succeed()
    finally:
        resumed.kill_all()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"]) == (16, 0)
    audit = run.audit("--deep", "40")
    assert "log-probs ok" in audit
    check_samples(run.out)


def untrained(out: Path) -> list[str]:
    """Groups that are scored and not trained."""
    trained: set[str] = set()
    scored: dict[str, None] = {}
    for line in journal(out):
        match line["kind"]:
            case "group_scored":
                scored["{}/{}".format(*line["group"])] = None
            case "train":
                trained |= {"{}/{}".format(*group) for group in line["groups"]}
    return [group for group in scored if group not in trained]


def unscore(out: Path) -> None:
    """As after a crash between an event and the write of its payload."""
    groups = untrained(out)
    assert groups
    reset = "update samples set state = 'finished', advantage = null where group_id = ? returning sibling"
    for group in groups:
        assert len(query(out, reset, group)) == 2


def check_samples(out: Path) -> None:
    """The loss mask is 0 for the tokens of observations, and only for these."""
    columns = "token_ids, logprobs, loss_mask, reward, advantage"
    rows = query(out, f"select {columns} from samples where state = 'trained'")
    assert len(rows) == 32
    for ids, logprob_bytes, mask, reward, advantage in rows:
        token_ids, logprobs = np.frombuffer(ids, "<i4"), np.frombuffer(logprob_bytes, "<f4")
        is_observed = np.frombuffer(mask, np.uint8) == 0
        assert is_observed.sum() in (3, 6)
        for at in np.flatnonzero(is_observed)[::3]:
            assert is_observed[at : at + 3].all()
            assert len({*token_ids[at : at + 2].tolist()}) == 1  # "77:"
        assert (logprobs[is_observed] == 0).all()
        assert (logprobs[~is_observed] < 0).all()
        assert math.isfinite(reward)
        assert math.isfinite(advantage)


def test_the_audit_scores_episodes_again_if_a_reward_function_has_scored_them(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_echo(tmp_path)
    config.write_text(config.read_text() + '[reward]\nfunction = "task.py:reward"\n')
    run = start_run(config, **TURNS)
    run.succeed()
    assert "rewards ok  4 responses scored again" in run.audit("--deep", "4")
