"""What is asked of a run from outside its main loop, as the service's threads do.

A call is a function of the run's insides. The driver carries it out between two facts, while
nothing is half done, so that nothing of a run is ever touched by another thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from dora.config import Config
from dora.core.state import State
from dora.errors import ConfigError, ServiceError
from dora.runtime.local import LocalHands
from dora.runtime.meter import Meter
from dora.runtime.plan import Plan
from dora.serving import awaited

T = TypeVar("T")


@dataclass
class Inside:
    """All that a call may look at, or change through the hands."""

    plan: Plan
    hands: LocalHands
    state: Callable[[], State]
    meter: Meter
    is_training: bool = False  # the orchestrator is at work: its fleet may be changed

    def check_training(self) -> None:
        """Raises ServiceError while the run starts, evaluates, saves or ends."""
        if not self.is_training:
            raise ServiceError(409, "the run starts, evaluates or saves now; ask again while it trains")


@dataclass
class _Call:
    function: Callable[[Inside], Any]
    answer: Future[Any]
    deadline_s: float

    def is_answered(self, inside: Inside) -> bool:
        """Try it once more; it ends with what it returns or raises, or with None at its deadline."""
        if self.answer.cancelled():
            return True
        with contextlib.suppress(InvalidStateError):  # who asked has gone meanwhile
            try:
                found = self.function(inside)
            except Exception as error:  # theirs to deal with: the run goes on
                self.answer.set_exception(error)
                return True
            if found is not None or time.monotonic() >= self.deadline_s:
                self.answer.set_result(found)
        return self.answer.done()


def check_door(config: Config, door: Door | None) -> None:
    """Raises ConfigError for a run that would wait for ever for somebody outside."""
    if door is None and (key := awaited(config)) is not None:
        raise ConfigError(f"{key}: the run needs its service; start it with dora serve, or remove the key")


class Door(Protocol):
    """A way into a run from outside."""

    def open(self, calls: Calls, notice: Callable[[str], None]) -> None:
        """The run begins, and can be asked; `notice` gets sentences for the person watching."""

    def close(self) -> None:
        """The run is over, even if it was never open; returns once nobody is in it any more."""


class Calls:
    """Stands between the threads that ask and the driver."""

    def __init__(self, inside: Inside, door: Door | None = None) -> None:
        self.inside, self._door = inside, door
        self._new: SimpleQueue[_Call] = SimpleQueue()
        self._waiting: list[_Call] = []
        self._is_closed = False

    def ask(self, function: Callable[[Inside], T | None], wait_s: float = 0.0) -> Future[T | None]:
        """From any thread: have the driver call `function` between two facts.

        A function that returns None is called again, for up to `wait_s`, whenever something has
        happened; then None is the answer. What it raises is raised to who asked.
        """
        call = _Call(function, Future(), time.monotonic() + wait_s)
        self._new.put(call)
        if self._is_closed:
            self._end_all()
        self.inside.hands.nudge()
        return call.answer

    def look(self) -> None:
        """From the driver alone: carry out what was asked."""
        with contextlib.suppress(Empty):
            while True:
                self._waiting.append(self._new.get_nowait())
        if self._waiting:
            self._waiting = [call for call in self._waiting if not call.is_answered(self.inside)]

    def open(self, notice: Callable[[str], None]) -> None:
        """From the driver alone: let calls in through the door, if there is one."""
        if self._door is not None:
            self._door.open(self, notice)

    def close(self) -> None:
        """From the driver alone: the run is over, which whoever still waits is told."""
        self._is_closed = True
        for call in self._waiting:
            self._new.put(call)
        self._end_all()
        if self._door is not None:
            self._door.close()

    def _end_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                with contextlib.suppress(InvalidStateError):
                    self._new.get_nowait().answer.set_exception(ServiceError(503, "the run is over"))
