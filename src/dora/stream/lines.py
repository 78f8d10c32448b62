"""Rows as the control plane sees them, and the line in which those that are ready wait for a consumer.

A line is one queue, or one for each version, oldest version first. Putting in and taking out cost the
same however many rows there are: what has left by another way is skipped when its turn comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from dora.core.records import GroupId, RequestId

_NUM_BEFORE_SWEEPING = 64  # parcels


class Want(NamedTuple):
    """What a consumer asks for: whole `groups` that somebody chose, or what is next in its line.

    Of the line it gets at most `num_rows` rows and `num_tokens` tokens, though at least one row or group,
    once `at_least` rows are ready.
    """

    num_rows: int = 1
    num_tokens: int | None = None
    at_least: int = 1
    groups: tuple[GroupId, ...] = ()


@dataclass(eq=False, slots=True)
class Block:
    """Columns `names` of some rows, somewhere in the data plane."""

    names: tuple[str, ...]
    num_rows: int
    num_bytes: int
    place: object
    mask: int = 0  # of the names
    num_live: int = 0  # rows
    num_leases: int = 0


class NewRow(NamedTuple):
    """Who a row is."""

    id: RequestId
    version: int
    num_tokens: int = 0


@dataclass(eq=False, slots=True)
class Row:
    """A sample here: where its columns are, and which columns it has and consumers it has met, as bits."""

    index: int
    id: RequestId
    group: GroupId
    version: int
    num_tokens: int
    has: int = 0  # columns
    spots: tuple[tuple[Block, int], ...] = ()  # blocks, and which row of each it is
    met: int = 0  # consumers that know of it: it is ready, on lease or consumed
    ready: int = 0  # consumers in whose line it is
    done: int = 0  # consumers that consumed it


class Line:
    """Rows that are ready for the consumer with `bit`; with a `group_size`, whole groups of them.

    Held-out prompts have `held_out_size` answers each.
    """

    def __init__(self, bit: int, group_size: int, held_out_size: int, by_version: bool) -> None:
        self.num_rows = 0  # that could be taken now
        self._bit, self._by_version = bit, by_version
        self._group_size, self._held_out_size = group_size, held_out_size
        self._queues: dict[int, deque[tuple[Row, ...]]] = {}
        self._num_queued = 0  # parcels, some of which have left by another way
        self._whole: dict[GroupId, tuple[Row, ...]] = {}
        self._partial: dict[GroupId, list[Row]] = {}

    def add(self, row: Row, is_first: bool = False) -> None:
        """A row is ready; one that was taken and comes back goes first."""
        row.ready |= self._bit
        parcel: tuple[Row, ...] = (row,)
        if self._group_size:
            group = row.group
            known = self._partial.setdefault(group, [])
            known.append(row)
            if len(known) < (self._held_out_size if group.is_held_out else self._group_size):
                return
            del self._partial[group]
            parcel = self._whole[group] = tuple(sorted(known, key=lambda row: row.id.sibling))
        self.num_rows += len(parcel)
        queue = self._queues.setdefault(row.version if self._by_version else 0, deque())
        (queue.appendleft if is_first else queue.append)(parcel)
        self._num_queued += 1

    def remove(self, row: Row) -> None:
        """A ready row goes another way."""
        row.ready &= ~self._bit
        if not self._group_size:
            self.num_rows -= 1
            self._sweep()
            return
        group = row.group
        if (whole := self._whole.pop(group, None)) is not None:
            self.num_rows -= len(whole)
            self._partial[group] = [*whole]
        self._partial[group].remove(row)
        if not self._partial[group]:
            del self._partial[group]
        self._sweep()

    def take(self, want: Want) -> list[Row]:
        """What is next, as far as it is wanted; nothing before there is enough."""
        taken: list[Row] = []
        if self.num_rows < max(1, want.at_least):
            return taken
        num_tokens = 0
        for rank in sorted(self._queues):
            queue = self._queues[rank]
            while queue:
                parcel = queue[0]
                if self._is_here(parcel):
                    num_tokens += sum(row.num_tokens for row in parcel)
                    is_too_long = want.num_tokens is not None and num_tokens > want.num_tokens
                    if taken and (is_too_long or len(taken) + len(parcel) > want.num_rows):
                        return taken
                    self._pick(parcel)
                    taken += parcel
                queue.popleft()
                self._num_queued -= 1
            del self._queues[rank]
        return taken

    def _sweep(self) -> None:
        """Forget what has left by another way, when it is more than half: else it would be kept for ever."""
        num_here = len(self._whole) if self._group_size else self.num_rows
        if self._num_queued <= _NUM_BEFORE_SWEEPING + 2 * num_here:
            return
        kept = {rank: deque(filter(self._is_here, queue)) for rank, queue in self._queues.items()}
        self._queues = {rank: queue for rank, queue in kept.items() if queue}
        self._num_queued = num_here

    def _is_here(self, parcel: tuple[Row, ...]) -> bool:
        if self._group_size:
            return self._whole.get(parcel[0].group) is parcel
        return bool(parcel[0].ready & self._bit)

    def _pick(self, parcel: tuple[Row, ...]) -> None:
        self.num_rows -= len(parcel)
        for row in parcel:
            row.ready &= ~self._bit
        if self._group_size:
            del self._whole[parcel[0].group]


class Consumer:
    """A task: the columns it needs and the rows that are ready for it."""

    def __init__(
        self,
        name: str,
        bit: int,
        needs: int,
        group_size: int,
        by_version: bool,
        lease_s: float,
        held_out_size: int = 0,
    ) -> None:
        self.name, self.bit, self.needs, self.lease_s = name, bit, needs, lease_s
        self.group_size, self.held_out_size, self.by_version = group_size, held_out_size, by_version
        self.line = Line(bit, group_size, held_out_size, by_version)
        self.num_done = 0  # rows that it consumed and that are still here

    @property
    def declaration(self) -> tuple[int, int, int, bool, float]:
        return self.needs, self.group_size, self.held_out_size, self.by_version, self.lease_s

    def size_of(self, group: GroupId) -> int:
        """How many rows make the group whole, for a consumer of groups."""
        return self.held_out_size if group.is_held_out else self.group_size

    def look_at(self, row: Row) -> None:
        """Put it into the line when it has all that is needed, once.

        Who takes groups and has not said of how many held-out answers is not served any of these.
        """
        if self.group_size and row.id.is_held_out and not self.held_out_size:
            return
        if row.has & self.needs == self.needs and not row.met & self.bit:
            row.met |= self.bit
            self.line.add(row)
