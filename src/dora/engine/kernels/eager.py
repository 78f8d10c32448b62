"""The decode kernels in plain torch: the reference for the others, and the fallback without numba.

Each row gathers as much context as the longest one has, so a step takes three to seven times as long.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.decoder import apply_rope


def linear(weights: Tensor, bias: Tensor | None) -> partial[Tensor]:
    """See `Kernels`."""
    if bias is None:
        return partial(torch.mm, mat2=weights.T)
    return partial(torch.addmm, bias, mat2=weights.T)


class EagerKernels:
    """See `Kernels`. Attention gathers the blocks of all rows, padded to the longest context."""

    name = "eager"
    linear = staticmethod(linear)

    def __init__(self, workspace: Workspace) -> None:
        self._work = workspace

    def add_norm(self, batch: ForwardBatch, offset: int) -> None:
        work, num = self._work, len(batch)
        work.x[:num] += work.delta[:num]
        work.hidden[:num] = self._normed(work.x[:num], batch, offset)

    def attend(self, batch: ForwardBatch, positions: NDArray[np.int64], layer: int) -> None:
        work, config = self._work, self._work.config
        dim, kv_heads = config.head_dim, config.num_key_value_heads
        heads = work.qkv[: len(batch)].unflatten(-1, (-1, dim))
        q, k, v = heads.split([config.num_attention_heads, kv_heads, kv_heads], dim=1)
        at = torch.from_numpy(positions)
        offsets, attn = work.layout.offsets, f"model.layers.{layer}.self_attn."
        cos, sin = work.cos[at], work.sin[at]
        if config.has_qk_norm:
            q = self._normed(q, batch, offsets[attn + "q_norm.weight"])
            k = self._normed(k, batch, offsets[attn + "k_norm.weight"])
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        tables = work.block_tables[torch.from_numpy(batch.rows), : num_blocks_for(int(positions.max()) + 1)]
        last = tables.gather(1, (at // BLOCK_SIZE)[:, None])[:, 0]
        work.kv[last, layer, 0, at % BLOCK_SIZE] = k
        work.kv[last, layer, 1, at % BLOCK_SIZE] = v
        gathered = work.kv[:, layer].index_select(0, tables.flatten()).unflatten(0, tables.shape)
        keys, values = (gathered[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
        mask = torch.arange(keys.shape[2]) <= at[:, None]  # [N, T]
        # Query heads that share a kv head are packed into the query length: [N, kv heads, G, D].
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (kv_heads, -1)), keys, values, attn_mask=mask[:, None, None]
        )
        work.attended[: len(batch)] = out.flatten(1)

    def swiglu(self, batch: ForwardBatch) -> None:
        gate, up = self._work.gate_up[: len(batch)].chunk(2, dim=-1)
        self._work.gated[: len(batch)] = F.silu(gate) * up

    def _normed(self, x: Tensor, batch: ForwardBatch, offset: int) -> Tensor:
        """RMS norm over the last dimension of x [N, ..., D], with the weights of each row's slot."""
        width, slots, eps = x.shape[-1], batch.slots, self._work.config.rms_norm_eps
        scales = self._work.weights[:, offset : offset + width]
        if slots[0] == slots[-1]:  # a slot's rows are contiguous, so all rows have this one
            return F.rms_norm(x, (width,), scales[slots[0]], eps)
        per_row = scales[torch.from_numpy(slots)].view(-1, *(1,) * (x.dim() - 2), width)
        # In fp32 up to the last rounding, like torch's rms_norm with weights.
        return (F.rms_norm(x.float(), (width,), None, eps) * per_row).to(x.dtype)
