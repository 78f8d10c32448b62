"""A run of episodes whose environments raise, hang or exit: their groups fail if a second attempt fails."""

from __future__ import annotations

from pathlib import Path

from tests.runs.conftest import StartRun
from tests.runtime.running import journal, query, summary
from tests.runtime.tiny import write_task

FAULTY = """
import asyncio, os, time
from dora.envs.base import Environment, Fault, Step

MARK = os.path.join(os.path.dirname(__file__), "raised")

class Faulty(Environment):
    async def reset(self, row, seed):
        self.behaviour, self.num_steps = row["behaviour"], 0
        return row["prompt"]

    async def step(self, action):
        self.num_steps += 1
        match self.behaviour:
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
            case "raises once" if not os.path.exists(MARK):
                open(MARK, "w").close()
                raise KeyError("not yet")
        return Step("77", len(set(action)) / 10, self.num_steps == 2)
"""
BEHAVIOURS = ("raises", "gives up", "is slow", "hangs", "exits", "raises once", "good", "good", "good")
REASONS = {
    "environment raised KeyError",
    "no license left",
    "environment took longer than env.timeout_s = 1",
    "environments 0: an environment in this process hangs, env.timeout_s = 1",
    "environment's process ended: environments 0 exited with code 7",
}


def write_faulty(folder: Path) -> Path:
    """A task whose rows choose what their environments do."""
    prompts = [
        {"prompt": f"{number}:", "behaviour": behaviour} for number, behaviour in enumerate(BEHAVIOURS)
    ]
    config = write_task(folder, prompts=prompts)
    (folder / "faulty.py").write_text(FAULTY)
    reward = '[reward]\nfunction = "task.py:reward"\n'
    env = '[env]\nenvironment = "faulty.py:Faulty"\ntimeout_s = 1.0\n[reward]\nmax_failed_fraction = 1.0\n'
    config.write_text(config.read_text().replace(reward, env))
    return config


def test_failed_episodes_fail_their_groups_and_the_others_are_trained(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_faulty(tmp_path)
    one_at_a_time = {"engine__num_engines": 1, "engine__max_num_seqs": 2, "data__shuffle": "false"}
    run = start_run(
        config, run__steps=2, orchestrator__max_staleness=0, trainer__batch_size=2, **one_at_a_time
    )
    ended = run.succeed()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"], s["pending_groups"]) == (4, 5, 0)
    assert s["retried_requests"] >= 6
    assert {line["reason"] for line in journal(run.out) if line["kind"] == "fail"} == REASONS
    assert "first failed episode: environment raised KeyError" in ended.out
    run.audit()
    rewards = [r for (r,) in query(run.out, "select reward from samples where state = 'trained'")]
    assert len(rewards) == 8
    assert all(0 < reward <= 2.4 for reward in rewards)
