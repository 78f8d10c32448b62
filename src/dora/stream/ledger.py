"""The control plane: which rows there are, what each consumer may have, and who holds what on lease.

Pure: no clock, no bytes, no sockets. A row that becomes ready is put into the line of each consumer that
needs it at that moment, so nothing is ever searched for. A row leaves after its last consumer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dora.core.records import GroupId, RequestId
from dora.errors import StreamError
from dora.stream.lines import Block, Consumer, NewRow, Row, Want

FOREVER = float("inf")


@dataclass(eq=False, slots=True)
class Lease:
    """Rows handed to a client until it commits, or until `until_s`; and the blocks it reads."""

    number: int
    consumer: Consumer
    client: str
    rows: list[Row]
    blocks: dict[Block, list[tuple[int, int]]]  # (row of the lease, row of the block)
    until_s: float


class Ledger:
    """All of it in memory; whoever owns one passes the time and keeps what must survive."""

    def __init__(
        self, names: Iterable[str], max_rows: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.bits = {name: 1 << i for i, name in enumerate(names)}
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.rows: dict[int, Row] = {}  # by global index
        self.consumers: dict[str, Consumer] = {}
        self.num_bytes = 0
        self.next_index = 0
        self.free: list[Block] = []  # that nobody needs any more, until somebody has taken note
        self._ids: dict[RequestId, Row] = {}
        self._groups: dict[GroupId, list[Row]] = {}
        self._leases: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []  # heap of (until_s, lease)
        self._num_leases = 0

    def declare(
        self,
        name: str,
        fields: Sequence[str],
        group_size: int = 0,
        by_version: bool = False,
        lease_s: float = FOREVER,
        held_out_size: int = 0,
    ) -> None:
        """Add a consumer; it is served the rows that are still here. The same once more changes nothing.

        With a `group_size` it is served whole groups, and answers to held-out prompts only with a
        `held_out_size`; `by_version` the oldest version first, else first in, first out. Raises StreamError.
        """
        if not lease_s > 0 or min(group_size, held_out_size) < 0:
            raise StreamError(
                f"consumer {name!r} with lease_s = {lease_s:g}, group_size = {group_size}, held_out_size = "
                f"{held_out_size}: a lease needs more than 0 s, sizes are at least 0"
            )
        bit, needs = 1 << len(self.consumers), self.mask(fields)
        new = Consumer(name, bit, needs, group_size, by_version, lease_s, held_out_size)
        if (old := self.consumers.get(name)) is not None:
            if old.declaration != new.declaration:
                raise StreamError(f"consumer {name!r} is declared already, and otherwise; take another name")
            return
        self.consumers[name] = new
        for row in self.rows.values():
            new.look_at(row)

    def mask(self, names: Iterable[str]) -> int:
        """Raises StreamError for a field that is not declared."""
        mask = 0
        for name in names:
            if name not in self.bits:
                raise StreamError(f"field {name!r} is not declared; declared are {', '.join(self.bits)}")
            mask |= self.bits[name]
        return mask

    def needed(self, consumer: Consumer, names: Iterable[str]) -> tuple[str, ...]:
        """Those fields that the consumer needs."""
        return tuple(name for name in names if self.bits[name] & consumer.needs)

    def has_room(self, num_rows: int, num_bytes: int) -> bool:
        """Whether so much may come in now. Raises StreamError if it never may."""
        for what, num, limit in (("rows", num_rows, self.max_rows), ("bytes", num_bytes, self.max_bytes)):
            if limit is not None and num > limit:
                raise StreamError(f"{num} {what} at once, but max_{what} = {limit}: put less, or raise it")
        return (self.max_rows is None or len(self.rows) + num_rows <= self.max_rows) and (
            self.max_bytes is None or self.num_bytes + num_bytes <= self.max_bytes
        )

    def check_new(self, rows: Sequence[NewRow]) -> None:
        """Raises StreamError if one of them is here, or twice among them, or there are none."""
        if not rows:
            raise StreamError("no row was given")
        ids = {row.id for row in rows}
        if len(ids) < len(rows) or not self._ids.keys().isdisjoint(ids):
            twice = next((i for i in ids if i in self._ids), rows[0].id)
            raise StreamError(f"row {twice} is here already: put a row once, and fill in further columns")

    def add(self, rows: Sequence[NewRow], block: Block) -> range:
        """New rows, with their first columns; their indices. They must have been checked."""
        indices = range(self.next_index, self.next_index + len(rows))
        consumers = [*self.consumers.values()]
        self._take_in(block)
        for position, (index, new) in enumerate(zip(indices, rows, strict=True)):
            row = self._admit(index, new, block, position)
            for consumer in consumers:
                consumer.look_at(row)
        return indices

    def check_fill(self, indices: Sequence[int], names: Sequence[str]) -> None:
        """Raises StreamError for a row that is not here, or a column that is."""
        mask = self.mask(names)
        if not indices:
            raise StreamError("no row was given")
        if len({*indices}) < len(indices):
            raise StreamError("a row is named twice: fill in one value for each")
        for index in indices:
            if (row := self.rows.get(index)) is None:
                raise StreamError(f"row {index} is not here: it was never put, or all its consumers are done")
            if row.has & mask:
                twice = ", ".join(name for name in names if self.bits[name] & row.has)
                raise StreamError(f"row {index} has {twice} already: a column is written once")

    def fill(self, indices: Sequence[int], block: Block) -> None:
        """Further columns of rows that are here. They must have been checked."""
        self._take_in(block)
        consumers = [c for c in self.consumers.values() if c.needs & block.mask]
        for position, index in enumerate(indices):
            row = self.rows[index]
            self._extend(row, block, position)
            for consumer in consumers:
                consumer.look_at(row)

    def take(self, name: str, client: str, want: Want, now_s: float) -> Lease | None:
        """A lease on what is wanted, or None while it is not there. Raises StreamError."""
        consumer = self.consumer(name)
        rows = self._chosen(consumer, want.groups) if want.groups else consumer.line.take(want)
        if not rows:
            return None
        blocks = _blocks(rows, consumer)
        for block in blocks:
            block.num_leases += 1
        self._num_leases += 1
        lease = Lease(self._num_leases, consumer, client, rows, blocks, now_s + consumer.lease_s)
        self._leases[lease.number] = lease
        self._time(lease)
        return lease

    def look(self, name: str, indices: Sequence[int]) -> Lease:
        """Rows that somebody has on lease, for those who work on them with it: ranks of one trainer.

        It is no lease: there is nothing to commit, and the blocks last as long as the holder's. Raises
        StreamError.
        """
        consumer = self.consumer(name)
        rows = [self.rows[index] for index in indices if index in self.rows]
        held = [row.index for row in rows if row.met & ~row.ready & ~row.done & consumer.bit]
        if not held or len(held) < len(indices):
            missing = next((index for index in indices if index not in {*held}), "none")
            raise StreamError(f"row {missing} is not on lease to {name!r}: somebody must get it and hold it")
        return Lease(0, consumer, "", rows, _blocks(rows, consumer), FOREVER)

    def commit(self, number: int, client: str, now_s: float) -> Lease:
        """Its rows are consumed, by this consumer and for ever. Raises StreamError."""
        lease = self._held(number, client, now_s)
        self._end(lease)
        for row in lease.rows:
            if row.index in self.rows:  # it may have been cleared
                self._consume(row, lease.consumer)
        return lease

    def give_back(self, number: int, client: str, now_s: float) -> None:
        """Its rows are first in line again. Raises StreamError."""
        self._return(self._held(number, client, now_s))

    def renew(self, number: int, client: str, now_s: float) -> None:
        """It lasts as long again, from now on. Raises StreamError."""
        lease = self._held(number, client, now_s)
        lease.until_s = now_s + lease.consumer.lease_s
        self._time(lease)

    @property
    def next_end_s(self) -> float | None:
        """When the first lease may end."""
        return self._ends[0][0] if self._ends else None

    def expire(self, now_s: float) -> None:
        """Take back what was leased until now."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, number = heapq.heappop(self._ends)
            lease = self._leases.get(number)
            if lease is not None and lease.until_s == until_s:
                self._return(lease)

    def leave(self, client: str) -> None:
        """Take back what a client holds that is gone."""
        for lease in [lease for lease in self._leases.values() if lease.client == client]:
            self._return(lease)

    def clear(self, groups: Iterable[GroupId]) -> list[int]:
        """Forget groups that nobody needs any more; the indices of their rows."""
        cleared = [row for group in dict.fromkeys(groups) for row in self._groups.get(group, ())]
        for row in cleared:
            self._forget(row)
        return [row.index for row in cleared]

    def restore(self, indices: Sequence[int], rows: Sequence[NewRow], block: Block) -> None:
        """A block of a former life, before any consumer is declared."""
        self._take_in(block)
        for position, (index, new) in enumerate(zip(indices, rows, strict=True)):
            if (row := self.rows.get(index)) is None:
                self._admit(index, new, block, position)
            else:
                self._extend(row, block, position)

    def restore_done(self, name: str | None, indices: Iterable[int]) -> None:
        """What a consumer committed in a former life, or what was cleared, if that is None."""
        for index in indices:
            self.next_index = max(self.next_index, index + 1)
            if (row := self.rows.get(index)) is None:
                continue
            if name is None:
                self._forget(row)
            elif not row.done & (consumer := self.consumer(name)).bit:
                if row.ready & consumer.bit:
                    consumer.line.remove(row)
                row.met |= consumer.bit
                self._consume(row, consumer)

    def consumer(self, name: str) -> Consumer:
        """Raises StreamError if it is not declared."""
        if name not in self.consumers:
            known = ", ".join(self.consumers) or "none"
            raise StreamError(f"consumer {name!r} is not declared; declared are: {known}")
        return self.consumers[name]

    def group(self, group: GroupId) -> list[Row]:
        """The rows of a group that are here, sibling by sibling."""
        return sorted(self._groups.get(group, ()), key=lambda row: row.id.sibling)

    def slowest(self) -> str:
        """A sentence about who is furthest behind."""
        if not self.consumers:
            return f"{len(self.rows)} rows, and no consumer is declared"
        consumer = min(self.consumers.values(), key=lambda c: c.num_done)
        num_behind = len(self.rows) - consumer.num_done
        num_ready = consumer.line.num_rows
        num_leased = sum(len(lease.rows) for lease in self._leases.values() if lease.consumer is consumer)
        return (
            f"{consumer.name!r} is {num_behind} rows behind: {num_ready} are ready for it, it holds "
            f"{num_leased}, {num_behind - num_ready - num_leased} lack columns or siblings"
        )

    def waits_for(self, name: str, want: Want) -> str:
        """A sentence about what is missing of what is wanted."""
        consumer = self.consumer(name)
        if not want.groups:
            return f"{name!r} has {consumer.line.num_rows} rows ready and asked for {want.at_least}"
        return "; ".join(self._missing(consumer, group) for group in want.groups)

    def _missing(self, consumer: Consumer, group: GroupId) -> str:
        rows = self.group(group)
        lacking = [
            name
            for name, bit in self.bits.items()
            if consumer.needs & bit and not all(row.has & bit for row in rows)
        ]
        num_away = sum(bool(row.met & consumer.bit and not row.ready & consumer.bit) for row in rows)
        columns = f"without {', '.join(lacking)}" if lacking else f"{num_away} on lease or consumed"
        return f"group {group}: {len(rows)} of {consumer.size_of(group)} rows are here, {columns}"

    def _chosen(self, consumer: Consumer, groups: Sequence[GroupId]) -> list[Row]:
        """All rows of these groups, if they are whole and ready."""
        if not consumer.group_size:
            raise StreamError(f"consumer {consumer.name!r} needs a group_size to ask for groups; declare it")
        rows: list[Row] = []
        for group in dict.fromkeys(groups):
            found = self.group(group)
            if len(found) < consumer.size_of(group) or not all(row.ready & consumer.bit for row in found):
                return []
            rows += found
        for row in rows:
            consumer.line.remove(row)
        return rows

    def _admit(self, index: int, new: NewRow, block: Block, position: int) -> Row:
        row = Row(index, new.id, new.id.group, new.version, new.num_tokens, block.mask, ((block, position),))
        self.rows[index] = self._ids[row.id] = row
        self._groups.setdefault(row.group, []).append(row)
        self.next_index = max(self.next_index, index + 1)
        return row

    def _extend(self, row: Row, block: Block, position: int) -> None:
        row.has |= block.mask
        row.spots += ((block, position),)

    def _take_in(self, block: Block) -> None:
        block.mask = self.mask(block.names)
        block.num_live = block.num_rows
        self.num_bytes += block.num_bytes

    def _consume(self, row: Row, consumer: Consumer) -> None:
        row.done |= consumer.bit
        consumer.num_done += 1
        if row.done == (1 << len(self.consumers)) - 1:
            self._forget(row)

    def _forget(self, row: Row) -> None:
        for consumer in self.consumers.values():
            if row.ready & consumer.bit:
                consumer.line.remove(row)
            consumer.num_done -= bool(row.done & consumer.bit)
        del self.rows[row.index], self._ids[row.id]
        siblings = self._groups[row.group]
        siblings.remove(row)
        if not siblings:
            del self._groups[row.group]
        for block, _ in row.spots:
            block.num_live -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: Block) -> None:
        if not block.num_live and not block.num_leases:
            self.num_bytes -= block.num_bytes
            self.free.append(block)

    def _held(self, number: int, client: str, now_s: float) -> Lease:
        """The lease that a client names. Raises StreamError if it is none, not its own, or over."""
        self.expire(now_s)
        lease = self._leases.get(number)
        if lease is None and 0 < number <= self._num_leases:
            raise StreamError(
                f"lease {number} is over: its rows are consumed, or were given to somebody else; drop what "
                "came of them and get rows anew (for slow work, renew the lease or declare a longer lease_s)"
            )
        if lease is None or lease.client != client:
            raise StreamError(f"this client has no lease {number}: get rows first, and name their lease")
        return lease

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        for block in lease.blocks:
            block.num_leases -= 1
            self._free_if_unused(block)

    def _return(self, lease: Lease) -> None:
        self._end(lease)
        for row in reversed(lease.rows):
            if row.index in self.rows:  # it may have been cleared
                lease.consumer.line.add(row, is_first=True)

    def _time(self, lease: Lease) -> None:
        if lease.until_s < FOREVER:
            heapq.heappush(self._ends, (lease.until_s, lease.number))


def _blocks(rows: Sequence[Row], consumer: Consumer) -> dict[Block, list[tuple[int, int]]]:
    """Where the columns are that a consumer needs: number among the rows, and row of the block."""
    blocks: dict[Block, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for block, position in row.spots:
            if block.mask & consumer.needs:
                blocks.setdefault(block, []).append((number, position))
    return blocks
