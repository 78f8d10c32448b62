"""How busy the rows of engines are: row-seconds that decoded, over row-seconds that there were.

Every engine tells both by its own clock and at the same instant, so a share is of one span of time, however
late or rarely it is told, and never above 1. A row counts once, whichever versions its engine holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Use(NamedTuple):
    """What an engine tells with its answers and once a second: both only grow."""

    busy_row_s: float  # rows that decoded x time, summed over steps
    alive_s: float  # since it was ready

    def since(self, before: Use) -> Use:
        """What came after `before`."""
        return Use(self.busy_row_s - before.busy_row_s, self.alive_s - before.alive_s)


Uses = Mapping[int, Use]  # engine -> as last told
NEW = Use(0.0, 0.0)


class Occupancy:
    """Of the engines of one life of a run; those that have left count for as long as they told."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._began: dict[int, Use] = {}  # at the first admission, or when an engine joined later
        self._ended: dict[int, Use] = {}  # at the last finish
        self._step: dict[int, Use] = {}  # when the step before ended
        self._last = 0.0

    def join(self, engine: int, rows: int, told: Uses) -> None:
        """An engine with so many rows may be given requests from now on."""
        self._rows[engine] = rows
        self._began[engine] = self._step[engine] = told.get(engine, NEW)

    def begin(self, told: Uses) -> None:
        """The first group is admitted: before it there was nothing to decode."""
        for engine in self._rows:
            self._began[engine] = self._step[engine] = told.get(engine, NEW)

    def finish(self, told: Uses) -> None:
        """An answer is finished: the run is measured up to here."""
        self._ended = dict(told)

    def end_step(self, told: Uses) -> float:
        """Share since the step before, over all rows; that of before where nobody has told anything since."""
        self._last = self._share(self._between(self._step, told), self._last)
        self._step |= {engine: told[engine] for engine in self._rows if engine in told}
        return self._last

    def of_all(self) -> float:
        """Share from the first admission to the last finish, over all rows; 0.0 before any."""
        return self._share(self._between(self._began, self._ended), 0.0)

    def of_each(self) -> dict[int, float]:
        """The same of each engine that told anything, by engine."""
        uses = self._between(self._began, self._ended)
        return {engine: self._share({engine: use}, 0.0) for engine, use in sorted(uses.items())}

    def _between(self, before: Uses, after: Uses) -> dict[int, Use]:
        uses = {engine: after[engine].since(before[engine]) for engine in self._rows if engine in after}
        return {engine: use for engine, use in uses.items() if use.alive_s > 0}

    def _share(self, uses: Uses, otherwise: float) -> float:
        row_s = {engine: self._rows[engine] * use.alive_s for engine, use in uses.items()}
        # A paced step is timed from the end of the last one, a moment before the engine told of that.
        busy_s = sum(min(use.busy_row_s, row_s[engine]) for engine, use in uses.items())
        return busy_s / sum(row_s.values()) if row_s else otherwise
