"""Attention inside packed sequences: what a block mask would do.

Sequences of like lengths lie side by side in blocks, so that no mask is needed and hardly anything is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.decoder import Attend


def attend_in_blocks(blocks: Sequence[Tensor], found: Tensor | None = None) -> Attend:
    """Every sequence attends to itself alone, causally.

    `blocks` [B, L] hold the inputs of B sequences, filled up on the right, where causality hides what does
    not belong there; `found` [M] is where each input is among the blocks' flattened tokens. An input may be
    in several sequences: whatever is before it is the same in all of them.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [_attend(*(_rows(x, block) for x in (q, k, v))) for block in blocks]
        return torch.cat(parts) if found is None else _rows(torch.cat(parts), found)

    return attend


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, L, heads, D], k and v [B, L, kv heads, D] -> [B * L, heads, D]."""
    is_grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _rows(x: Tensor, ids: Tensor) -> Tensor:
    """x[ids], whose gradient is summed up row by row; far faster than that of indexing on a CPU."""
    found: Tensor = F.embedding(ids, x.flatten(1)).unflatten(-1, x.shape[1:])
    return found
