"""The storage of a run's stream: in a thread of the driver, or wherever else the run has it served.

It holds nothing that is not in `samples.sqlite`, too. So where it is a process that may die by itself,
another one begins empty, and is told all of it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dora.errors import RunError
from dora.stream import wire
from dora.stream.fields import Field
from dora.stream.server import Server
from dora.stream.stream import Stream

STOPPED_S = 86400.0  # the driver may be stopped for so long before it answers; its end is seen at once


class Declared(NamedTuple):
    """A consumer, as `Ledger.declare` has it."""

    name: str
    fields: Sequence[str]
    rules: dict[str, Any]


@dataclass(frozen=True)
class StorageSpec:
    """What a storage begins with. Other machines reach it at `host`; None: there are none."""

    folder: Path
    fields: Sequence[Field]
    consumers: Sequence[Declared]
    host: str | None = None

    def open(self) -> Server:
        """Its consumers are declared before anybody can come."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of one that has died
        self.folder.mkdir(exist_ok=True)
        stream = Stream(self.fields, self.folder)
        for name, fields, rules in self.consumers:
            stream.declare(name, fields, **rules)
        far = [] if self.host is None else [f"tcp://{self.host}:*"]
        return Server(stream, [wire.endpoint_of(self.folder), *far])


def far_of(server: Server) -> tuple[str, str] | None:
    """The endpoint and the token for other machines."""
    return (server.endpoints[1], server.token) if len(server.endpoints) > 1 else None


class Storage(Protocol):
    """Serves a stream. `far` is where other machines reach it; an answer takes at most `timeout_s`."""

    timeout_s: float
    has_successors: bool  # another one takes its place when it ends

    @property
    def far(self) -> tuple[str, str] | None: ...

    @property
    def is_there(self) -> bool:
        """Whether it can be asked; if not, another one will be there."""

    def lose(self, why: str) -> None:
        """It does not answer. Raises RunError if nobody takes its place."""

    def close(self) -> None:
        """End it."""


class InThread:
    """A thread of this process, which lives as long."""

    timeout_s = STOPPED_S
    has_successors = False
    is_there = True

    def __init__(self, spec: StorageSpec) -> None:
        self._server = spec.open()
        self.far = far_of(self._server)
        self._thread = self._server.start()

    def lose(self, why: str) -> None:
        raise RunError(why)

    def close(self) -> None:
        self._server.stop()
        self._thread.join()
