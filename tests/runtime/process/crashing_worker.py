"""A worker that dies in the middle of a word: half a message, then nothing."""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection

from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox


def die_while_speaking(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Announce 100 bytes as the pipe does, send 10, and go."""
    outbox.send("a whole message")
    line = outbox._line
    assert isinstance(line, Connection)
    os.write(line.fileno(), struct.pack("!i", 100) + bytes(10))
    os._exit(0)


def speak(outbox: WorkerOutbox, inbox: WorkerInbox, spec: object) -> None:
    """Say something, and wait for an answer that never comes."""
    outbox.send("a message")
    for _ in inbox.receive(None):
        pass
