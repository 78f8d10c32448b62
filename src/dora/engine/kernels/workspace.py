"""All memory of an engine on its device, allocated once: version slots, KV pool and step buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for
from dora.engine.request import EngineError
from dora.model.attention import disable_cudnn_attention
from dora.model.config import ModelConfig
from dora.model.decoder import rope_tables
from dora.model.weights import WeightLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT = 16  # elements: a cache line of fp32
PARTITION = 512  # tokens of a row that one program of a GPU attends to, at most
MIN_PARTITION = 64  # and at least, in bf16
KVAllocator = Callable[[tuple[int, ...]], Tensor]  # shape -> zeros of the engine's dtype
MAX_PADDING = 63  # rows that padding adds to a version's segment of a batch, at most
MAX_PREFILL_ROWS = 512  # tokens of prompts that are rows of a padded step, at most
MAX_PREFILL_TABLES = 16  # prompts of such a step, at most
MAX_PREFILL_READS = 2**18  # tokens that such a step attends to, summed over its rows, at most


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of a decode step and their version slots, int64 [N] each; a slot's rows are contiguous."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def segments(self) -> list[tuple[int, int, int]]:
        """(slot, start, stop) of each run of rows with the same slot."""
        slots = self.slots.tolist()
        edges = [at for at in range(len(slots) + 1) if at in (0, len(slots)) or slots[at] != slots[at - 1]]
        return [(slots[start], start, stop) for start, stop in pairwise(edges)]


class Workspace:
    """Tensors that the runner and the kernels share, of `dtype` unless noted.

    weights      [version slots, >= numel]   one flat buffer per slot
    kv           [block, kv layer, 2, token, kv head, dim]   a block is contiguous
    routes       [block, token, MoE layer, k]   the experts of each token, int16; views of the last kv
                 layers, so that they are copied with the KV
    block_tables [>= max_rows, blocks of the longest context], int64
    cos, sin     [max_context, dim], fp32
    x, delta     [step rows, hidden]   the residual stream, and what is added to it next
    hidden       [step rows, hidden]   x after a norm
    qkv          [step rows, (heads + 2 kv heads) * dim],  attended [step rows, heads * dim]
    gate_up      [step rows, 2 * intermediate],  gated [step rows, intermediate]
    logits       [step rows, vocab], fp32
    inputs       [4, step rows], int64   tokens, positions, rows and slots of a padded step

    A step has at most max_rows rows. With `is_padded` there are more step rows, for padding and for prompts
    that are prefilled as rows of a step, which needs no logits. Padding rows use block table max_rows, with
    one block beyond `num_blocks`, and prompts the tables after it. `kv_allocator` allocates kv on the CPU,
    where other processes can read it.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rows: int,
        max_context: int,
        version_slots: int,
        num_blocks: int,
        kv_allocator: KVAllocator | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        is_padded: bool = False,
    ) -> None:
        self.config, self.device = config, _device(device)
        if dtype not in DTYPES:
            raise EngineError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[dtype]
        self.layout = WeightLayout(config)
        stride = -(-self.layout.numel // _ALIGNMENT) * _ALIGNMENT
        self.weights = self._zeros(version_slots, stride)
        shape = self._kv_shape(num_blocks + is_padded)
        self.kv = self._zeros(*shape) if kv_allocator is None else kv_allocator(shape)
        routes = (BLOCK_SIZE, len(config.moe_layers), config.num_experts_per_tok)
        route_layers = self.kv[:, config.num_hidden_layers :].flatten(1).view(torch.int16)
        self.routes = route_layers[:, : math.prod(routes)].unflatten(1, routes)
        self.block_tables = torch.zeros(
            max_rows + is_padded * (1 + MAX_PREFILL_TABLES), num_blocks_for(max_context),
            dtype=torch.int64, device=self.device,
        )  # fmt: skip
        self.block_tables[max_rows:] = num_blocks
        self.cos, self.sin = (table.to(self.device) for table in rope_tables(config, max_context))
        num_rows = max_rows + (MAX_PADDING * version_slots if is_padded else 0)
        self._make_step_buffers(max(num_rows, MAX_PREFILL_ROWS if is_padded else 0))
        self.logits = torch.zeros(num_rows, config.vocab_size, device=self.device)

    def slot_weights(self, index: int) -> Tensor:
        """The flat weight buffer [numel] of a slot."""
        return self.weights[index, : self.layout.numel]

    def check_fits(self, version: int, source: Tensor) -> None:
        """Raise EngineError unless `source` is a flat buffer [numel], fp32 or of the engine's dtype."""
        names = dict.fromkeys(("torch.float32", str(self.dtype)))
        if source.shape != (self.layout.numel,) or str(source.dtype) not in names:
            expected = " or ".join(name.removeprefix("torch.") for name in names)
            raise EngineError(
                f"version {version}: weights are {source.dtype} {list(source.shape)}, "
                f"expected {expected} [{self.layout.numel}]"
            )

    def _kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        config = self.config
        num_route_layers = config.num_kv_layers - config.num_hidden_layers  # in fp32
        num_layers = config.num_hidden_layers + num_route_layers * (4 // self.dtype.itemsize)
        return (num_blocks, num_layers, 2, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

    def _make_step_buffers(self, num_rows: int) -> None:
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.x, self.delta, self.hidden = (self._zeros(num_rows, config.hidden_size) for _ in range(3))
        self.qkv = self._zeros(num_rows, (heads + 2 * kv_heads) * config.head_dim)
        self.attended = self._zeros(num_rows, heads * config.head_dim)
        self.gate_up = self._zeros(num_rows, 2 * config.intermediate_size)
        self.gated = self._zeros(num_rows, config.intermediate_size)
        self.inputs = torch.zeros(4, num_rows, dtype=torch.int64, device=self.device)
        self.tokens, self.positions, self.rows, self.slots = self.inputs

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _device(name: str) -> torch.device:
    """The CPU or the first GPU; raises EngineError if it is not available."""
    if name not in ("cpu", "cuda"):
        raise EngineError(f'device = {name!r} must be "cpu" or "cuda" (the first visible GPU)')
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('device = "cuda": torch sees no GPU; install torch with CUDA or set device = "cpu"')
    if name == "cuda":
        disable_cudnn_attention()
    return torch.device(name)
