"""The waits of the trainer for a group at its deadline: for whom, and how long.

Read from the orchestrator's state after each fact; nothing here decides.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

from dora.core.records import GroupId, RequestId
from dora.core.state import State

NUM_NAMED = 10  # the longest waits are named in the summary


class Stall(NamedTuple):
    """One wait; `requests` were unfinished when it began, without any it was for the rewards."""

    step: int
    group: GroupId
    requests: tuple[RequestId, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        names = [str(request) for request in self.requests]
        return {
            "step": self.step,
            "group": str(self.group),
            "requests": names,
            "seconds": round(self.seconds, 3),
        }


class Stalls:
    """All waits of a run that have ended."""

    def __init__(self) -> None:
        self.ended: list[Stall] = []
        self._current: Stall | None = None
        self._sum_s = 0.0

    def look(self, state: State) -> None:
        """Note whether a wait has begun or ended."""
        current = self._current
        if current is not None and state.stall_group != current.group:
            self.ended.append(current._replace(seconds=state.stall_s - self._sum_s))
            self._current = None
        self._sum_s = state.stall_s
        if self._current is None and state.stall_group is not None:
            requests = tuple(sorted(state.groups[state.stall_group].unfinished))
            self._current = Stall(state.next_step, state.stall_group, requests, 0.0)

    def longest(self) -> list[Stall]:
        """The longest waits, longest first."""
        return heapq.nlargest(NUM_NAMED, self.ended, key=lambda stall: stall.seconds)
