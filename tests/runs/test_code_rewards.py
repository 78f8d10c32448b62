"""Code rewards in a run: responses are run against tests, in processes that end with the run."""

from __future__ import annotations

from pathlib import Path

import psutil
from tests.runs.conftest import StartRun
from tests.runtime.running import query, wait_until_gone
from tests.runtime.tiny import write_task


def test_responses_are_run_against_the_tests_of_their_row(start_run: StartRun, tmp_path: Path) -> None:
    """Hardly any response is a program; one that is not fails its tests but not its group."""
    tests = [{"input": "", "output": ""}, "assert len(answer) == 1"]
    config = write_task(tmp_path, prompts=[{"prompt": f"{k}:", "tests": tests} for k in range(10, 17)])
    run = start_run(config, reward__function="dora.rewards.code:PassedTests", reward__num_workers=2)
    run.wait_for_steps(1)
    servers = psutil.Process(run.pid).children()
    fork_servers = [
        fork_server for server in servers for worker in server.children() for fork_server in worker.children()
    ]
    assert len(fork_servers) == 2  # one per reward worker; no other worker starts processes
    run.succeed()
    assert wait_until_gone(fork_servers) == []
    rewards = {reward for (reward,) in query(run.out, "select reward from samples")}
    assert rewards <= {0.0, 0.5, 1.0}
