"""The sample stream in one process: the ledger says who may have what, the storage has the bytes.

Nothing here waits: a full stream answers None, and so does a consumer's line with too little in it. Who
serves others calls `settle` before it tells anybody what was done.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora.core.records import GroupId
from dora.errors import StreamError
from dora.stream.batch import Batch, Part
from dora.stream.fields import Field, Given, Packing
from dora.stream.keeper import Keeper, numbers_of
from dora.stream.ledger import Lease, Ledger
from dora.stream.lines import Block, NewRow, Want
from dora.stream.segments import Arena, Heap, Place, Reader, is_full, is_segment, owner_of


class Stream:
    """Rows of declared fields, for declared consumers."""

    def __init__(
        self,
        fields: Iterable[Field],
        folder: Path | None = None,
        *,
        record: Path | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        memory_bytes: int | None = None,
        spill: Path | None = None,
    ) -> None:
        """Blocks lie in files of `folder`, which other processes map, or else in this process's memory.

        With a `record`, an SQLite file, what is in the stream outlives its processes, and is found again.
        Over `max_rows` or `max_bytes` nothing new comes in; over `memory_bytes` the oldest blocks that
        nobody reads are moved to files of the folder `spill`. Raises StreamError.
        """
        if folder is None and (record or spill):
            raise StreamError("a stream with a record or a spill folder needs a folder for its blocks")
        if (memory_bytes is None) != (spill is None):
            raise StreamError("memory_bytes and spill say together when to move blocks, and where to")
        self.fields = {field.name: field for field in fields}
        self.folder, self.folders = folder, [path for path in (folder, spill) if path is not None]
        self.ledger = Ledger(self.fields, max_rows, max_bytes)
        self._storage: Heap | Arena = Heap() if folder is None else Arena(folder, secrets.token_hex(8))
        self._spilled = None if spill is None else Arena(spill, secrets.token_hex(8))
        self._memory_bytes, self._resident_bytes = memory_bytes, 0
        self._resident: dict[Block, None] = {}  # oldest first, if they may be spilled
        self._num_live: Counter[str] = Counter()  # blocks, by segment of other owners
        self._gone: set[str] = set()  # owners that let go of their segments
        self._released: dict[str, Counter[str]] = defaultdict(Counter)  # by owner, not yet told
        self._keeper = None if record is None else Keeper(record, self.fields)
        self._reader = Reader(*self.folders)
        if self._keeper is not None:
            try:
                self._restore(self._keeper)
            except StreamError:
                self._keeper.close()
                raise

    def declare(self, name: str, fields: Sequence[str], **rules: Any) -> None:
        """A consumer and what it needs, as `Ledger.declare`."""
        is_new = name not in self.ledger.consumers
        self.ledger.declare(name, fields, **rules)
        if self._keeper is not None and is_new:  # what all others have consumed it will never see
            self._keeper.done(None, self._keeper.gone(self.ledger.rows))
            self._keeper.declare(name, {"fields": [*fields], **rules})

    def put(self, rows: Sequence[NewRow], columns: Given) -> range | None:
        """New rows with their first columns; their indices, or None if it is full. Raises StreamError."""
        packing = self._checked(columns, len(rows))
        self.ledger.check_new(rows)
        if not self.ledger.has_room(len(rows), packing.num_bytes):
            return None
        try:
            place = self.write(packing)
        except OSError as error:
            if not is_full(error):
                raise
            return None
        return self.admit(rows, packing.names, place)

    def fill(self, indices: Sequence[int], columns: Given) -> None:
        """Further columns of rows; never refused for want of room. Raises StreamError."""
        packing = self._checked(columns, len(indices))
        self.ledger.check_fill(indices, packing.names)
        self.extend(indices, packing.names, self.write(packing))

    def write(self, packing: Packing) -> Place:
        """Put the bytes of a block into the storage."""
        place, view = self._storage.reserve(packing.num_bytes)
        packing.write(view)
        return place

    def admit(self, rows: Sequence[NewRow], names: Sequence[str], place: Place) -> range | None:
        """As `put`, of a block that is written already, by somebody else perhaps."""
        self.ledger.mask(names)
        self.ledger.check_new(rows)
        if not self.ledger.has_room(len(rows), place.num_bytes):
            return None
        block = self._block(names, len(rows), place)
        indices = self.ledger.add(rows, block)
        if self._keeper is not None:
            self._keeper.put(block, indices, rows)
        return indices

    def extend(self, indices: Sequence[int], names: Sequence[str], place: Place) -> None:
        """As `fill`, of a block that is written already."""
        self.ledger.check_fill(indices, names)
        block = self._block(names, len(indices), place)
        self.ledger.fill(indices, block)
        if self._keeper is not None:
            self._keeper.put(block, indices, [self.ledger.rows[index] for index in indices])

    def lease(self, consumer: str, client: str, want: Want, now_s: float) -> Lease | None:
        """What is wanted, or None while it is not there. Raises StreamError."""
        return self.ledger.take(consumer, client, want, now_s)

    def batch(self, lease: Lease) -> Batch:
        """The rows of a lease, with views of the columns its consumer needs."""
        parts = [
            Part(block.names, block.num_rows, self.view(block), np.array(pairs, np.int32).reshape(-1, 2))
            for block, pairs in lease.blocks.items()
        ]
        return Batch(lease.number, numbers_of_lease(lease), self.fields, parts)

    def view(self, block: Block) -> memoryview:
        """The bytes of a block."""
        place = block.place
        assert isinstance(place, Place)
        if isinstance(self._storage, Heap):
            return self._storage.view(place)
        return self._reader.view(place)

    def commit(self, lease: int, client: str, now_s: float) -> None:
        """The rows of a lease are consumed by its consumer. Raises StreamError."""
        ended = self.ledger.commit(lease, client, now_s)
        if self._keeper is not None:
            self._keeper.done(ended.consumer.name, [row.index for row in ended.rows])

    def clear(self, groups: Iterable[GroupId]) -> None:
        """Forget groups that nobody needs any more."""
        indices = self.ledger.clear(groups)
        if self._keeper is not None:
            self._keeper.done(None, indices)

    def settle(self) -> None:
        """Free what nobody needs, spill what there is no room for, and make the record durable.

        What is freed is written over or removed only when the record does not name it any more.
        """
        left: list[Place] = []
        while self.ledger.free:
            left.append(self._free(self.ledger.free.pop()))
        if self._spilled is not None:
            left += self._spill(self._spilled)
        if self._keeper is not None:
            self._keeper.commit()
        for place in left:
            self._release(place.segment)

    def released(self, owner: str) -> Counter[str]:
        """How many blocks of which of its segments an owner may use again; said once."""
        return self._released.pop(owner, Counter())

    def let_go(self, owner: str) -> None:
        """An owner of segments is gone: they are removed as they become empty."""
        self._gone.add(owner)
        self._released.pop(owner, None)
        if self.folder is not None:
            for path in self.folder.glob(f"{owner}-*"):
                self._remove_if_empty(path.name)

    def knows(self, owner: str) -> bool:
        """Whether an owner of segments is this storage, or has been here."""
        return owner in self._gone or any(
            isinstance(own, Arena) and own.owner == owner for own in (self._storage, self._spilled)
        )

    def close(self) -> None:
        """What is recorded stays; without a record, the blocks go, also those that clients have written."""
        self.settle()
        if self._keeper is not None:
            self._keeper.close()
            return
        self._storage.close()
        if self._spilled is not None:
            self._spilled.close()
        for path in self.folder.iterdir() if self.folder is not None else ():
            if is_segment(path.name):
                path.unlink(missing_ok=True)

    def _checked(self, columns: Given, num_rows: int) -> Packing:
        return Packing(self.fields, columns, num_rows)

    def _block(self, names: Sequence[str], num_rows: int, place: Place) -> Block:
        block = Block(tuple(names), num_rows, place.num_bytes, place)
        self._count(block, place)
        return block

    def _count(self, block: Block, place: Place, is_resident: bool = True) -> None:
        if isinstance(self._storage, Arena) and owner_of(place.segment) != self._storage.owner:
            self._num_live[place.segment] += 1
        if self._spilled is not None and is_resident:
            self._resident[block] = None
            self._resident_bytes += place.num_bytes

    def _free(self, block: Block) -> Place:
        if block in self._resident:
            del self._resident[block]
            self._resident_bytes -= block.num_bytes
        if self._keeper is not None:
            self._keeper.freed(block)
        assert isinstance(block.place, Place)
        return block.place

    def _release(self, segment: str) -> None:
        owner = owner_of(segment)
        for own in (self._storage, self._spilled):
            if isinstance(own, Heap) or (own is not None and own.owner == owner):
                own.release(segment)
                return
        self._num_live[segment] -= 1
        if owner in self._gone:
            self._remove_if_empty(segment)
        else:
            self._released[owner][segment] += 1

    def _remove_if_empty(self, segment: str) -> None:
        if self._num_live[segment] <= 0:
            del self._num_live[segment]
            for folder in self.folders if is_segment(segment) else ():
                (folder / segment).unlink(missing_ok=True)

    def _spill(self, spilled: Arena) -> list[Place]:
        """Move blocks into what was free before; the places that they have left."""
        assert self._memory_bytes is not None
        left: list[Place] = []
        victims, excess = [], self._resident_bytes - self._memory_bytes
        for block in self._resident:
            if excess <= 0:
                break
            if not block.num_leases:
                victims.append(block)
                excess -= block.num_bytes
        for block in victims:
            try:
                place, into = spilled.reserve(block.num_bytes)
            except OSError as error:
                if not is_full(error):
                    raise
                break  # they stay where they are, until there is room
            into[:] = self.view(block)
            old, block.place = block.place, place
            del self._resident[block]
            self._resident_bytes -= block.num_bytes
            if self._keeper is not None:
                self._keeper.moved(block)
            assert isinstance(old, Place)
            left.append(old)
        return left

    def _restore(self, keeper: Keeper) -> None:
        """What a former life left: rows, consumers, what they consumed; its owners are gone."""
        for block, indices, rows in keeper.blocks():
            assert isinstance(block.place, Place)
            self._count(block, block.place, is_resident=self._folder_of(block.place) == self.folder)
            self._gone.add(owner_of(block.place.segment))
            self.ledger.restore(indices, rows, block)
        for name, rules in keeper.consumers():
            self.ledger.declare(name, **rules)
        for consumer, indices in keeper.all_done():
            self.ledger.restore_done(consumer, indices)
        for folder in self.folders:
            for path in folder.iterdir():
                if is_segment(path.name):
                    self._gone.add(owner_of(path.name))
                    self._remove_if_empty(path.name)
        self.settle()

    def _folder_of(self, place: Place) -> Path:
        """Where a block of a former life lies. Raises StreamError if it is lost."""
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                if (folder / place.segment).stat().st_size >= place.offset + place.num_bytes:
                    return folder
        raise StreamError(
            f"the record names {place}, and it is not in {' or '.join(map(str, self.folders))}: put the "
            "segments back (a memory file system is empty after the power went), or take an empty record"
        )


def numbers_of_lease(lease: Lease) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[rows, 6] of a lease, as a batch has them."""
    return numbers_of([row.index for row in lease.rows], lease.rows)
