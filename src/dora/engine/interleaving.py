"""Which versions sit a decode step out.

A version costs its own matrix products in every step, however few rows it has. Small old ones can
go along in every n-th step only; those at their deadline never wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SMALL = 0.25  # of all rows


@dataclass(frozen=True)
class Interleaving:
    """Small versions decode in every `interval`-th step (1: in all), unless they are at their deadline.

    That they are when they are `urgent_age` versions older than the newest held.
    """

    interval: int = 1
    urgent_age: int = 1

    def resting(self, step: int, num_rows: Mapping[int, int], newest: int) -> frozenset[int]:
        """Versions that sit this step out, given the rows of each; never those that have most rows."""
        if step % self.interval == 0:
            return frozenset()
        limit = _SMALL * sum(num_rows.values())
        return frozenset(
            version
            for version, num in num_rows.items()
            if num <= limit and 0 < newest - version < self.urgent_age
        )


NEVER = Interleaving()
