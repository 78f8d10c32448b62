"""What the rules decide from, kept beside what it is counted from.

No rule looks at all groups, requests or engines for one fact; `invariants.check` recounts what is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from dora.core.engines import NO_ROOM, NOWHERE, Post, Room
from dora.core.group import Term
from dora.core.ranking import Ranking
from dora.core.records import GroupId


@dataclass(slots=True, kw_only=True)
class Indexes:
    """Part of the state that no snapshot keeps, for it is counted from the rest."""

    touched: dict[int, None] = field(default_factory=dict, repr=False)  # engines that may load or drop now
    changed: dict[int, None] = field(default_factory=dict, repr=False)  # engines changed by the last fact
    holders: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # version -> who stays
    idle: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # of them, not decoding it
    coming: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # ... who loads or wants it
    takers: dict[int, Ranking] = field(default_factory=dict, repr=False)  # version -> engines with free rows
    fresh_rows: Counter[int] = field(
        default_factory=Counter, repr=False
    )  # version -> free where it is the top
    unscored: dict[Term, dict[GroupId, None]] = field(default_factory=dict, repr=False)
    loaders: dict[int, None] = field(default_factory=dict, repr=False)  # engines that load now
    laggards: dict[int, None] = field(default_factory=dict, repr=False)  # engines slower than others
    least_pace: float | None = field(default=None, repr=False)  # of these, where counted
    admissible: dict[int, int] = field(default_factory=dict, repr=False)  # version -> groups, where counted
    is_settled: bool = field(default=False, repr=False)  # all rules were asked, and had no order
    num_rows: int = field(default=0, repr=False)  # of all engines
    posts: dict[int, Post] = field(default_factory=dict, repr=False)
    rooms: dict[int, Room] = field(default_factory=dict, repr=False)

    def forget(self, engine: int) -> None:
        """It is gone."""
        self.enter_post(engine, NOWHERE)
        self.enter_room(engine, NO_ROOM)
        del self.rooms[engine], self.posts[engine]

    def enter_post(self, engine: int, new: Post) -> list[int]:
        """Index an engine's versions and pace; returns the versions that others need not keep for it."""
        old = self.posts.get(engine, NOWHERE)
        self.posts[engine] = new
        _list(engine, new.loading is not None, self.loaders)
        if (new.lag > 0) != (old.lag > 0):
            _list(engine, new.lag > 0, self.laggards)
            self.least_pace = None
        _move(engine, old.idle, new.idle, self.idle)
        _move(engine, old.held, new.held, self.holders)
        _move(engine, old.coming, new.coming, self.coming)
        better = new.held if new.lag < old.lag else new.held - old.held
        return [version for version in sorted(better) if len(self.holders[version]) > 1]

    def enter_room(self, engine: int, new: Room) -> None:
        """Index an engine's free rows."""
        old, takers = self.rooms.get(engine, NO_ROOM), self.takers
        self.rooms[engine] = new
        for version in old.ranks:
            if version not in new.ranks:
                takers[version].discard(engine)
                if not len(takers[version]):
                    del takers[version]
        for version, key in new.ranks.items():
            if version not in takers:
                takers[version] = Ranking()
            takers[version].put(engine, key)
        if new.fresh_rows:
            self.fresh_rows[new.top] += new.fresh_rows
        if old.fresh_rows:
            take(self.fresh_rows, old.top, old.fresh_rows)


def _list(engine: int, is_listed: bool, index: dict[int, None]) -> None:
    if is_listed:
        index[engine] = None
    else:
        index.pop(engine, None)


def _move(engine: int, old: Set[int], new: Set[int], index: dict[int, dict[int, None]]) -> None:
    """Enter an engine under its `new` versions, and no more under its `old` ones."""
    if old == new:
        return
    for version in old - new:
        del index[version][engine]
        if not index[version]:
            del index[version]
    for version in sorted(new - old):
        index.setdefault(version, {})[engine] = None


def take(counts: Counter[int], key: int, count: int) -> None:
    """Count so many less, and forget a key that has none left: a run has as many versions as steps."""
    counts[key] -= count
    if not counts[key]:
        counts.pop(key)


def take_one(counts: Counter[int], key: int) -> None:
    take(counts, key, 1)
