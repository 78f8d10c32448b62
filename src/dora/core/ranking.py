"""Numbered things by key, least key first, with cheap changes.

A heap whose outdated entries are skipped when they come up, and swept out when they outnumber
the others: O(log n) per change, O(1) amortised per look.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

Key = tuple[int, ...]


class Ranking:
    """A set of ints, each with a key."""

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        """Members, in the order in which they came."""
        return iter(self._keys)

    def put(self, item: int, key: Key) -> None:
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
        """The member with the least key, the lower number first among equals; None if empty."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None
