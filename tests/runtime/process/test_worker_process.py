"""The two ends of a pipe: what arrives when a worker dies, at whatever instant."""

from __future__ import annotations

import os
import socket

import psutil
from tests.runtime.process.crashing_worker import die_while_speaking, speak
from tests.runtime.running import wait_until_gone

from dora.runtime.process.messages import WorkerExited
from dora.runtime.process.worker_process import ForkedProcess, Worker, WorkerMessages


def test_a_worker_that_dies_in_the_middle_of_a_message_is_gone_after_its_last_whole_one() -> None:
    told = WorkerMessages()
    worker = Worker("a worker", die_while_speaking, None, told)
    assert told.get(timeout=30) == (worker, "a whole message")
    assert told.get(timeout=30) == (worker, WorkerExited())
    assert worker.exit_reason == "a worker ended with exit code 0"
    worker.kill()


def test_a_worker_whose_line_is_cut_is_gone_and_ends_by_itself() -> None:
    told = WorkerMessages()
    worker = Worker("a worker", speak, None, told)
    assert told.get(timeout=30) == (worker, "a message")
    assert isinstance(worker._carrier, ForkedProcess)
    process = psutil.Process(worker.pid)
    with socket.socket(fileno=os.dup(worker._carrier._connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    assert told.get(timeout=30) == (worker, WorkerExited())
    assert wait_until_gone([process], timeout_s=5.0) == []
    worker.kill()
