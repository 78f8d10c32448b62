"""`dora status` of a run that trains, is killed or finishes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora


def status_of(run: Run) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(dora("status", run.out, "--json").out)
    return status


def test_status_shows_the_processes_of_a_run_and_that_it_was_killed(start_run: StartRun) -> None:
    run = start_run(engine__min_step_time="20ms", run__steps=1000)
    run.wait_for_steps(1)
    run.wait_until(lambda: status_of(run)["steps"] > 0, "the status shows the first step")
    status = status_of(run)
    assert (status["verdict"], status["phase"], status["pid"]) == ("running", "training", run.pid)
    names = [process["name"] for process in status["processes"]]
    assert names == ["engine 0", "engine 1", "trainer", "reward worker"]
    assert {process["pid"] for process in status["processes"]} == {worker.pid for worker in run.workers()}
    assert all(process["last_message_s"] < process["timeout_s"] for process in status["processes"])
    assert status["waits"]
    printed = dora("status", run.out)
    assert printed.code == 0, printed
    assert "running: training, " in printed.out
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    killed = dora("status", run.out)
    assert killed.code == 1
    assert f"crashed: driver process {run.pid} has exited; training, " in killed.out
    assert f"dora train --resume {run.out} resumes it" in killed.out


def test_status_of_a_finished_run_and_of_a_folder_without_a_run(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(run__steps=2)
    run.succeed()
    finished = dora("status", run.out)
    assert (finished.code, finished.out) == (0, f"{run.out}: finished, 2 steps trained\n"), finished
    refused = dora("status", tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "is not the folder of a run" in refused.err
