"""Runs whose answers are episodes: they learn from what environments say, and these may do anything."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tests.runs.conftest import StartRun
from tests.runtime.running import dora, journal, summary
from tests.runtime.tiny import write_task

MOODY = """
import asyncio, os, time
from dora.envs.base import Environment, Fault, Step

class Moody(Environment):
    async def reset(self, row, seed):
        self.mood, self.num_steps = row["mood"], 0
        return row["prompt"]

    async def step(self, action):
        self.num_steps += 1
        match self.mood:
            case "raises":
                raise KeyError("nothing there")
            case "gives up":
                raise Fault("no license left")
            case "is slow":
                await asyncio.sleep(3600)
            case "hangs":
                time.sleep(3600)
            case "exits":
                os._exit(7)
        return Step("77", len(set(action)) / 10, self.num_steps == 2)
"""
MOODS = ("raises", "gives up", "is slow", "hangs", "exits", "good", "good", "good", "good")
REASONS = {
    "environment raised KeyError",
    "no license left",
    "environment took longer than env.timeout_s = 1",
    "environment or one beside it hangs, env.timeout_s = 1",
    "environment's process ended: environments 0 ended with exit code 7",
}


def write_moody(folder: Path) -> Path:
    """A task whose rows say what their environments are to do; one group after the other."""
    prompts = [{"prompt": f"{number}:", "mood": mood} for number, mood in enumerate(MOODS)]
    config = write_task(folder, prompts=prompts)
    (folder / "moody.py").write_text(MOODY)
    reward = '[reward]\nfunction = "task.py:reward"\n'
    env = '[env]\nenvironment = "moody.py:Moody"\ntimeout_s = 1.0\n[reward]\nmax_failed_share = 1.0\n'
    config.write_text(config.read_text().replace(reward, env))
    return config


def test_episodes_are_trained_and_those_that_break_fail_their_groups_by_name(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_moody(tmp_path)
    one_by_one = {"engine__num_engines": 1, "engine__max_num_seqs": 2, "data__shuffle": "false"}
    run = start_run(config, run__steps=2, orchestrator__max_staleness=0, trainer__batch_size=2, **one_by_one)
    ended = run.end()
    assert ended.code == 0, ended
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (4, 5, 0)
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "fail"} == REASONS
    assert "the first episode that broke: environment raised KeyError" in ended.out
    assert dora("audit", run.out).code == 0
    with sqlite3.connect(run.out / "samples.sqlite") as samples:
        rewards = [r for (r,) in samples.execute("select reward from samples where state = 'trained'")]
    assert len(rewards) == 8
    assert all(0 < reward <= 2.4 for reward in rewards)
