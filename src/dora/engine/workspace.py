"""All memory of an engine, allocated once: version slots, KV pool and step buffers.

Runner and kernels share it; a `Batch` says which rows of it a step uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.pool import make_pool
from dora.model.config import ModelConfig
from dora.model.decoder import rope_tables
from dora.model.weights import Layout

_ALIGNMENT = 16  # elements: a cache line of fp32


@dataclass(frozen=True)
class Batch:
    """The rows of a decode step, in order: int64 [N] each. Rows of one slot are neighbours."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def segments(self) -> list[tuple[int, int, int]]:
        """(slot, start, stop) of every run of rows that use the same weights."""
        slots = self.slots.tolist()
        edges = [at for at in range(len(slots) + 1) if at in (0, len(slots)) or slots[at] != slots[at - 1]]
        return [(slots[start], start, stop) for start, stop in pairwise(edges)]


class Workspace:
    """Tensors that runner and kernels share.

    weights      [version slots, >= numel]   one flat buffer per slot
    kv           [block, kv layer, 2, token, kv head, dim]: a block is one contiguous chunk
    routes       [block, token, mixture layer, k]   the experts each token was sent to, int16. They lie
                 in the last kv layers, and so go wherever their KV goes
    tables       [max_rows, blocks of the longest context], block numbers int64
    cos, sin     [max_context, dim]
    x, delta     [max_rows, hidden]   the residual stream and what is to be added to it
    hidden       [max_rows, hidden]   x after a norm
    qkv          [max_rows, (heads + 2 kv heads) * dim],  attended [max_rows, heads * dim]
    gate_up      [max_rows, 2 * intermediate],  gated [max_rows, intermediate]
    logits       [max_rows, vocab]

    With `pool`, kv lies in that file, where other processes can read it.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rows: int,
        max_context: int,
        version_slots: int,
        num_blocks: int,
        pool: Path | None = None,
    ) -> None:
        self.config = config
        self.layout = Layout(config)
        stride = -(-self.layout.numel // _ALIGNMENT) * _ALIGNMENT
        self.weights = torch.zeros(version_slots, stride)
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        shape = (num_blocks, config.num_kv_layers, 2, BLOCK_SIZE, kv_heads, dim)
        self.kv = torch.zeros(shape) if pool is None else torch.from_numpy(make_pool(pool, shape))
        routes = (BLOCK_SIZE, len(config.mixture_layers), config.num_experts_per_tok)
        spare = self.kv[:, config.num_hidden_layers :].flatten(1).view(torch.int16)
        self.routes = spare[:, : math.prod(routes)].unflatten(1, routes)
        self.tables = torch.zeros(max_rows, num_blocks_for(max_context), dtype=torch.int64)
        self.cos, self.sin = rope_tables(config, max_context)
        num_heads = config.num_attention_heads
        self.x, self.delta, self.hidden = (torch.zeros(max_rows, config.hidden_size) for _ in range(3))
        self.qkv = torch.zeros(max_rows, (num_heads + 2 * kv_heads) * dim)
        self.attended = torch.zeros(max_rows, num_heads * dim)
        self.gate_up = torch.zeros(max_rows, 2 * config.intermediate_size)
        self.gated = torch.zeros(max_rows, config.intermediate_size)
        self.logits = torch.zeros(max_rows, config.vocab_size)

    def slot(self, index: int) -> Tensor:
        """The flat weight buffer [numel] of a slot."""
        return self.weights[index, : self.layout.numel]
