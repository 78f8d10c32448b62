"""The two ends of a move: what is done to blocks and files at each poll.

While the source decodes, it publishes full blocks and the destination copies them; then the
request stops, and only the block it ends in is left to copy. Every block's words are added up
on both sides. Work is bounded per poll, for a decode step waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.rows import Draft
from dora.engine.sequence import Sequence
from dora.handover.files import Handover, KVFormat, Snapshot, TransferError
from dora.handover.moves import Receive, Send
from dora.handover.pool import Blocks, Peer, add_up, block_bytes

_BYTES_PER_POLL = 4 * 2**20


def _num_per_poll(pool: Blocks) -> int:
    return max(1, _BYTES_PER_POLL // block_bytes(pool))


class Lease:
    """Runs out `seconds` after the last progress, or the start."""

    def __init__(self, seconds: float, now_s: float) -> None:
        self._seconds, self._until_s = seconds, now_s + seconds
        self._num_copied = 0

    def is_over(self, num_copied: int, now_s: float) -> bool:
        """Look at what has been copied so far: anything more renews the lease."""
        if num_copied != self._num_copied:
            self._num_copied, self._until_s = num_copied, now_s + self._seconds
        return now_s > self._until_s


class Outgoing:
    """A request on its way out of this engine."""

    def __init__(self, order: Send, files: Handover, pool: Blocks, now_s: float) -> None:
        """Raises OSError if the destination has made no table."""
        self.order, self.lease = order, Lease(order.lease_s, now_s)
        self.reason = ""  # to keep the request, as soon as there is one
        self.is_offered = False
        self.files = files
        self._pool = pool
        self._table = files.open_table() if order.carries_kv else None
        self._sums: list[int] = []

    @property
    def num_copied(self) -> int:
        """Blocks that the destination has copied so far."""
        return self._table.num_copied if self._table else 0

    def stream(self, sequence: Sequence, num_computed: int) -> bool:
        """Publish what is full; whether the destination has copied every full block."""
        if self._table is None:
            return True
        first, num_full = self.order.num_known_blocks, num_computed // BLOCK_SIZE
        start = first + len(self._sums)
        blocks = list(sequence.blocks[start : min(num_full, start + _num_per_poll(self._pool))])
        if blocks:
            self._sums += add_up(self._pool, blocks)
            self._table.publish(blocks)
        return self.num_copied == num_full - first

    def offer(self, sequence: Sequence, form: KVFormat, draft: Draft, now_s: float) -> None:
        """Write the snapshot of a request that stands still. Raises OSError, then nothing is offered."""
        num_computed = len(sequence.request.prompt_ids) + len(draft.token_ids) - 1
        blocks: list[int] = []
        if self._table:
            blocks = sequence.blocks[self.order.num_known_blocks : num_blocks_for(num_computed)]
            self._sums += add_up(self._pool, blocks[len(self._sums) :])
        snapshot = Snapshot(
            format=form if self._table else form.without_kv(),
            request=sequence.request,
            draft=draft,
            num_computed=num_computed,
            blocks=np.array(blocks, np.int64),
            sums=np.array(self._sums, np.uint64),
            stopped_s=now_s,
        )
        self.files.offer(snapshot)
        self.is_offered = True


class Incoming:
    """A request on its way into this engine; `sequence` is the place reserved for it."""

    def __init__(
        self,
        order: Receive,
        files: Handover,
        sequence: Sequence,
        num_known: int,
        extend: Callable[[Sequence, int], bool],
        pool: Blocks,
        peer: Peer | None,
        now_s: float,
    ) -> None:
        """`extend` gives the sequence so many blocks, if free; `pool` is this engine's, `peer` the source's.

        Without a `peer` no KV comes. Raises OSError if no table can be made.
        """
        self.order, self.lease = order, Lease(order.lease_s, now_s)
        self.reason = ""  # to give up, as soon as there is one
        self.files = files
        self.copy_s = 0.0
        self._sequence, self._num_known, self._extend = sequence, num_known, extend
        self._pool, self._peer = pool, peer
        num_blocks = num_blocks_for(order.request.max_length)
        self._table = None if peer is None else files.open_table(num_blocks)
        self._sums: list[int] = []

    @property
    def num_copied(self) -> int:
        """Blocks copied so far."""
        return len(self._sums)

    @property
    def is_bare(self) -> bool:
        """Whether it comes without its KV."""
        return self._table is None

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the prompt whose KV was here from the start."""
        return self._num_known * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        """Bytes copied so far."""
        return self.num_copied * block_bytes(self._pool)

    def copy_published(self) -> None:
        """Copy some of what the source has published. Raises TransferError for blocks that cannot be."""
        if self._table is None:
            return
        blocks = self._table.published(self.num_copied)
        if blocks:
            self._copy(blocks[: _num_per_poll(self._pool)])
            self._table.num_copied = self.num_copied

    def finish(self, snapshot: Snapshot, form: KVFormat) -> None:
        """Copy what is left, and compare everything; without KV, have blocks for it.

        Raises TransferError naming what is wrong.
        """
        snapshot.check(form if self._table else form.without_kv(), self.order.request)
        num_blocks = num_blocks_for(snapshot.num_computed)
        if self._table is None:
            if not self._extend(self._sequence, num_blocks):
                raise TransferError("too few KV blocks are free")
            return
        if not len(snapshot.blocks) == num_blocks - self._num_known >= len(self._sums):
            raise TransferError("its snapshot contradicts itself")
        self._copy(snapshot.blocks[len(self._sums) :].tolist())
        wrong = np.flatnonzero(np.array(self._sums, np.uint64) != snapshot.sums)
        if wrong.size:
            raise TransferError(f"{wrong.size} of its {len(self._sums)} KV blocks arrived damaged")

    def _copy(self, blocks: list[int]) -> None:
        started_s = time.perf_counter()
        start = self._num_known + len(self._sums)
        stop = start + len(blocks)
        if not self._extend(self._sequence, stop):
            raise TransferError("too few KV blocks are free")
        own = self._sequence.blocks[start:stop]
        assert self._peer is not None
        if blocks and not 0 <= min(blocks) <= max(blocks) < len(self._peer):
            raise TransferError("a block of it is not in the source's pool")
        try:
            self._peer.copy(blocks, self._pool, own)
        except OSError as error:
            raise TransferError(f"the source's KV cannot be read: {error}") from error
        self._sums += add_up(self._pool, own)
        self.copy_s += time.perf_counter() - started_s
