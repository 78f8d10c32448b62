"""All memory of an engine, allocated once: version slots, KV pool and step buffers.

Runner and kernels share it; a `Batch` says which rows of it a step uses. On a GPU all of it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.sequence import EngineError
from dora.model.config import ModelConfig
from dora.model.decoder import rope_tables
from dora.model.weights import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT = 16  # elements: a cache line of fp32
Memory = Callable[[tuple[int, ...]], Tensor]  # of a shape: zeros, of the engine's dtype
MAX_PADDING = 31  # rows that a version's part of a padded batch has at most beside its own


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
    """Tensors that runner and kernels share, of `dtype` unless said otherwise.

    weights      [version slots, >= numel]   one flat buffer per slot
    kv           [block, kv layer, 2, token, kv head, dim]: a block is one contiguous chunk
    routes       [block, token, mixture layer, k]   the experts each token was sent to, int16. They lie
                 in the last kv layers, and so go wherever their KV goes
    tables       [max_rows, blocks of the longest context], block numbers int64
    cos, sin     [max_context, dim], fp32
    x, delta     [step rows, hidden]   the residual stream and what is to be added to it
    hidden       [step rows, hidden]   x after a norm
    qkv          [step rows, (heads + 2 kv heads) * dim],  attended [step rows, heads * dim]
    gate_up      [step rows, 2 * intermediate],  gated [step rows, intermediate]
    logits       [step rows, vocab], fp32
    inputs       [4, step rows], int64: tokens, positions, rows and slots of a padded step

    A step has max_rows rows. If it is padded it has a few more: they belong to a row of `tables` beyond
    max_rows, whose one block beyond `num_blocks` takes the KV of padding. `kv_memory` makes kv, on the CPU,
    where others can read it.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rows: int,
        max_context: int,
        version_slots: int,
        num_blocks: int,
        kv_memory: Memory | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        is_padded: bool = False,
    ) -> None:
        self.config, self.device = config, _device(device)
        if dtype not in DTYPES:
            raise EngineError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
        if kv_memory is not None and (device, is_padded) != ("cpu", False):
            raise EngineError(
                f"KV from which requests can move is that of the CPU's kernels, not of {device}; "
                "set orchestrator.placement = static"
            )
        self.dtype = DTYPES[dtype]
        self.layout = Layout(config)
        stride = -(-self.layout.numel // _ALIGNMENT) * _ALIGNMENT
        self.weights = self._zeros(version_slots, stride)
        shape = self._kv_shape(num_blocks + is_padded)
        self.kv = self._zeros(*shape) if kv_memory is None else kv_memory(shape)
        routes = (BLOCK_SIZE, len(config.mixture_layers), config.num_experts_per_tok)
        spare = self.kv[:, config.num_hidden_layers :].flatten(1).view(torch.int16)
        self.routes = spare[:, : math.prod(routes)].unflatten(1, routes)
        self.tables = torch.zeros(
            max_rows + is_padded, num_blocks_for(max_context), dtype=torch.int64, device=self.device
        )
        self.tables[max_rows:] = num_blocks
        self.cos, self.sin = (table.to(self.device) for table in rope_tables(config, max_context))
        self._make_step_buffers(max_rows + (MAX_PADDING * version_slots if is_padded else 0))

    def slot(self, index: int) -> Tensor:
        """The flat weight buffer [numel] of a slot."""
        return self.weights[index, : self.layout.numel]

    def check_fits(self, version: int, source: Tensor) -> None:
        """Raises EngineError if `source` is no flat buffer that a slot can take, rounded if need be."""
        names = dict.fromkeys(("torch.float32", str(self.dtype)))
        if source.shape != (self.layout.numel,) or str(source.dtype) not in names:
            asked = " or ".join(name.removeprefix("torch.") for name in names)
            raise EngineError(
                f"version {version}: weights are {source.dtype} {list(source.shape)}, "
                f"not {asked} [{self.layout.numel}]"
            )

    def _kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        config = self.config
        num_spare_layers = config.num_kv_layers - config.num_hidden_layers  # in fp32
        num_layers = config.num_hidden_layers + num_spare_layers * (4 // self.dtype.itemsize)
        return (num_blocks, num_layers, 2, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

    def _make_step_buffers(self, num_rows: int) -> None:
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.x, self.delta, self.hidden = (self._zeros(num_rows, config.hidden_size) for _ in range(3))
        self.qkv = self._zeros(num_rows, (heads + 2 * kv_heads) * config.head_dim)
        self.attended = self._zeros(num_rows, heads * config.head_dim)
        self.gate_up = self._zeros(num_rows, 2 * config.intermediate_size)
        self.gated = self._zeros(num_rows, config.intermediate_size)
        self.logits = torch.zeros(num_rows, config.vocab_size, device=self.device)
        self.inputs = torch.zeros(4, num_rows, dtype=torch.int64, device=self.device)
        self.tokens, self.positions, self.rows, self.slots = self.inputs

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _device(name: str) -> torch.device:
    """The CPU or the first GPU. Raises EngineError if it is not there."""
    if name not in ("cpu", "cuda"):
        raise EngineError(f'device = {name!r} must be "cpu" or "cuda", which is the first visible GPU')
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('device = "cuda" needs a GPU and torch built for it, which sees none; set "cpu"')
    return torch.device(name)
