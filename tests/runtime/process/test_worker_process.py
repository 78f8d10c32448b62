"""What the driver receives when a worker exits at any instant."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
from tests.runtime.process.crashing_worker import (
    CutChannel,
    NeverPickled,
    exit_during_send,
    lose_the_stream,
    send_and_compute,
    send_and_wait,
    send_unreadable,
    start_processes,
    use_multiprocessing,
)
from tests.runtime.running import wait_until_gone

from dora.runtime.process import worker_process
from dora.runtime.process.messages import WorkerExited
from dora.runtime.process.worker_process import (
    ForkedProcess,
    Target,
    Worker,
    WorkerMessages,
    cpu_s,
    run_target,
)


def test_a_worker_that_exits_during_a_send_is_lost_after_its_last_whole_message() -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", exit_during_send, None, messages)
    assert messages.get(timeout=30) == (worker, "a whole message")
    assert messages.get(timeout=30) == (worker, WorkerExited())
    assert worker.exit_reason == "a worker exited with code 0"
    worker.kill()


def test_the_exit_code_of_a_worker_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server, which reports it, may have no CPU time for a while."""
    messages = WorkerMessages()
    worker = Worker("a worker", send_and_wait, None, messages)
    assert messages.get(timeout=30) == (worker, "a message")
    process = psutil.Process(worker.process.pid)
    fork_server = process.parent()
    assert fork_server is not None
    fork_server.suspend()
    try:
        process.kill()
        assert messages.get(timeout=30) == (worker, WorkerExited())
        monkeypatch.setattr(worker_process, "EXIT_CODE_S", 0.01)
        resume = threading.Timer(0.5, fork_server.resume)
        resume.start()
        assert worker.exit_reason == "a worker was killed by SIGKILL"
        resume.join()
    finally:
        fork_server.resume()
    worker.kill()


@pytest.mark.parametrize("target", [send_and_wait, send_and_compute])
def test_a_worker_whose_channel_is_cut_is_lost_and_exits(target: Target) -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", target, None, messages)
    assert messages.get(timeout=30) == (worker, "a message")
    assert isinstance(worker.process, ForkedProcess)
    process = psutil.Process(worker.process.pid)
    with socket.socket(fileno=os.dup(worker.process._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    assert messages.get(timeout=30) == (worker, WorkerExited())
    assert wait_until_gone([process]) == []
    worker.kill()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            send_unreadable,
            "a worker failed: ValueError: invalid literal for int() with base 10: 'not a number'",
        ),
        (send_and_wait, "a worker failed: TypeError: cannot pickle it"),
    ],
)
def test_a_worker_is_lost_if_a_message_cannot_be_unpickled_or_sent(target: Target, reason: str) -> None:
    """The threads of its channel end then: without a loss it would wait, and send heartbeats, forever."""
    messages = WorkerMessages()
    worker = Worker("a worker", target, None, messages)
    assert messages.get(timeout=30) == (worker, "a message")
    worker.send(NeverPickled() if target is send_and_wait else "a reply")
    assert messages.get(timeout=30) == (worker, WorkerExited())
    assert worker.exit_reason == reason
    worker.kill()


def test_a_worker_that_fails_because_the_driver_was_killed_prints_no_traceback() -> None:
    """It would be the last thing in the log of a job whose driver ran out of memory, and hide the cause."""
    run_target(CutChannel(), lose_the_stream, None)  # its exception would be printed by the process


def test_cpu_time_includes_processes_that_have_exited() -> None:
    before_s = cpu_s()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert cpu_s() - before_s > 0.45  # the system counts in ticks of 10 ms


_OTHER_USER = """
import os, subprocess, psutil
from dora.runtime.process.descendants import kill_descendants

quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
foreign = subprocess.Popen(["sleep", "1000"], **quiet)
os.setuid(65534)
own = subprocess.Popen(["sleep", "1000"], **quiet)
print(foreign.pid, flush=True)
kill_descendants(psutil.Process())
print(own.wait())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a program of another user")
def test_a_program_of_another_user_does_not_keep_the_others_alive() -> None:
    """As one that a reward function has started by sudo."""
    ended = subprocess.run([sys.executable, "-c", _OTHER_USER], capture_output=True, text=True, timeout=60)
    foreign, *exit_codes = ended.stdout.split()
    psutil.Process(int(foreign)).kill()
    assert exit_codes == ["-9"], ended.stderr


@pytest.mark.parametrize("how", ["killed", "by itself"])
def test_processes_that_a_worker_has_started_end_with_it(how: str) -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", start_processes, None, messages)
    _, pids = messages.get(timeout=30)
    processes = [psutil.Process(pid) for pid in pids]
    if how == "killed":
        worker.kill()
    else:
        worker.send("exit")
    assert messages.get(timeout=30) == (worker, WorkerExited())
    worker.kill()
    assert wait_until_gone(processes) == []


def test_a_worker_may_use_multiprocessing() -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", use_multiprocessing, None, messages)
    assert messages.get(timeout=30) == (worker, ([1, 2], -signal.SIGTERM))
    worker.kill()
