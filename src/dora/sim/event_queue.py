"""Virtual time: callbacks in the order in which they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class Deadlock(Exception):
    """The run is not done, and nothing is scheduled any more."""


class EventQueue(Generic[ResultT]):
    """Callbacks by virtual time (s); those of one time in the order in which they were scheduled.

    `now` is the time of the callback that runs, or ran last.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., ResultT], tuple[Any, ...]]] = []
        self._num_scheduled = 0

    def schedule(self, delay_s: float, callback: Callable[..., ResultT], *args: Any) -> None:
        """Call `callback(*args)` in `delay_s` seconds from now."""
        self.schedule_at(self.now + delay_s, callback, *args)

    def schedule_at(self, time_s: float, callback: Callable[..., ResultT], *args: Any) -> None:
        """Call `callback(*args)` at a time that has not passed."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (time_s, self._num_scheduled, callback, args))

    @property
    def next_s(self) -> float | None:
        """When the next callback is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> ResultT:
        """Advance `now` to the next callback and return its result. Raises Deadlock if there is none."""
        if not self._heap:
            raise Deadlock("nothing is scheduled, and the run is not done")
        self.now, _, callback, args = heapq.heappop(self._heap)
        return callback(*args)

    def clear(self) -> None:
        """Forget all callbacks."""
        self._heap.clear()
