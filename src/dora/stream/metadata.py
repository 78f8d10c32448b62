"""Metadata of the stream: which groups exist, which fields they have, and which consumer may lease them.

Pure: no clock, no bytes, no sockets. The rows of a group are its samples; they are put, filled, leased and
consumed together. A group is queued for each consumer as soon as it has all fields that the consumer needs,
so no operation scans all groups. A group is removed after its last consumer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError

NO_TIMEOUT = float("inf")


class SampleMeta(NamedTuple):
    """The identity of a new row."""

    request: RequestId
    version: int
    num_tokens: int = 0


class BatchRequest(NamedTuple):
    """What a consumer requests: one `group` by name, or the next groups of its queue.

    From the queue it gets at most `max_rows` rows and `max_tokens` tokens, but at least one group.
    """

    max_rows: int = 1
    max_tokens: int | None = None
    group: GroupId | None = None


class ConsumerDeclaration(NamedTuple):
    """A consumer, the fields it needs, and how long its leases last; then another client gets the rows."""

    name: str
    fields: Sequence[str]
    lease_s: float = NO_TIMEOUT


class BlockLocation(NamedTuple):
    """Where the bytes of a block are."""

    segment: str
    offset: int
    num_bytes: int


@dataclass(eq=False, slots=True)
class Block:
    """Fields `names` of some groups, packed in shared memory."""

    names: tuple[str, ...]
    num_rows: int
    location: BlockLocation
    field_mask: int = 0
    num_groups: int = 0  # that exist
    num_leases: int = 0


@dataclass(eq=False, slots=True)
class StreamGroup:
    """The samples of a group. Bit masks hold its production status (by field) and its status by consumer."""

    group: GroupId
    samples: Sequence[SampleMeta]  # in sibling order
    version: int  # the oldest one of a sample
    num_tokens: int
    blocks: list[tuple[Block, int]] = field(default_factory=list)  # and the position of the first row in each
    produced: int = 0  # fields that are written
    queued: int = 0  # consumers in whose queue it is
    consumed: int = 0  # consumers that committed it


StreamRow = tuple[StreamGroup, int]  # a sample, by its group and its position there


@dataclass(eq=False, slots=True)
class StreamLease:
    """Rows that a client may read until it commits or the lease expires, and the blocks it reads."""

    lease_id: int
    consumer: StreamConsumer
    client: str
    rows: list[StreamRow]
    blocks: dict[Block, list[tuple[int, int]]]  # (row of the lease, row of the block)
    expires_s: float

    @property
    def groups(self) -> list[StreamGroup]:
        return [*dict.fromkeys(group for group, _ in self.rows)]


class MetadataController:
    """The groups and consumers of a stream. The owner passes the time."""

    def __init__(self, names: Iterable[str], consumers: Iterable[ConsumerDeclaration]) -> None:
        """`names` of the fields. Raises StreamError if a consumer needs another field."""
        self.field_bits = {name: 1 << i for i, name in enumerate(names)}
        self.consumers = {
            declared.name: StreamConsumer(declared, 1 << i, self.field_mask(declared.fields))
            for i, declared in enumerate(consumers)
        }
        self.groups: dict[GroupId, StreamGroup] = {}
        self.num_bytes = 0
        self.freed_blocks: list[Block] = []  # no longer referenced; the storage takes them from here
        self._leases: dict[int, StreamLease] = {}
        self._timed: dict[int, StreamLease] = {}  # those that expire, which are few
        self._num_leases = 0

    @property
    def num_rows(self) -> int:
        return sum(len(group.samples) for group in self.groups.values())

    def field_mask(self, names: Iterable[str]) -> int:
        """Raises StreamError for a field that is not declared."""
        mask = 0
        for name in names:
            if name not in self.field_bits:
                declared = ", ".join(self.field_bits)
                raise StreamError(f"field {name!r} is not declared; declared are {declared}")
            mask |= self.field_bits[name]
        return mask

    def check_new(
        self, samples: Sequence[SampleMeta], names: Sequence[str], num_rows: int
    ) -> list[StreamGroup]:
        """The new groups.

        Raises StreamError unless these are whole new groups, one after the other, in sibling order.
        """
        self.field_mask(names)
        _check_num_rows(num_rows, len(samples))
        new: dict[GroupId, StreamGroup] = {}
        for name, found in groupby(samples, lambda sample: sample.request.group):
            siblings = [*found]
            if name in self.groups or name in new:
                raise StreamError(f"group {name} exists already: put a group once, then fill further columns")
            if [sample.request.sibling for sample in siblings] != [*range(len(siblings))]:
                raise StreamError(f"group {name} is incomplete: put all its samples together, in order")
            version, num_tokens = min(s.version for s in siblings), sum(s.num_tokens for s in siblings)
            new[name] = StreamGroup(name, siblings, version, num_tokens)
        return [*new.values()]

    def add(self, groups: Sequence[StreamGroup], block: Block) -> None:
        """Add groups, which `check_new` has returned, with their first columns."""
        self.groups.update((group.group, group) for group in groups)
        self.fill(groups, block)

    def check_fill(self, groups: Iterable[GroupId], names: Sequence[str], num_rows: int) -> list[StreamGroup]:
        """The groups, each once, although `StreamBatch.groups` names one for each row.

        Raises StreamError for a group that does not exist, or a column that it has already.
        """
        mask, found = self.field_mask(names), []
        for name in dict.fromkeys(groups):
            if (group := self.groups.get(name)) is None:
                raise StreamError(f"group {name} does not exist: never put, cleared, or consumed by all")
            if group.produced & mask:
                repeated = ", ".join(field for field in names if self.field_bits[field] & group.produced)
                raise StreamError(f"group {name} has {repeated} already: a column is written once")
            found.append(group)
        _check_num_rows(num_rows, sum(len(group.samples) for group in found))
        return found

    def fill(self, groups: Iterable[StreamGroup], block: Block) -> None:
        """Add columns to groups, which `check_fill` has returned, and queue the groups for consumers."""
        block.field_mask = self.field_mask(block.names)
        self.num_bytes += block.location.num_bytes
        consumers = [consumer for consumer in self.consumers.values() if consumer.needs & block.field_mask]
        first = 0
        for group in groups:
            group.blocks.append((block, first))
            first += len(group.samples)
            block.num_groups += 1
            group.produced |= block.field_mask
            for consumer in consumers:
                if consumer.can_read(group):
                    consumer.push(group)

    def lease(self, name: str, client: str, request: BatchRequest, now_s: float) -> StreamLease | None:
        """Lease the requested groups; None while they are not ready. Raises StreamError."""
        consumer = self.consumer(name)
        if request.group is None:
            groups = consumer.next_groups(request)
        else:
            found = self.groups.get(request.group)
            groups = [found] if found is not None and found.queued & consumer.bit else []
        if not groups:
            return None
        for group in groups:
            consumer.remove(group)
        rows = [(group, sibling) for group in groups for sibling in range(len(group.samples))]
        self._num_leases += 1
        expires_s = now_s + consumer.lease_s
        lease = StreamLease(
            self._num_leases, consumer, client, rows, self._blocks_of(rows, consumer), expires_s
        )
        for block in lease.blocks:
            block.num_leases += 1
        self._leases[lease.lease_id] = lease
        if lease.expires_s < NO_TIMEOUT:
            self._timed[lease.lease_id] = lease
        return lease

    def leased_rows(self, name: str, requests: Sequence[RequestId]) -> StreamLease:
        """Rows that some client of the consumer has on lease, e.g. for the other ranks of a trainer.

        The result has lease id 0: it cannot be committed, and its blocks last as long as the actual lease.
        Raises StreamError.
        """
        consumer, rows = self.consumer(name), []
        if len({*requests}) < len(requests) or not requests:
            raise StreamError("a row is repeated, or there is none: name each row once")
        for request in requests:
            group, sibling = self.groups.get(request.group), request.sibling
            if group is None or not consumer.has_leased(group) or not 0 <= sibling < len(group.samples):
                raise StreamError(
                    f"row {request} is not on lease to {name!r}: another client must get it first"
                )
            rows.append((group, sibling))
        return StreamLease(0, consumer, "", rows, self._blocks_of(rows, consumer), NO_TIMEOUT)

    def commit(self, lease_id: int, client: str, now_s: float) -> None:
        """Mark the groups of a lease as consumed by its consumer. Raises StreamError."""
        lease = self._held_lease(lease_id, client, now_s)
        self._end(lease)
        all_bits = (1 << len(self.consumers)) - 1
        for group in lease.groups:
            group.consumed |= lease.consumer.bit
            if group.consumed == all_bits and self._exists(group):
                self._remove(group)

    def release(self, lease_id: int, client: str, now_s: float) -> None:
        """End a lease; its groups go to the front of the queue. Raises StreamError."""
        self._release(self._held_lease(lease_id, client, now_s))

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
        for name in groups:
            if (group := self.groups.get(name)) is not None:
                self._remove(group)

    def consumer(self, name: str) -> StreamConsumer:
        """Raises StreamError if it is not declared."""
        if name not in self.consumers:
            raise StreamError(f"consumer {name!r} is not declared; declared are {', '.join(self.consumers)}")
        return self.consumers[name]

    def describe_missing(self, name: str, request: BatchRequest) -> str:
        """A sentence about what is missing for a request."""
        consumer = self.consumer(name)
        if request.group is None:
            return f"no group is ready for {name!r}"
        if (group := self.groups.get(request.group)) is None:
            return f"group {request.group} is not there"
        missing = [
            field
            for field, bit in self.field_bits.items()
            if consumer.needs & bit and not group.produced & bit
        ]
        status = f"has no {', '.join(missing)}" if missing else "is on lease or consumed"
        return f"group {request.group} {status}"

    def _exists(self, group: StreamGroup) -> bool:
        """Whether a leased group has not been cleared meanwhile."""
        return self.groups.get(group.group) is group

    def _blocks_of(
        self, rows: Sequence[StreamRow], consumer: StreamConsumer
    ) -> dict[Block, list[tuple[int, int]]]:
        """The blocks with fields that the consumer needs: (position in `rows`, row of the block)."""
        blocks: dict[Block, list[tuple[int, int]]] = {}
        for number, (group, sibling) in enumerate(rows):
            for block, first in group.blocks:
                if block.field_mask & consumer.needs:
                    blocks.setdefault(block, []).append((number, first + sibling))
        return blocks

    def _remove(self, group: StreamGroup) -> None:
        for consumer in self.consumers.values():
            if group.queued & consumer.bit:
                consumer.remove(group)
        del self.groups[group.group]
        for block, _ in group.blocks:
            block.num_groups -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: Block) -> None:
        if not block.num_groups and not block.num_leases:
            self.num_bytes -= block.location.num_bytes
            self.freed_blocks.append(block)

    def _held_lease(self, lease_id: int, client: str, now_s: float) -> StreamLease:
        """The lease of a client. Raises StreamError if it has ended or belongs to another client."""
        self.expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None and 0 < lease_id <= self._num_leases:
            raise StreamError(
                f"lease {lease_id} has ended: its rows are consumed or leased to another client; "
                "discard the results and get new rows (for slow work use a longer lease)"
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
        for group in reversed(lease.groups):
            if self._exists(group):
                lease.consumer.push(group, is_first=True)


def _check_num_rows(num_rows: int, expected: int) -> None:
    if num_rows != expected or not expected:
        raise StreamError(f"{num_rows} values for {expected} rows: pass one value for each row of each group")


class StreamConsumer:
    """A named consumer: the fields it needs, and the groups that are ready for it.

    The oldest version is first, then the group that was ready first. All operations take constant time for
    each group.
    """

    def __init__(self, declared: ConsumerDeclaration, bit: int, needs: int) -> None:
        """`bit` in the masks of groups; `needs` is the mask of its fields."""
        self.name, self.fields, self.lease_s = declared
        self.bit, self.needs = bit, needs
        self._queues: dict[int, OrderedDict[GroupId, StreamGroup]] = {}  # by version

    @property
    def has_ready(self) -> bool:
        """Whether any group is ready."""
        return bool(self._queues)

    def can_read(self, group: StreamGroup) -> bool:
        """Whether the group has all fields that the consumer needs."""
        return group.produced & self.needs == self.needs

    def has_leased(self, group: StreamGroup) -> bool:
        """Whether a client of the consumer has the group on lease."""
        return self.can_read(group) and not (group.queued | group.consumed) & self.bit

    def push(self, group: StreamGroup, is_first: bool = False) -> None:
        """Append a group, or put a released one first."""
        group.queued |= self.bit
        queue = self._queues.setdefault(group.version, OrderedDict())
        queue[group.group] = group
        if is_first:
            queue.move_to_end(group.group, last=False)

    def remove(self, group: StreamGroup) -> None:
        """Remove a queued group."""
        group.queued &= ~self.bit
        queue = self._queues[group.version]
        del queue[group.group]
        if not queue:
            del self._queues[group.version]

    def next_groups(self, request: BatchRequest) -> list[StreamGroup]:
        """The next groups within the limits of the request; they stay queued."""
        groups: list[StreamGroup] = []
        num_rows = num_tokens = 0
        for group in (group for version in sorted(self._queues) for group in self._queues[version].values()):
            num_rows += len(group.samples)
            num_tokens += group.num_tokens
            is_too_long = request.max_tokens is not None and num_tokens > request.max_tokens
            if groups and (is_too_long or num_rows > request.max_rows):
                break
            groups.append(group)
        return groups
