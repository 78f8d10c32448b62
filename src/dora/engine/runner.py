"""Prefill and decode: the model over the paged KV pool, for rows of several versions at once.

Norms, attention and activations run once over all rows; a matrix product runs once per
version, on its contiguous segment of rows, straight into the step's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.kernels import choose_kernels
from dora.engine.workspace import Batch, Workspace
from dora.model.decoder import forward

_PREFILL_TOKENS = 1024  # per forward pass; longer ones fall out of the cache


@dataclass(frozen=True)
class _Layer:
    """Matrices [in, out] of one layer of one slot, as views of the slot's buffer."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class _Segment:
    """Rows of one slot, and their part of every buffer."""

    slot: int
    start: int
    stop: int
    x: Tensor
    hidden: Tensor
    delta: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor
    logits: Tensor


class Runner:
    """Computes on a Workspace; knows slots, rows and blocks, but neither requests nor versions."""

    def __init__(self, workspace: Workspace, kernels: str) -> None:
        self._work = workspace
        self._kernels = choose_kernels(kernels, workspace)
        self.kernels_name = self._kernels.name
        slots = [workspace.slot(i) for i in range(len(workspace.weights))]
        self._views = [workspace.layout.views(flat) for flat in slots]
        self._embeds = [views["model.embed_tokens.weight"] for views in self._views]
        self._heads = [
            views.get("lm_head.weight", views["model.embed_tokens.weight"]).T for views in self._views
        ]
        self._layers = [
            [self._layer(flat, i) for i in range(workspace.config.num_hidden_layers)] for flat in slots
        ]
        self.arrange(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def arrange(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Name the rows that decode from now on and their slots; rows of one slot are neighbours."""
        self.batch = Batch(rows, slots)
        self._segments = [self._segment(*segment) for segment in self.batch.segments()]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Logits [N, vocab] after one token per arranged row, int64 [N], each at its position.

        They are overwritten by the next call.
        """
        work, kernels, batch = self._work, self._kernels, self.batch
        offsets, ids = work.layout.offsets, torch.from_numpy(tokens)
        for s in self._segments:
            torch.index_select(self._embeds[s.slot], 0, ids[s.start : s.stop], out=s.x)
        work.delta[: len(batch)].zero_()
        for i in range(work.config.num_hidden_layers):
            kernels.add_norm(batch, offsets[f"model.layers.{i}.input_layernorm.weight"])
            for s in self._segments:
                torch.mm(s.hidden, self._layers[s.slot][i].qkv, out=s.qkv)
            kernels.attend(batch, positions, i)
            for s in self._segments:
                torch.mm(s.attended, self._layers[s.slot][i].output, out=s.delta)
            kernels.add_norm(batch, offsets[f"model.layers.{i}.post_attention_layernorm.weight"])
            for s in self._segments:
                torch.mm(s.hidden, self._layers[s.slot][i].gate_up, out=s.gate_up)
            kernels.swiglu(batch)
            for s in self._segments:
                torch.mm(s.gated, self._layers[s.slot][i].down, out=s.delta)
        kernels.add_norm(batch, offsets["model.norm.weight"])
        for s in self._segments:
            torch.mm(s.hidden, self._heads[s.slot], out=s.logits)
        return work.logits[: len(batch)]

    def prefill(self, slot: int, prompts: list[tuple[tuple[int, ...], list[int]]]) -> None:
        """Write the KV of prompts, each (tokens, blocks), with the weights of `slot`."""
        packed: list[tuple[tuple[int, ...], list[int]]] = []
        for prompt in prompts:
            if packed and sum(len(ids) for ids, _ in packed) + len(prompt[0]) > _PREFILL_TOKENS:
                self._prefill_packed(slot, packed)
                packed = []
            packed.append(prompt)
        if packed:
            self._prefill_packed(slot, packed)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to)."""
        if copies:
            sources, targets = torch.tensor(copies).T
            self._work.kv[targets] = self._work.kv[sources]

    def _prefill_packed(self, slot: int, prompts: list[tuple[tuple[int, ...], list[int]]]) -> None:
        work = self._work
        lengths = [len(ids) for ids, _ in prompts]
        positions = torch.cat([torch.arange(length) for length in lengths])
        tables = [torch.tensor(blocks).repeat_interleave(BLOCK_SIZE) for _, blocks in prompts]
        blocks = torch.cat([table[:length] for table, length in zip(tables, lengths, strict=True)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            work.kv[blocks, layer, 0, positions % BLOCK_SIZE] = k
            work.kv[blocks, layer, 1, positions % BLOCK_SIZE] = v
            parts = (x.split(lengths) for x in (q, k, v))
            return torch.cat([_causal(*part) for part in zip(*parts, strict=True)])

        tokens = torch.tensor([token for ids, _ in prompts for token in ids])
        cos, sin = work.cos[positions], work.sin[positions]
        forward(self._views[slot], work.config, tokens, cos, sin, attend)

    def _layer(self, flat: Tensor, index: int) -> _Layer:
        span, prefix = self._work.layout.span, f"model.layers.{index}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            qkv=span(flat, attn + "q_proj.weight", attn + "v_proj.weight").T,
            output=span(flat, attn + "o_proj.weight").T,
            gate_up=span(flat, mlp + "gate_proj.weight", mlp + "up_proj.weight").T,
            down=span(flat, mlp + "down_proj.weight").T,
        )

    def _segment(self, slot: int, start: int, stop: int) -> _Segment:
        work, part = self._work, slice(start, stop)
        return _Segment(
            slot, start, stop, work.x[part], work.hidden[part], work.delta[part], work.qkv[part],
            work.attended[part], work.gate_up[part], work.gated[part], work.logits[part],
        )  # fmt: skip


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention inside one prompt: q [N, heads, D], k and v [N, kv heads, D] -> [N, heads, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[0] != k.shape[0]
    )
    return out.transpose(0, 1)
