"""Requests from outside the main loop, such as those of the service's threads.

A request is a function of a run context. The driver calls it between two events, so no other thread ever
touches the state of a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from dora.config.schema import Config
from dora.errors import ConfigError, ServiceError

Context = TypeVar("Context")
T = TypeVar("T")


@dataclass
class _Request(Generic[Context]):
    function: Callable[[Context], Any]
    answer: Future[Any]
    deadline_s: float

    def try_to_answer(self, context: Context) -> bool:
        """Call the function; True once the request has a result, an error, or None at its deadline."""
        if self.answer.cancelled():
            return True
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            try:
                result = self.function(context)
            except Exception as error:  # the requester handles it; the run continues
                self.answer.set_exception(error)
                return True
            if result is not None or time.monotonic() >= self.deadline_s:
                self.answer.set_result(result)
        return self.answer.done()


class RequestQueue(Generic[Context]):
    """Passes requests of other threads to the driver."""

    def __init__(self, context: Context, wake_driver: Callable[[], None]) -> None:
        """`wake_driver` ends the driver's wait for messages, from any thread."""
        self.context, self._wake_driver = context, wake_driver
        self._new: SimpleQueue[_Request[Context]] = SimpleQueue()
        self._waiting: list[_Request[Context]] = []
        self._is_closed = False

    def submit(self, function: Callable[[Context], T | None], wait_s: float = 0.0) -> Future[T | None]:
        """From any thread: have the driver call `function` between two events.

        While the function returns None, the driver calls it again after each event, for up to `wait_s`; then
        the result is None. The future raises what the function raises.
        """
        request = _Request(function, Future(), time.monotonic() + wait_s)
        self._new.put(request)
        if self._is_closed:
            self._reject_all()
        self._wake_driver()
        return request.answer

    def process(self) -> None:
        """From the driver only: complete the requests that have a result now."""
        with contextlib.suppress(Empty):
            while True:
                self._waiting.append(self._new.get_nowait())
        if self._waiting:
            self._waiting = [each for each in self._waiting if not each.try_to_answer(self.context)]

    def close(self) -> None:
        """From the driver only: the run is over; every open request raises ServiceError."""
        self._is_closed = True
        for request in self._waiting:
            self._new.put(request)
        self._reject_all()

    def _reject_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                with contextlib.suppress(InvalidStateError):
                    self._new.get_nowait().answer.set_exception(ServiceError(503, "the run is over"))


class Gateway(Protocol):
    """Accepts requests for a run, as the web service does."""

    def open(self, requests: RequestQueue[Any], notice: Callable[[str], None]) -> None:
        """Begin to accept requests; `notice` prints a line for the user."""

    def close(self) -> None:
        """Stop accepting requests, also if `open` was never called; return once no request is handled."""


def check_gateway(config: Config, gateway: Gateway | None) -> None:
    """Raises ConfigError for a run without a service that would wait for input through it."""
    if gateway is None and (key := config.external_source) is not None:
        raise ConfigError(f"{key}: the run needs its service; start it with dora serve, or remove the key")
