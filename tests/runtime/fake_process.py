"""Workers without processes: a test sends their messages and reads what the driver sends them."""

from __future__ import annotations

import queue
from typing import Any

from dora.runtime.process.worker_process import Target


class FakeProcess:
    """A process handle whose other end is the test."""

    def __init__(self, name: str, target: Target, spec: Any) -> None:
        self.name, self.spec = name, spec
        self.received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_alive, self.node, self.waiting_for = True, "", ""
        self.pid = None
        self.exit_reason = "was killed by SIGKILL"
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def emit(self, *messages: object) -> None:
        """Send messages to the driver, as the worker would."""
        self._sent.put(messages)

    def send(self, messages: Any, /) -> None:
        for message in messages:
            self.received.put(message)

    def recv(self) -> Any:
        messages = self._sent.get()
        if messages is None:
            raise EOFError
        return messages

    def kill(self) -> None:
        self.is_alive = False
        self._sent.put(None)


class FakeLauncher:
    """Starts fake processes and keeps them in order."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []

    def start(self, name: str, target: Target, spec: Any) -> FakeProcess:
        self.processes.append(FakeProcess(name, target, spec))
        return self.processes[-1]
