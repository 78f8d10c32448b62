"""Which lost engines are started again, and when: soon at first, and ever later while nothing gets better.

An engine stands in a place: the one it was started in, or that of the engine it takes over from. Each place
has so many restarts, and has all of them again once an engine has stayed there. The trainer has a place, too.
"""

from __future__ import annotations

from collections import Counter

FIRST_S, LONGEST_S = 1.0, 60.0  # before a restart: twice as long each time
STAYED_S = 300.0  # an engine that lived for so long was well
WORTH = 4.0  # one that lived for so many times the wait before it: the next wait is the first again


class Restarts:
    """Times are those of `time.monotonic`."""

    def __init__(self, most: int) -> None:
        """`most` restarts of each place in a row; 0: none."""
        self.most = most
        self.due_s: dict[int, float] = {}  # lost engine -> when another takes its place
        self._num: Counter[int] = Counter()  # place -> restarts in a row
        self._wait_s: dict[int, float] = {}  # place -> before the last one

    def lost(
        self, engine: int, place: int, lived_s: float, now_s: float, *, got_on: bool = False
    ) -> float | None:
        """How long its place stays empty (s); None: for ever. Who `got_on` was worth the wait before it."""
        if lived_s >= STAYED_S:
            del self._num[place]
        if self._num[place] >= self.most:
            return None
        before_s = self._wait_s.get(place, 0.0)
        is_worth_it = got_on or lived_s >= WORTH * before_s
        wait_s = FIRST_S if is_worth_it else min(LONGEST_S, 2 * before_s)
        self._wait_s[place] = wait_s
        self._num[place] += 1
        self.due_s[engine] = now_s + wait_s
        return wait_s

    def take(self, now_s: float) -> list[int]:
        """The lost engines whose places are to be filled now; they are named once."""
        due = [engine for engine, due_s in self.due_s.items() if due_s <= now_s]
        for engine in due:
            del self.due_s[engine]
        return due
