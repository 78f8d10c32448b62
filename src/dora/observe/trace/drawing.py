"""Chrome's trace event format, as https://ui.perfetto.dev and chrome://tracing read it.

A process has tracks, and a track as many lanes as things on it overlap: slices of one lane follow each
other. Every event is handed on as soon as it is known whole, in no particular order of time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]
Emit = Callable[[Event], None]


class Lane(NamedTuple):
    """One line of the drawing: `number` within its track, `tid` in the file."""

    track: str
    number: int
    tid: int


@dataclass(eq=False, slots=True)
class Slice:
    """Something that has begun and goes on."""

    process: Process
    lane: Lane
    name: str
    begin_us: int
    args: dict[str, Any]


class Ids:
    """Numbers of processes, threads and arrows: none is used twice; 0 would be the idle process."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self) -> int:
        return next(self._next)


@dataclass
class _Track:
    rank: int
    num_lanes: int = 0
    free: list[Lane] = field(default_factory=list)  # a heap: the lowest is taken first


class Process:
    """One process of the drawing, with its tracks, counters and marks; times in seconds."""

    def __init__(self, emit: Emit, ids: Ids, name: str, rank: int) -> None:
        """`rank` orders the processes from top to bottom."""
        self._emit, self._ids = emit, ids
        self.pid = ids.take()
        self._tracks: dict[str, _Track] = {}
        self._open: dict[Slice, None] = {}  # in the order in which they began
        self._describe("process_name", self.pid, {"name": name})
        self._describe("process_sort_index", self.pid, {"sort_index": rank})

    def begin(self, track: str, name: str, t_s: float, **args: Any) -> Slice:
        """Something begins, on the lowest lane of `track` that is free."""
        found = Slice(self, self._take_lane(track), name, micros(t_s), args)
        self._open[found] = None
        return found

    def end(self, begun: Slice, t_s: float, **args: Any) -> None:
        """It is over; `args` are added to those it began with."""
        del self._open[begun]
        lane, length_us = begun.lane, micros(t_s) - begun.begin_us
        heapq.heappush(self._tracks[lane.track].free, lane)
        self._emit(
            {
                "ph": "X",
                "name": begun.name,
                "cat": lane.track,
                "pid": self.pid,
                "tid": lane.tid,
                "ts": begun.begin_us,
                "dur": length_us,
                "args": begun.args | args,
            }
        )

    def end_all(self, t_s: float, **args: Any) -> None:
        """Nothing goes on any more."""
        for begun in [*self._open]:
            self.end(begun, t_s, **args)

    def count(self, what: str, series: str, t_s: float, value: float) -> None:
        """A counter has this value from now on; Perfetto calls it by both its names."""
        self._emit({"ph": "C", "name": what, "pid": self.pid, "ts": micros(t_s), "args": {series: value}})

    def mark(self, name: str, t_s: float, **args: Any) -> None:
        """Something happens that takes no time."""
        event = {"ph": "i", "s": "p", "name": name, "cat": "mark", "pid": self.pid, "ts": micros(t_s)}
        self._emit(event | {"tid": self._mark_lane(), "args": args})

    def _mark_lane(self) -> int:
        """Marks share one lane, the first of a track of their own."""
        lane = self._take_lane("marks")
        heapq.heappush(self._tracks["marks"].free, lane)
        return lane.tid

    def _take_lane(self, track: str) -> Lane:
        own = self._tracks.setdefault(track, _Track(rank=len(self._tracks)))
        if own.free:
            return heapq.heappop(own.free)
        lane = Lane(track, own.num_lanes, self._ids.take())
        own.num_lanes += 1
        self._describe("thread_name", lane.tid, {"name": f"{track} {lane.number}" if lane.number else track})
        self._describe("thread_sort_index", lane.tid, {"sort_index": 1000 * own.rank + lane.number})
        return lane

    def _describe(self, what: str, tid: int, args: dict[str, Any]) -> None:
        self._emit({"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args})


def arrow(emit: Emit, ids: Ids, name: str, source: Slice, source_s: float, target: Slice) -> None:
    """An arrow from `source`, as it was at `source_s`, to where `target` begins."""
    shared = {"name": name, "cat": name, "id": ids.take()}
    begin_us = max(micros(source_s), source.begin_us)
    emit({"ph": "s", "pid": source.process.pid, "tid": source.lane.tid, "ts": begin_us, **shared})
    end = {"ph": "f", "bp": "e", "pid": target.process.pid, "tid": target.lane.tid, "ts": target.begin_us}
    emit(end | shared)


def micros(t_s: float) -> int:
    """Whole microseconds, so that a slice ends exactly where the next one begins."""
    return round(1e6 * t_s)
