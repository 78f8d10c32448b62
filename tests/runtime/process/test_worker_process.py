"""What the driver receives when a worker exits at any instant, and when lost workers are restarted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
from tests.runtime.process.crashing_worker import exit_during_send, send_and_wait
from tests.runtime.running import wait_until_gone

from dora.runtime.process.messages import WorkerExited
from dora.runtime.process.worker_process import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    RESET_FACTOR,
    STABLE_UPTIME_S,
    ForkedProcess,
    RestartPolicy,
    Worker,
    WorkerMessages,
    cpu_s,
)


def test_a_worker_that_exits_during_a_send_is_lost_after_its_last_whole_message() -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", exit_during_send, None, messages)
    assert messages.get(timeout=30) == (worker, "a whole message")
    assert messages.get(timeout=30) == (worker, WorkerExited())
    assert worker.exit_reason == "a worker exited with code 0"
    worker.kill()


def test_a_worker_whose_channel_is_cut_is_lost_and_exits() -> None:
    messages = WorkerMessages()
    worker = Worker("a worker", send_and_wait, None, messages)
    assert messages.get(timeout=30) == (worker, "a message")
    assert isinstance(worker._process, ForkedProcess)
    process = psutil.Process(worker.pid)
    with socket.socket(fileno=os.dup(worker._process._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    assert messages.get(timeout=30) == (worker, WorkerExited())
    assert wait_until_gone([process], timeout_s=5.0) == []
    worker.kill()


def test_the_delay_doubles_with_each_restart_until_none_are_left() -> None:
    restarts = RestartPolicy(max_restarts=3)
    delays = [restarts.on_lost(engine, slot=0, uptime_s=1.0, now_s=100.0) for engine in range(4)]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, None]
    assert restarts.on_lost(7, slot=7, uptime_s=0.0, now_s=100.0) == FIRST_DELAY_S, (
        "each slot has its own restarts"
    )
    assert restarts.pop_due(100.0 + FIRST_DELAY_S) == [0, 7]
    assert restarts.pop_due(100.0 + 4 * FIRST_DELAY_S) == [1, 2]
    assert restarts.pop_due(1e9) == []


def test_a_stable_worker_gives_its_slot_all_restarts_back() -> None:
    restarts = RestartPolicy(max_restarts=1)
    assert restarts.on_lost(0, 0, uptime_s=1.0, now_s=0.0) == FIRST_DELAY_S
    assert restarts.on_lost(1, 0, uptime_s=STABLE_UPTIME_S, now_s=0.0) == FIRST_DELAY_S
    assert restarts.on_lost(2, 0, uptime_s=1.0, now_s=0.0) is None


def test_an_uptime_much_longer_than_the_delay_resets_the_delay() -> None:
    restarts = RestartPolicy(max_restarts=9)
    uptimes = [(0, 1.0), (1, 1.0), (2, 1.0), (3, RESET_FACTOR * 4 * FIRST_DELAY_S), (4, 0.0)]
    delays = [restarts.on_lost(engine, 0, uptime_s, now_s=0.0) for engine, uptime_s in uptimes]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]


def test_progress_resets_the_delay() -> None:
    restarts = RestartPolicy(max_restarts=9)
    delays = [restarts.on_lost(engine, 0, 0.5, 0.0, made_progress=engine == 2) for engine in range(4)]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]


def test_no_delay_exceeds_the_maximum() -> None:
    restarts = RestartPolicy(max_restarts=100)
    assert max(restarts.on_lost(engine, 0, 1.0, 0.0) or 0.0 for engine in range(100)) == MAX_DELAY_S


def test_a_policy_without_restarts_schedules_none() -> None:
    assert RestartPolicy(max_restarts=0).on_lost(0, 0, STABLE_UPTIME_S, 0.0) is None


def test_cpu_time_includes_processes_that_have_exited() -> None:
    before_s = cpu_s()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert cpu_s() - before_s > 0.45  # the system counts in ticks of 10 ms
