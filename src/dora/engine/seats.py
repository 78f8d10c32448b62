"""Where a request has its tokens and KV: in a row and its blocks, or in host memory while it is swapped out.

It comes back to whatever row and blocks it is given, with the same tokens, log-probs and KV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.rows import Draft, Rows
from dora.engine.sequence import Sequence


class Kept(NamedTuple):
    draft: Draft
    kv: Tensor  # [blocks, ...], in host memory


class Seats:
    """The rows of an engine with their block tables [rows, blocks], into a pool of KV [block, ...].

    A row is full `num_ahead` steps before it has no place for its next input.
    """

    def __init__(self, rows: Rows, tables: Tensor, kv: Tensor, num_ahead: int = 0) -> None:
        self._rows, self._tables, self._kv, self._num_ahead = rows, tables, kv, num_ahead
        self._num_places = np.zeros(len(tables), np.int64)  # tokens that the blocks of a row hold
        self._checked = rows.active
        self._num_safe_steps = 0  # of the rows checked, in which none gets full
        self._kept: dict[RequestId, Kept] = {}

    def __len__(self) -> int:
        """Requests in host memory."""
        return len(self._kept)

    def seat(self, sequence: Sequence) -> None:
        """Make a row ready to decode; its KV is there, or comes at once."""
        self._rows.seat(sequence)
        self.grow(sequence)

    def grow(self, sequence: Sequence) -> None:
        """The row has more blocks."""
        # Torch uses pinned memory again only once it has been copied from.
        blocks = torch.tensor(sequence.blocks, dtype=torch.int64, pin_memory=self._tables.is_cuda)
        self._tables[sequence.row, : len(blocks)].copy_(blocks, non_blocking=True)
        self._num_places[sequence.row] = len(sequence.blocks) * BLOCK_SIZE

    def full(self) -> list[int]:
        """Which active rows (by order) need another block; to be asked once per step."""
        rows = self._rows
        if self._num_safe_steps and self._checked is rows.active:
            self._num_safe_steps -= 1
            return []
        num_left = self._num_places[rows.active] - rows.active_positions() - self._num_ahead
        self._checked = rows.active
        self._num_safe_steps = max(0, int(num_left.min(initial=BLOCK_SIZE)) - 1)
        found: list[int] = np.flatnonzero((num_left <= 0) & rows.goes_on(self._num_ahead)).tolist()
        return found

    def has_next(self) -> bool:
        """Whether every active row goes on after its next token, and has a place for that as an input."""
        rows = self._rows
        has_place = self._num_places[rows.active] > rows.active_positions() + 1
        return bool((has_place & rows.goes_on(1)).all())

    def swap_out(self, sequence: Sequence) -> int:
        """Copy what a request has, for its row and blocks are to be overwritten; the bytes of KV."""
        blocks = sequence.blocks[: num_blocks_for(self._rows.num_computed(sequence))]
        kv = self._kv
        on_host = torch.empty((len(blocks), *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)
        on_host.copy_(kv[torch.tensor(blocks)])
        self._kept[sequence.request.id] = Kept(self._rows.draft(sequence), on_host)
        return on_host.nbytes

    def swap_in(self, sequence: Sequence, num_known: int) -> None:
        """Give a request back what it had, but for the first `num_known` blocks, which hold it already."""
        draft, on_host = self._kept.pop(sequence.request.id)
        self.seat(sequence)
        self._rows.resume(sequence, draft)
        blocks = torch.tensor(sequence.blocks[num_known : len(on_host)], dtype=torch.int64)
        self._kv[blocks] = on_host[num_known:].to(self._kv.device)

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens of the answer of a request in host memory."""
        return len(self._kept[request_id].draft.token_ids)

    def forget(self, request_id: RequestId) -> None:
        """A request is given up, if it is in host memory."""
        self._kept.pop(request_id, None)
