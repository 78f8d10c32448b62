"""Processes that reward functions and environments start end with their worker."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import summary, wait_until_gone
from tests.runtime.tiny import REWARD, write_task

FORKING = """
import os, signal, subprocess, sys, time
from pathlib import Path

FILES = Path(__file__).parent
started = []

def note(kind, pid):
    (FILES / f"{kind}-{pid}").touch()

def fork(kind, start):
    if pid := os.fork():
        note(kind, pid)
        return
    start()
    time.sleep(1000)
    os._exit(0)

def start_all():
    note("own", subprocess.Popen(["sleep", "1000"]).pid)
    note("session", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    fork("own", lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    fork("session", os.setsid)
    # the parent of these exits
    note("own", int(subprocess.check_output("sleep 1000 >&2 & echo $!", shell=True)))
    note("session", int(subprocess.check_output("exec setsid sleep 1000 >&2 & echo $!", shell=True)))
""" + REWARD.replace("    return", "    if not started:\n        started.append(start_all())\n    return", 1)
LONG = {"engine__min_step_time": "20ms", "run__steps": 1000, "reward__num_workers": 1}
NUM_STARTED = 6  # by each worker
REWARD_WORKER = 3  # after two engines and a trainer
IS_LINUX = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[Path]:
    """A task whose reward workers start processes."""
    yield write_task(tmp_path, reward=FORKING)
    for process in started(tmp_path):
        process.kill()


def started(folder: Path, kind: str = "*") -> list[psutil.Process]:
    """The processes that still run: "own" of the worker's session, or with a "session" of their own."""
    found = []
    for file in folder.glob(f"{kind}-*[0-9]"):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(file.name.rpartition("-")[2])))
    return found


@IS_LINUX
def test_processes_that_a_reward_function_started_end_with_the_run(
    start_run: StartRun, forking: Path
) -> None:
    run = start_run(forking, run__steps=3, reward__num_workers=2)
    run.wait_until(lambda: len(list(forking.parent.glob("*-*[0-9]"))) >= NUM_STARTED, "processes")
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended
    assert wait_until_gone(started(forking.parent)) == []


@IS_LINUX
def test_processes_that_a_reward_function_started_end_with_their_worker(
    start_run: StartRun, forking: Path
) -> None:
    run = start_run(forking, **LONG)
    run.wait_for_steps(1)
    killed = started(forking.parent)
    assert len(killed) == NUM_STARTED
    same_session = started(forking.parent, "own")
    run.workers()[REWARD_WORKER].kill()
    run.wait_until(lambda: len(list(forking.parent.glob("*-*[0-9]"))) == 2 * NUM_STARTED, "another worker")
    assert wait_until_gone(same_session) == []
    run.wait_for_steps(3)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end().code == 130
    assert wait_until_gone(started(forking.parent)) == []
    assert summary(run.out)["failed_groups"] == 0
    run.audit()


@IS_LINUX
def test_processes_that_a_reward_function_started_end_with_a_killed_run(
    start_run: StartRun, forking: Path
) -> None:
    run = start_run(forking, **LONG)
    run.wait_for_steps(1)
    os.kill(run.pid, signal.SIGKILL)
    assert wait_until_gone(started(forking.parent)) == []


@IS_LINUX
def test_a_suspended_worker_ends_with_a_killed_run(start_run: StartRun) -> None:
    """It cannot exit by itself, and neither can one that hangs in native code."""
    run = start_run(**LONG)
    run.wait_for_steps(1)
    processes = psutil.Process(run.pid).children(recursive=True)
    run.workers()[REWARD_WORKER].suspend()
    os.kill(run.pid, signal.SIGKILL)
    try:
        assert wait_until_gone(processes, 20.0) == []
    finally:
        for process in wait_until_gone(processes, 0.0):
            process.kill()
