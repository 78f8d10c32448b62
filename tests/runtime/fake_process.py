"""Workers without processes: a test says what they say, and sees what they are told."""

from __future__ import annotations

import queue
from typing import Any

from dora.runtime.process.worker_process import Target


class Puppet:
    """A carrier whose other end is the test."""

    def __init__(self, name: str, body: Target, spec: Any) -> None:
        self.name, self.spec = name, spec
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_alive, self.node, self.awaits = True, "", ""
        self.pid = None
        self.how_it_ended = "was killed by SIGKILL"
        self._says: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(self, *messages: object) -> None:
        self._says.put(messages)

    def send(self, messages: Any, /) -> None:
        for message in messages:
            self.told.put(message)

    def recv(self) -> Any:
        said = self._says.get()
        if said is None:
            raise EOFError
        return said

    def kill(self) -> None:
        self.is_alive = False
        self._says.put(None)


class Stage:
    """Starts puppets, and knows them in order."""

    def __init__(self) -> None:
        self.puppets: list[Puppet] = []

    def start(self, name: str, body: Target, spec: Any) -> Puppet:
        self.puppets.append(Puppet(name, body, spec))
        return self.puppets[-1]
