"""Targets of worker processes that exit in unusual ways."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from dora.errors import RunError
from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox, allow_multiprocessing


def exit_during_send(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Send a message and part of a second one: a header that announces 100 bytes, and 10 bytes."""
    outbox.send("a whole message")
    connection = outbox._channel
    assert isinstance(connection, Connection)
    os.write(connection.fileno(), struct.pack("!i", 100) + bytes(10))
    os._exit(0)


def send_and_wait(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Send a message and wait for a reply that never comes."""
    outbox.send("a message")
    for _ in inbox.receive(None):
        pass


def send_and_compute(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Send a message, and be too busy to receive any."""
    outbox.send("a message")
    while True:
        pass


class NeverUnpickled:
    """As a message of another version of DORA-RL, which the driver cannot unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class NeverPickled:
    """A message that cannot be sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("cannot pickle it")


def send_unreadable(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Send a message, one that the driver cannot unpickle, and wait."""
    outbox.send("a message")
    outbox.send(NeverUnpickled())
    for _ in inbox.receive(None):
        pass


def start_processes(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Start a program, one with its own session, and a fork; send their process ids, and exit on a reply."""
    programs = [subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (False, True)]
    if (fork := os.fork()) == 0:
        time.sleep(1000.0)
    outbox.send([*(program.pid for program in programs), fork])
    next(inbox.receive(None))


def use_multiprocessing(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Send what a pool computes, and how a process ends that is terminated while it is busy."""
    allow_multiprocessing()
    with multiprocessing.Pool(2) as pool:
        absolute = pool.map(abs, [-1, 2])
    busy = multiprocessing.Process(target=threading.Event().wait)
    busy.start()
    busy.terminate()
    busy.join()
    outbox.send((absolute, busy.exitcode))


def lose_the_stream(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Raise what a worker raises whose driver, which serves the sample stream, was killed."""
    raise RunError("the connection to the stream is lost")


class CutChannel:
    """A channel whose driver has been killed, which this worker is the first to notice by a send."""

    def send(self, messages: Any, /) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def recv(self) -> Any:
        threading.Event().wait()
