"""CPU time and memory of processes and their descendants, sampled once a second.

Memory is the sum of proportional set sizes, so that shared memory counts once.
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


class Usage(NamedTuple):
    """CPU time since the first sample, including exited processes, and the current memory."""

    at: float  # time.time()
    cpu_s: float
    num_bytes: int


class ResourceMonitor:
    """A context in which a thread samples the usage of processes."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._cpu_s: dict[psutil.Process, float] = {}
        self._samples = [self._measure()]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._thread.join()

    def cpu_s(self, began: float, ended: float) -> float:
        """CPU time between two times (time.time())."""
        return self._cpu_until(ended) - self._cpu_until(began)

    def peak_bytes(self, began: float, ended: float) -> int:
        """The maximum memory between two times, including the last sample before them."""
        first = max(0, bisect_left(self._samples, began, key=lambda usage: usage.at) - 1)
        return max(usage.num_bytes for usage in self._samples[first:] if usage.at <= ended)

    def _run(self) -> None:
        while not self._is_closed.wait(PERIOD_S):
            self._samples.append(self._measure())

    def _measure(self) -> Usage:
        at, num_bytes = time.time(), 0
        for process in self._running():
            try:
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
                num_bytes += process.memory_full_info().pss
            except psutil.Error:
                continue  # it has exited; its usage at the last sample counts
        return Usage(at, sum(self._cpu_s.values()), num_bytes)

    def _running(self) -> Iterator[psutil.Process]:
        for root in self._roots:
            try:
                yield from (root, *root.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def _cpu_until(self, at: float) -> float:
        """Interpolated between samples."""
        i = bisect_left(self._samples, at, key=lambda usage: usage.at)
        if i in (0, len(self._samples)):
            return self._samples[min(i, len(self._samples) - 1)].cpu_s
        before, after = self._samples[i - 1 : i + 1]
        share = (at - before.at) / (after.at - before.at)
        return before.cpu_s + share * (after.cpu_s - before.cpu_s)
