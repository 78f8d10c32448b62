"""`metrics.jsonl` as columns, one for each name.

Where a run is long, a point is the mean of some steps: a page draws no more than it has pixels for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from dora.observe.metrics import PARTS

MAX_POINTS = 800  # per curve
DIGITS = 5  # significant ones are kept

VERSION = "val/version"  # only lines of evaluations have it


class Curves:
    """The lines of a run's metrics, which may come in pieces."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, Any]] = {}
        self._by_version: dict[int, dict[str, Any]] = {}  # of the evaluations

    def read(self, text: str) -> None:
        """One line; what a run that went on has told again replaces what it told before."""
        line: dict[str, Any] = json.loads(text)
        if VERSION in line:
            self._by_version[int(line[VERSION])] = line
        else:
            self._steps[int(line["step"])] = line

    def to_json(self) -> dict[str, Any]:
        """Columns of equal length by name, None where a line lacks it; every point is the mean of `every`."""
        lines = [self._steps[step] for step in sorted(self._steps)]
        every = -(-len(lines) // MAX_POINTS) or 1
        names = sorted({name for line in lines for name in line})
        columns = {name: _thinned([line.get(name) for line in lines], every) for name in names}
        return {
            "every": every,
            "num": len(lines),
            "columns": columns,
            "meanings": {name: meaning for name in names if (meaning := _meaning(name))},
        }

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of evaluations, by version."""
        return [self._by_version[version] for version in sorted(self._by_version)]


@cache
def _meaning(name: str) -> str:
    """What the documentation says of a name, with its unit; empty for one that is not ours."""
    known = next((metric for part in PARTS for metric in part.metrics if metric.has(name)), None)
    return "" if known is None else ": ".join(filter(None, (known.unit, known.meaning)))


def _thinned(values: Sequence[float | None], every: int) -> list[float | None]:
    return [_mean(values[i : i + every]) for i in range(0, len(values), every)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{sum(known) / len(known):.{DIGITS}g}") if known else None
