"""Indexes over the engines and groups, so that no rule scans all of them for one event.

`invariants.check` rebuilds them from scratch and compares.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.types import GroupId

SortKey = tuple[int, ...]


class IndexedHeap:
    """Integers by key, smallest key first: O(log n) per change, O(1) amortised for `first`.

    A heap with lazy deletion: outdated entries are skipped at the top, and dropped when they outnumber the
    others.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, SortKey] = {}
        self._heap: list[tuple[SortKey, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        """Members in order of insertion."""
        return iter(self._keys)

    def put(self, item: int, key: SortKey) -> None:
        """Add a member, or change its key."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, item))
            if len(self._heap) > 2 * len(self._keys) + 16:
                self._heap = [(key, item) for item, key in self._keys.items()]
                heapq.heapify(self._heap)

    def discard(self, item: int) -> None:
        self._keys.pop(item, None)

    def first(self) -> int | None:
        """The member with the smallest key, the smaller integer among equals; None if empty."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None


class Cohort(NamedTuple):
    """Groups admitted at one version with one deadline."""

    deadline: int
    version: int


class VersionEntry(NamedTuple):
    """The indexed properties of an engine that change seldom: its versions and its lag."""

    loaded: frozenset[int]  # empty while the engine drains
    idle: frozenset[int]  # loaded and not decoded
    loading: int | None
    next_load: int | None
    lag: int

    @property
    def pending(self) -> Set[int]:
        return {v for v in (self.loading, self.next_load) if v is not None}


class RowEntry(NamedTuple):
    """The indexed properties of an engine that change with most events: its free rows."""

    priorities: dict[int, SortKey]  # version -> key among the engines available for it
    newest_version: int
    admission_rows: int  # free places for new groups of `newest_version`


NO_VERSIONS = VersionEntry(frozenset(), frozenset(), None, None, 0)
NO_ROWS = RowEntry({}, -1, 0)


@dataclass(slots=True, kw_only=True)
class Indexes:
    """The part of the state that is derived from the rest, and therefore in no snapshot.

    Sets of engines and groups are dicts with None as value: they iterate in a reproducible order.
    """

    # since the last decision
    dirty_engines: dict[int, None] = field(default_factory=dict, repr=False)  # changed by the current event
    load_candidates: dict[int, None] = field(default_factory=dict, repr=False)  # may load or drop now
    is_quiescent: bool = field(default=False, repr=False)  # the last full decision emitted no action
    # engines by version
    holders: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # loaded, not draining
    idle_holders: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # ... not decoding it
    pending_holders: dict[int, dict[int, None]] = field(default_factory=dict, repr=False)  # will hold it
    available_engines: dict[int, IndexedHeap] = field(default_factory=dict, repr=False)  # with free places
    admission_rows: Counter[int] = field(default_factory=Counter, repr=False)  # free places for new groups
    # engines
    loading_engines: dict[int, None] = field(default_factory=dict, repr=False)
    slow_engines: dict[int, None] = field(default_factory=dict, repr=False)  # lag > 0
    slowest_rate: float | None = field(default=None, repr=False)  # of these, tokens/s per row; None: unknown
    num_rows: int = field(default=0, repr=False)  # of all engines
    version_entries: dict[int, VersionEntry] = field(default_factory=dict, repr=False)
    row_entries: dict[int, RowEntry] = field(default_factory=dict, repr=False)
    # groups
    unscored: dict[Cohort, dict[GroupId, None]] = field(default_factory=dict, repr=False)
    admissible_cache: dict[int, int] = field(default_factory=dict, repr=False)  # version -> admissible groups

    def index_versions(self, engine: int, new: VersionEntry) -> list[int]:
        """Index an engine's versions and lag; returns the versions that their other holders may now drop."""
        old = self.version_entries.get(engine, NO_VERSIONS)
        self.version_entries[engine] = new
        _set_membership(self.loading_engines, engine, new.loading is not None)
        if (new.lag > 0) != (old.lag > 0):
            _set_membership(self.slow_engines, engine, new.lag > 0)
            self.slowest_rate = None
        _reindex(self.idle_holders, engine, old.idle, new.idle)
        _reindex(self.holders, engine, old.loaded, new.loaded)
        _reindex(self.pending_holders, engine, old.pending, new.pending)
        better = new.loaded if new.lag < old.lag else new.loaded - old.loaded
        return [version for version in sorted(better) if len(self.holders[version]) > 1]

    def index_rows(self, engine: int, new: RowEntry) -> None:
        """Index an engine's free rows."""
        old, available = self.row_entries.get(engine, NO_ROWS), self.available_engines
        self.row_entries[engine] = new
        for version in old.priorities:
            if version not in new.priorities:
                available[version].discard(engine)
                if not len(available[version]):
                    del available[version]
        for version, key in new.priorities.items():
            if version not in available:
                available[version] = IndexedHeap()
            available[version].put(engine, key)
        if new.admission_rows:
            self.admission_rows[new.newest_version] += new.admission_rows
        if old.admission_rows:
            decrement(self.admission_rows, old.newest_version, old.admission_rows)

    def unindex(self, engine: int) -> None:
        """Remove an engine from all indexes."""
        self.index_versions(engine, NO_VERSIONS)
        self.index_rows(engine, NO_ROWS)
        del self.row_entries[engine], self.version_entries[engine]


def decrement(counts: Counter[int], key: int, count: int = 1) -> None:
    """Subtract `count`, and delete a key that reaches 0: otherwise one key per version would remain."""
    counts[key] -= count
    if not counts[key]:
        counts.pop(key)


def _set_membership(index: dict[int, None], engine: int, is_member: bool) -> None:
    if is_member:
        index[engine] = None
    else:
        index.pop(engine, None)


def _reindex(index: dict[int, dict[int, None]], engine: int, old: Set[int], new: Set[int]) -> None:
    """Move an engine from its `old` versions to its `new` ones."""
    if old == new:
        return
    for version in old - new:
        del index[version][engine]
        if not index[version]:
            del index[version]
    for version in sorted(new - old):
        index.setdefault(version, {})[engine] = None
