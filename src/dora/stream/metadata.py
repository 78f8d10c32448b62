"""Metadata of the stream: which rows exist, which fields they have, and which consumer may lease which rows.

Pure: no clock, no bytes, no sockets. A row is queued for each consumer as soon as it has all fields that the
consumer needs, so no operation scans all rows. A row is removed after its last consumer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError

NO_TIMEOUT = float("inf")
UnitKey = GroupId | int  # of a unit that is leased whole: a group, or the index of a row


class SampleMeta(NamedTuple):
    """The identity of a new row."""

    request: RequestId
    version: int
    num_tokens: int = 0


class BatchRequest(NamedTuple):
    """What a consumer requests: whole `groups` by name, or the next rows of its ready queue.

    From the queue it gets at most `max_rows` rows and `max_tokens` tokens, but at least one row or group, as
    soon as `min_rows` rows are ready.
    """

    max_rows: int = 1
    max_tokens: int | None = None
    min_rows: int = 1
    groups: tuple[GroupId, ...] = ()


class BlockLocation(NamedTuple):
    """Where the bytes of a block are."""

    segment: str
    offset: int
    num_bytes: int


@dataclass(eq=False, slots=True)
class Block:
    """Fields `names` of some rows, packed in shared memory."""

    names: tuple[str, ...]
    num_rows: int
    location: BlockLocation
    field_mask: int = 0
    num_live_rows: int = 0
    num_leases: int = 0


@dataclass(eq=False, slots=True)
class StreamRow:
    """A sample. Bit masks hold its production status (by field) and its status for each consumer."""

    index: int
    request: RequestId
    group: GroupId
    version: int
    num_tokens: int
    produced: int = 0  # fields that are written
    blocks: tuple[tuple[Block, int], ...] = ()  # blocks, and the row's position in each
    offered: int = 0  # consumers for which it is queued, leased or consumed
    queued: int = 0  # consumers in whose ready queue it is
    consumed: int = 0  # consumers that committed it


@dataclass(eq=False, slots=True)
class StreamLease:
    """Rows that a client may read until it commits or the lease expires, and the blocks it reads."""

    lease_id: int
    consumer: StreamConsumer
    client: str
    rows: list[StreamRow]
    blocks: dict[Block, list[tuple[int, int]]]  # (row of the lease, row of the block)
    expires_s: float


class MetadataController:
    """The rows and consumers of a stream. The owner passes the time."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` of the fields."""
        self.field_bits = {name: 1 << i for i, name in enumerate(names)}
        self.rows: dict[int, StreamRow] = {}  # by global index
        self.consumers: dict[str, StreamConsumer] = {}
        self.num_bytes = 0
        self.freed_blocks: list[Block] = []  # no longer referenced; the storage takes them from here
        self._next_index = 0
        self._requests: set[RequestId] = set()
        self._groups: dict[GroupId, list[StreamRow]] = {}
        self._leases: dict[int, StreamLease] = {}
        self._timed: dict[int, StreamLease] = {}  # those that expire, which are few
        self._num_leases = 0

    def register_consumer(
        self,
        name: str,
        fields: Sequence[str],
        group_size: int = 0,
        by_version: bool = False,
        lease_s: float = NO_TIMEOUT,
        held_out_size: int = 0,
    ) -> None:
        """Add a consumer; existing rows are offered to it. Registering it again unchanged has no effect.

        With a `group_size` it is served whole groups, and groups of held-out prompts only with a
        `held_out_size`. `by_version` serves the oldest version first instead of first in, first out. Raises
        StreamError.
        """
        if not lease_s > 0 or min(group_size, held_out_size) < 0:
            raise StreamError(
                f"consumer {name!r}: lease_s = {lease_s:g}, group_size = {group_size}, held_out_size = "
                f"{held_out_size}: lease_s must be more than 0 s, sizes at least 0"
            )
        bit, needs = 1 << len(self.consumers), self.field_mask(fields)
        new = StreamConsumer(name, bit, needs, group_size, by_version, lease_s, held_out_size)
        if (old := self.consumers.get(name)) is not None:
            if old != new:
                raise StreamError(f"consumer {name!r} is registered with other rules; use another name")
            return
        self.consumers[name] = new
        for row in self.rows.values():
            new.offer(row)

    def field_mask(self, names: Iterable[str]) -> int:
        """Raises StreamError for a field that is not declared."""
        mask = 0
        for name in names:
            if name not in self.field_bits:
                declared = ", ".join(self.field_bits)
                raise StreamError(f"field {name!r} is not declared; declared are {declared}")
            mask |= self.field_bits[name]
        return mask

    def needed_names(self, consumer: StreamConsumer, names: Iterable[str]) -> tuple[str, ...]:
        """The fields among `names` that the consumer needs."""
        return tuple(name for name in names if self.field_bits[name] & consumer.needs)

    def check_new(self, samples: Sequence[SampleMeta]) -> None:
        """Raises StreamError if there are none, or if a request is repeated or has a row already."""
        if not samples:
            raise StreamError("no rows: pass at least one")
        requests = {sample.request for sample in samples}
        if len(requests) < len(samples) or not self._requests.isdisjoint(requests):
            repeated = next((r for r in requests if r in self._requests), samples[0].request)
            raise StreamError(f"row {repeated} exists already: put a row once, then fill further columns")

    def add(self, samples: Sequence[SampleMeta], block: Block) -> range:
        """Add rows with their first columns; their indices. Requires `check_new`."""
        indices = range(self._next_index, self._next_index + len(samples))
        self._next_index = indices.stop
        consumers = [*self.consumers.values()]
        self._add_block(block)
        for position, (index, sample) in enumerate(zip(indices, samples, strict=True)):
            request, version, num_tokens = sample
            blocks = ((block, position),)
            row = StreamRow(index, request, request.group, version, num_tokens, block.field_mask, blocks)
            self.rows[index] = row
            self._requests.add(request)
            self._groups.setdefault(row.group, []).append(row)
            for consumer in consumers:
                consumer.offer(row)
        return indices

    def check_fill(self, indices: Sequence[int], names: Sequence[str]) -> None:
        """Raises StreamError for a row that does not exist, or a column that the row has already."""
        mask = self.field_mask(names)
        if not indices:
            raise StreamError("no rows: pass at least one")
        if len({*indices}) < len(indices):
            raise StreamError("an index is repeated: pass one value per row")
        for index in indices:
            if (row := self.rows.get(index)) is None:
                raise StreamError(f"row {index} does not exist: never put, cleared, or consumed by all")
            if row.produced & mask:
                repeated = ", ".join(name for name in names if self.field_bits[name] & row.produced)
                raise StreamError(f"row {index} has {repeated} already: a column is written once")

    def fill(self, indices: Sequence[int], block: Block) -> None:
        """Add columns to existing rows. Requires `check_fill`."""
        self._add_block(block)
        consumers = [c for c in self.consumers.values() if c.needs & block.field_mask]
        for position, index in enumerate(indices):
            row = self.rows[index]
            row.produced |= block.field_mask
            row.blocks += ((block, position),)
            for consumer in consumers:
                consumer.offer(row)

    def lease(self, name: str, client: str, request: BatchRequest, now_s: float) -> StreamLease | None:
        """Lease the requested rows; None while they are not ready. Raises StreamError."""
        consumer = self.consumer(name)
        rows = self._take_groups(consumer, request.groups) if request.groups else consumer.ready.pop(request)
        if not rows:
            return None
        blocks = _blocks_of(rows, consumer)
        for block in blocks:
            block.num_leases += 1
        self._num_leases += 1
        lease = StreamLease(self._num_leases, consumer, client, rows, blocks, now_s + consumer.lease_s)
        self._leases[lease.lease_id] = lease
        if lease.expires_s < NO_TIMEOUT:
            self._timed[lease.lease_id] = lease
        return lease

    def leased_rows(self, name: str, indices: Sequence[int]) -> StreamLease:
        """Rows that some client of the consumer has on lease, e.g. for the other ranks of a trainer.

        The result has lease id 0: it cannot be committed, and its blocks last as long as the actual lease.
        Raises StreamError.
        """
        consumer = self.consumer(name)
        rows = [self.rows[index] for index in indices if index in self.rows]
        leased = [row.index for row in rows if row.offered & ~row.queued & ~row.consumed & consumer.bit]
        if not leased or len(leased) < len(indices):
            missing = next((index for index in indices if index not in {*leased}), "none")
            raise StreamError(f"row {missing} is not on lease to {name!r}: another client must get it first")
        return StreamLease(0, consumer, "", rows, _blocks_of(rows, consumer), NO_TIMEOUT)

    def commit(self, lease_id: int, client: str, now_s: float) -> None:
        """Mark the rows of a lease as consumed by its consumer. Raises StreamError."""
        lease = self._held_lease(lease_id, client, now_s)
        self._end(lease)
        all_bits = (1 << len(self.consumers)) - 1
        for row in lease.rows:
            if row.index not in self.rows:  # cleared meanwhile
                continue
            row.consumed |= lease.consumer.bit
            if row.consumed == all_bits:
                self._remove(row)

    def release(self, lease_id: int, client: str, now_s: float) -> None:
        """End a lease; its rows go to the front of the ready queue. Raises StreamError."""
        self._release(self._held_lease(lease_id, client, now_s))

    def renew(self, lease_id: int, client: str, now_s: float) -> None:
        """Restart the time of a lease. Raises StreamError."""
        lease = self._held_lease(lease_id, client, now_s)
        lease.expires_s = now_s + lease.consumer.lease_s

    @property
    def next_expiry_s(self) -> float | None:
        """When the next lease expires."""
        return min((lease.expires_s for lease in self._timed.values()), default=None)

    def expire(self, now_s: float) -> None:
        """Release expired leases."""
        expired = [lease for lease in self._timed.values() if lease.expires_s <= now_s]
        for lease in sorted(expired, key=lambda lease: lease.expires_s):
            self._release(lease)

    def release_client(self, client: str) -> None:
        """Release all leases of a client."""
        for lease in [lease for lease in self._leases.values() if lease.client == client]:
            self._release(lease)

    def clear(self, groups: Iterable[GroupId]) -> None:
        """Remove groups, whatever their status."""
        for group in groups:
            for row in [*self._groups.get(group, ())]:
                self._remove(row)

    def consumer(self, name: str) -> StreamConsumer:
        """Raises StreamError if it is not registered."""
        if name not in self.consumers:
            known = ", ".join(self.consumers) or "none"
            raise StreamError(f"consumer {name!r} is not registered; registered are: {known}")
        return self.consumers[name]

    def group_rows(self, group: GroupId) -> list[StreamRow]:
        """The existing rows of a group in sibling order."""
        return sorted(self._groups.get(group, ()), key=lambda row: row.request.sibling)

    def describe_missing(self, name: str, request: BatchRequest) -> str:
        """A sentence about what is missing for a request."""
        consumer = self.consumer(name)
        if not request.groups:
            return f"{name!r} has {consumer.ready.num_rows} rows ready and requested {request.min_rows}"
        return "; ".join(self._describe_group(consumer, group) for group in request.groups)

    def _describe_group(self, consumer: StreamConsumer, group: GroupId) -> str:
        rows = self.group_rows(group)
        missing = [
            name
            for name, bit in self.field_bits.items()
            if consumer.needs & bit and not all(row.produced & bit for row in rows)
        ]
        num_taken = sum(bool(row.offered & consumer.bit and not row.queued & consumer.bit) for row in rows)
        status = f"without {', '.join(missing)}" if missing else f"{num_taken} on lease or consumed"
        return f"group {group}: has {len(rows)} of {consumer.expected_size(group)} rows, {status}"

    def _take_groups(self, consumer: StreamConsumer, groups: Sequence[GroupId]) -> list[StreamRow]:
        """All rows of these groups if every group is complete and ready, else none."""
        if not consumer.group_size:
            raise StreamError(
                f"consumer {consumer.name!r} has no group_size and requested groups; register it with one"
            )
        rows: list[StreamRow] = []
        for group in dict.fromkeys(groups):
            found = self.group_rows(group)
            is_complete = len(found) >= consumer.expected_size(group)
            if not is_complete or not all(row.queued & consumer.bit for row in found):
                return []
            rows += found
        for row in rows:
            consumer.ready.remove(row)
        return rows

    def _add_block(self, block: Block) -> None:
        block.field_mask = self.field_mask(block.names)
        block.num_live_rows = block.num_rows
        self.num_bytes += block.location.num_bytes

    def _remove(self, row: StreamRow) -> None:
        for consumer in self.consumers.values():
            if row.queued & consumer.bit:
                consumer.ready.remove(row)
        del self.rows[row.index]
        self._requests.remove(row.request)
        siblings = self._groups[row.group]
        siblings.remove(row)
        if not siblings:
            del self._groups[row.group]
        for block, _ in row.blocks:
            block.num_live_rows -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: Block) -> None:
        if not block.num_live_rows and not block.num_leases:
            self.num_bytes -= block.location.num_bytes
            self.freed_blocks.append(block)

    def _held_lease(self, lease_id: int, client: str, now_s: float) -> StreamLease:
        """The lease of a client. Raises StreamError if it has ended or belongs to another client."""
        self.expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None and 0 < lease_id <= self._num_leases:
            raise StreamError(
                f"lease {lease_id} has ended: its rows are consumed or leased to another client; "
                "discard the results and get new rows (for slow work renew the lease or use a longer one)"
            )
        if lease is None or lease.client != client:
            raise StreamError(f"this client has no lease {lease_id}: get rows first, and pass their lease")
        return lease

    def _end(self, lease: StreamLease) -> None:
        del self._leases[lease.lease_id]
        self._timed.pop(lease.lease_id, None)
        for block in lease.blocks:
            block.num_leases -= 1
            self._free_if_unused(block)

    def _release(self, lease: StreamLease) -> None:
        self._end(lease)
        for row in reversed(lease.rows):
            if row.index in self.rows:  # not cleared meanwhile
                lease.consumer.ready.push(row, is_first=True)


def _blocks_of(rows: Sequence[StreamRow], consumer: StreamConsumer) -> dict[Block, list[tuple[int, int]]]:
    """The blocks with fields that the consumer needs: (position in `rows`, row of the block)."""
    blocks: dict[Block, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for block, position in row.blocks:
            if block.field_mask & consumer.needs:
                blocks.setdefault(block, []).append((number, position))
    return blocks


@dataclass
class StreamConsumer:
    """A named consumer: the fields it needs and the rows that are ready for it.

    Two consumers are equal if they were registered with the same arguments.
    """

    name: str
    bit: int = field(compare=False)  # in the masks of rows
    needs: int  # mask of its fields
    group_size: int
    by_version: bool
    lease_s: float
    held_out_size: int

    def __post_init__(self) -> None:
        self.ready = ReadyQueue(self)

    def expected_size(self, group: GroupId) -> int:
        """Number of rows of a complete group."""
        return self.held_out_size if group.is_held_out else self.group_size

    def offer(self, row: StreamRow) -> None:
        """Queue a row once, as soon as it has all fields.

        Consumers of groups with `held_out_size = 0` get no rows of held-out prompts.
        """
        if self.group_size and row.request.is_held_out and not self.held_out_size:
            return
        if row.produced & self.needs == self.needs and not row.offered & self.bit:
            row.offered |= self.bit
            self.ready.push(row)


class ReadyQueue:
    """The rows that are ready for one consumer, in units of single rows or whole groups.

    It is one queue, or one per version with the oldest version first. All operations take constant time for
    each row.
    """

    def __init__(self, consumer: StreamConsumer) -> None:
        self.num_rows = 0  # of complete units
        self._consumer = consumer
        self._queues: dict[int, OrderedDict[UnitKey, list[StreamRow]]] = {}  # complete units by version
        self._version_of: dict[UnitKey, int] = {}  # key of the unit's queue
        self._partial: dict[UnitKey, list[StreamRow]] = {}  # rows of incomplete groups

    def push(self, row: StreamRow, is_first: bool = False) -> None:
        """Append a row, or put a released one first. A group is queued once it is complete."""
        row.queued |= self._consumer.bit
        key, unit = self._key(row), [row]
        if self._consumer.group_size:
            unit = self._partial.setdefault(key, [])
            unit.append(row)
            if len(unit) < self._consumer.expected_size(row.group):
                return
            del self._partial[key]
            unit.sort(key=lambda row: row.request.sibling)
        self.num_rows += len(unit)
        version = self._version_of[key] = row.version if self._consumer.by_version else 0
        queue = self._queues.setdefault(version, OrderedDict())
        queue[key] = unit
        if is_first:
            queue.move_to_end(key, last=False)

    def remove(self, row: StreamRow) -> None:
        """Remove a queued row; its group is then incomplete."""
        row.queued &= ~self._consumer.bit
        key = self._key(row)
        others = self._take(key) if key in self._version_of else self._partial.pop(key)
        others.remove(row)
        if others:
            self._partial[key] = others

    def pop(self, request: BatchRequest) -> list[StreamRow]:
        """Take the next units within the limits of the request; none before `min_rows` are ready."""
        taken: list[StreamRow] = []
        if self.num_rows < max(1, request.min_rows):
            return taken
        num_tokens = 0
        for version in sorted(self._queues):
            while queue := self._queues.get(version):
                key, unit = next(iter(queue.items()))
                num_tokens += sum(row.num_tokens for row in unit)
                is_too_long = request.max_tokens is not None and num_tokens > request.max_tokens
                if taken and (is_too_long or len(taken) + len(unit) > request.max_rows):
                    return taken
                taken += self._take(key)
                for row in unit:
                    row.queued &= ~self._consumer.bit
        return taken

    def _key(self, row: StreamRow) -> UnitKey:
        return row.group if self._consumer.group_size else row.index

    def _take(self, key: UnitKey) -> list[StreamRow]:
        """Take a complete unit out of its queue."""
        version = self._version_of.pop(key)
        unit = self._queues[version].pop(key)
        if not self._queues[version]:
            del self._queues[version]
        self.num_rows -= len(unit)
        return unit
