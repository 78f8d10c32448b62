"""CPU time and memory of processes and of all that they start, looked at once a second.

Memory is the sum of proportional set sizes: what processes share counts once.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import psutil

PERIOD_S = 1.0


class Look(NamedTuple):
    """What a look found: CPU time since the first one, of the dead too, and memory now."""

    at: float  # time.time()
    cpu_s: float
    num_bytes: int


class Watch:
    """Looks until it is left."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._cpu_s: dict[psutil.Process, float] = {}
        self._looks = [self._look()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def cpu_s(self, began: float, ended: float) -> float:
        """Spent between two times."""
        return self._cpu_until(ended) - self._cpu_until(began)

    def peak_bytes(self, began: float, ended: float) -> int:
        """The most that any look between two times found, or the one before them."""
        first = max(0, bisect_left(self._looks, began, key=lambda look: look.at) - 1)
        return max(look.num_bytes for look in self._looks[first:] if look.at <= ended)

    def _watch(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._looks.append(self._look())

    def _look(self) -> Look:
        at, num_bytes = time.time(), 0
        for process in self._living():
            try:
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
                num_bytes += process.memory_full_info().pss
            except psutil.Error:
                continue  # it has ended; what it had used by the last look counts
        return Look(at, sum(self._cpu_s.values()), num_bytes)

    def _living(self) -> Iterator[psutil.Process]:
        for root in self._roots:
            try:
                yield from (root, *root.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def _cpu_until(self, at: float) -> float:
        """In between looks, as if it were spent evenly."""
        i = bisect_left(self._looks, at, key=lambda look: look.at)
        if i in (0, len(self._looks)):
            return self._looks[min(i, len(self._looks) - 1)].cpu_s
        before, after = self._looks[i - 1 : i + 1]
        share = (at - before.at) / (after.at - before.at)
        return before.cpu_s + share * (after.cpu_s - before.cpu_s)
