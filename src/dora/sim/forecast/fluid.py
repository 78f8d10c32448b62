"""A rollout engine whose decoding is a clock: its rows advance together, one token a step.

Nothing happens between two events but that the clock runs, at the pace that the engine's costs give for the
rows and contexts it has. So an answer of a thousand tokens costs two events, not a thousand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from typing import Protocol

from dora.core.records import RequestId
from dora.sim.forecast.costs import Pace, Terms

NEVER = float("inf")
NEARLY = 1e-4  # of a token, by which rounding may miss an end


class Cost(Protocol):
    """What an engine takes: by roofline (`EngineCost`), or as measured."""

    @property
    def expert(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def kv_bytes(self) -> float: ...
    def terms(self, num_rows: int, rank_rows: int) -> Terms: ...
    def pace(self, num_rows: int, rank_rows: int, rank_context: float, num_versions: int = 1) -> Pace: ...
    def prefill_s(self, tokens: float) -> float: ...
    def move_s(self, tokens: float) -> float: ...
    def swap_s(self, tokens: float) -> float: ...
    def load_s(self) -> float: ...
    def load_stop_s(self) -> float: ...


class Row:
    """One request on an engine."""

    __slots__ = (
        "began_s", "done", "end", "length", "prompt", "rank", "request", "since", "stop", "version",
    )  # fmt: skip

    def __init__(self, request: RequestId, version: int, prompt: int, length: int, stop: int) -> None:
        self.request, self.version = request, version
        self.prompt, self.length = prompt, length
        self.stop = stop  # tokens at which it pauses: the end of its answer, or of a turn
        self.began_s = 0.0
        self.done = 0.0  # tokens, when the clock was `since`
        self.since = 0.0
        self.rank = 0
        self.end: float | None = None  # the clock at its stop, while it is decoded

    @property
    def is_active(self) -> bool:
        return self.end is not None


class FluidEngine:
    """Rows, a clock in decode steps, and seconds in which the engine does something else first."""

    def __init__(self, number: int, cost: Cost, rows: int, is_colocated: bool = False) -> None:
        self.id, self.cost, self.rows, self.is_colocated = number, cost, rows, is_colocated
        self.running: dict[RequestId, Row] = {}
        self.is_paused = is_colocated
        self.now = 0.0
        self.free_s = 0.0  # it decodes nothing before
        self.slowness = 1.0  # times as long a step takes, for others are at work on its cores
        self.clock = 0.0
        self.num_active = 0
        self.rushing: frozenset[RequestId] = frozenset()
        self.versions: Counter[int] = Counter()  # of active rows
        self.swapped: list[Row] = []  # rows without room for their KV, the last to leave first to return
        self.row_s = 0.0  # row seconds decoded
        self.decoded_s = 0.0
        self.stalled_s = 0.0  # of them, the share by which the mean rank has less KV than the fullest
        self.stop_s = NEVER  # when a row comes to a stop, as things are
        self.look_s = NEVER  # when that is looked at next
        self._kv_tokens = cost.kv_tokens
        self._rank_rows = [0] * cost.expert
        self._rank_context = [0.0] * cost.expert
        self._ends = array("d")  # of the rows it decodes, negative, so that the next one is last
        self._enders: list[Row] = []  # these rows
        self._pace: Pace | None = None

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        began = max(self.now, self.free_s)
        self.now = now
        if now <= began or not self.num_active or self.is_paused:
            return
        took = now - began
        steps = self.pace().steps(took)
        self.clock += steps
        self.row_s += took * self.num_active
        self.decoded_s += took
        if len(self._rank_rows) > 1 and (fullest := max(self._rank_context)) > 0:
            self.stalled_s += took * (1 - sum(self._rank_context) / len(self._rank_context) / fullest)
        for rank, num in enumerate(self._rank_rows):
            self._rank_context[rank] += num * steps
        self._pace = None

    def pace(self) -> Pace:
        """Of the rows it decodes now."""
        if self._pace is None:
            terms = self.cost.terms(self.num_active, max(self._rank_rows))
            pace = terms.pace(max(self._rank_context), len(self.versions) or 1)
            self._pace = pace if self.slowness == 1.0 else Pace(*(self.slowness * part for part in pace))
        return self._pace

    def slow(self, slowness: float) -> None:
        """Steps take so many times as long from now on."""
        self.slowness, self._pace = slowness, None

    def next_s(self) -> float:
        """When a row comes to its stop, or the KV is full; NEVER while it decodes nothing."""
        if self.is_paused or not self.num_active:
            return NEVER
        left, room = -self._ends[-1] - self.clock, self._kv_tokens - sum(self._rank_context)
        is_full = self.num_active > 1 and room < self.num_active * left
        steps = max(0.0, room / self.num_active if is_full else left)
        return max(self.now, self.free_s) + self.pace().seconds(steps)

    def stopped(self) -> list[Row]:
        """Rows that have come to their stop; they are decoded no more."""
        found: list[Row] = []
        while self._ends and -self._ends[-1] <= self.clock + NEARLY:
            row = self._enders[-1]
            self.halt(row)
            row.done = float(row.stop)
            found.append(row)
        return found

    def spill(self) -> float:
        """Swap out the youngest rows while KV lacks, and in again where there is room; seconds it takes."""
        took = 0.0
        room = self._kv_tokens - sum(self._rank_context)
        while room < self.num_active and self.num_active > 1:
            row = next(r for r in reversed(self.running.values()) if r.is_active)
            room += row.prompt + self.tokens(row)
            self.halt(row)
            self.swapped.append(row)
            took += self.cost.swap_s(row.prompt + row.done)
        while self.swapped and not self.rushing:
            row = self.swapped[-1]
            need = row.prompt + row.done
            if self.num_active and room - need < 0.05 * self._kv_tokens:
                break
            self.swapped.pop()
            room -= need
            self.go_on(row)
            took += self.cost.swap_s(need)
        return took

    def take(self, row: Row) -> None:
        """A row begins here, or goes on."""
        self.running[row.request] = row
        row.rank = min(range(len(self._rank_rows)), key=self._rank_rows.__getitem__)
        if not self.rushing or row.request in self.rushing:
            self.go_on(row)

    def give(self, request: RequestId) -> Row:
        """A row ends here."""
        row = self.running.pop(request)
        self.halt(row)
        if row in self.swapped:
            self.swapped.remove(row)
        return row

    def go_on(self, row: Row) -> None:
        """Decode it from now on."""
        if row.is_active or row.done >= row.stop:
            return
        row.since = self.clock
        self.num_active += 1
        self.versions[row.version] += 1
        self._rank_rows[row.rank] += 1
        self._rank_context[row.rank] += row.prompt + row.done
        row.end = row.since + row.stop - row.done
        place = bisect_left(self._ends, -row.end)  # of those that end with it, the first to begin is last
        self._ends.insert(place, -row.end)
        self._enders.insert(place, row)
        self._pace = None

    def halt(self, row: Row) -> None:
        """Decode it no more for now."""
        if row.end is None:
            return
        row.done = self.tokens(row)
        place = self._enders.index(row, bisect_left(self._ends, -row.end))
        del self._ends[place], self._enders[place]
        row.end = None
        self.num_active -= 1
        self.versions[row.version] -= 1
        if not self.versions[row.version]:
            del self.versions[row.version]
        self._rank_rows[row.rank] -= 1
        self._rank_context[row.rank] -= row.prompt + row.done
        self._pace = None

    def rush(self, requests: tuple[RequestId, ...]) -> None:
        """Decode only these; none: all."""
        self.rushing = frozenset(requests)
        for request, row in self.running.items():
            if requests and request not in self.rushing:
                self.halt(row)
            elif row not in self.swapped:
                self.go_on(row)

    def renew(self, version: int) -> float:
        """All rows go on with a newer version; tokens of their contexts."""
        for row in self.running.values():
            row.version = max(row.version, version)
        self.versions = Counter({version: self.num_active} if self.num_active else {})
        self._pace = None
        return sum(self._rank_context)

    def busy(self, seconds: float) -> None:
        """Do something else for so long before decoding goes on."""
        self.free_s = max(self.free_s, self.now) + seconds

    def tokens(self, row: Row) -> float:
        """Of its answer, so far."""
        return row.done if row.end is None else row.done + self.clock - row.since

    @property
    def kv_share(self) -> float:
        return sum(self._rank_context) / self._kv_tokens
