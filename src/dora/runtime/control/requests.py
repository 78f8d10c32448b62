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
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from dora.config.schema import Config
from dora.errors import ConfigError, ServiceError

Context = TypeVar("Context")
T = TypeVar("T")


class RunEnd(NamedTuple):
    """How a run has ended, for the clients of its service."""

    state: Literal["finished", "stopped", "failed"]
    sentence: str

    def to_error(self) -> ServiceError:
        """The response to all requests from then on."""
        return ServiceError(410, self.sentence, f"run_{self.state}")


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
        self._end: RunEnd | None = None

    def submit(self, function: Callable[[Context], T | None], wait_s: float = 0.0) -> Future[T | None]:
        """From any thread: have the driver call `function` between two events.

        While the function returns None, the driver calls it again after each event, for up to `wait_s`; then
        the result is None. The future raises what the function raises.
        """
        request = _Request(function, Future(), time.monotonic() + wait_s)
        self._new.put(request)
        if self._end is not None:
            self._reject_all(self._end)
        self._wake_driver()
        return request.answer

    def process(self) -> None:
        """From the driver only: complete the requests that have a result now."""
        while not self._new.empty():
            self._waiting.append(self._new.get_nowait())
        if self._waiting:
            self._waiting = [each for each in self._waiting if not each.try_to_answer(self.context)]

    def close(self, end: RunEnd) -> None:
        """From the driver only: the run has ended; every open request raises ServiceError."""
        self._end = end
        for request in self._waiting:
            self._new.put(request)
        self._reject_all(end)

    def _reject_all(self, end: RunEnd) -> None:
        with contextlib.suppress(Empty):
            while True:
                with contextlib.suppress(InvalidStateError):
                    self._new.get_nowait().answer.set_exception(end.to_error())


class ServiceAddress(NamedTuple):
    """Where the clients of a run connect."""

    url: str
    token_file: Path  # absolute; has the auth token of all requests

    @property
    def for_agents(self) -> str:
        """What an agent has to do to get an episode."""
        return (
            f"open a session with PUT {self.url}/v1/sessions/NAME, or give a client of OpenAI's API the base "
            f"URL {self.url}/s/NAME/v1; use a new NAME for each episode; the auth token (the API key) is in "
            f"{self.token_file}"
        )


class Gateway(Protocol):
    """Accepts requests for a run, as the web service does."""

    def open(self, requests: RequestQueue[Any], notice: Callable[[str], None]) -> ServiceAddress | None:
        """Begin to accept requests; `notice` prints a line for the user. None: no client can connect."""

    def end(self, end: RunEnd) -> None:
        """The run has ended: refuse requests from here on, and return once none is in progress."""

    def close(self, is_urgent: Callable[[], bool]) -> None:
        """Stop, also if `open` was never called.

        A gateway may first report for a while to its clients how the run has ended, until `is_urgent()`.
        """


def check_gateway(config: Config, gateway: Gateway | None) -> None:
    """Raises ConfigError for a run without a service that would wait for input through it."""
    if gateway is None and (key := config.external_source) is not None:
        raise ConfigError(f"{key}: the run needs its service; start it with dora serve, or remove the key")
