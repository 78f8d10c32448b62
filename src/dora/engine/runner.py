"""Prefill and decode: the model over the paged KV pool, for rows of several versions at once.

Norms, attention and activations run once over all rows; a matrix product runs once per
version, on its contiguous segment of rows, straight into the step's buffers. In a mixture of
experts it runs once per version and expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.kernels import choose_kernels
from dora.engine.workspace import Batch, Workspace
from dora.model.config import ModelConfig
from dora.model.decoder import forward
from dora.model.routing import Recorder, mix, shares
from dora.model.weights import Layout

_PREFILL_TOKENS = 1024  # per forward pass; longer ones fall out of the cache
_QUERY_TILE = 64  # queries of a prompt that attend at a time, to no key behind the last of them


@dataclass(frozen=True)
class Prompt:
    """Tokens whose KV belongs in `blocks`; that of the first `num_known` is there already."""

    token_ids: tuple[int, ...]
    num_known: int
    blocks: list[int]

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_known


class _Product(Protocol):
    """x [N, in] times a matrix [in, out], plus its bias if it has one."""

    def __call__(self, x: Tensor, /, *, out: Tensor) -> object: ...


class _Slot:
    """The weights of one version slot, ready to multiply: views of its flat buffer.

    By layer, q, k and v are one product, and so are gate and up; experts are pairs of these and of down,
    [in, out]. Only dense layers have gate_up and down, only mixtures have experts.
    """

    def __init__(self, config: ModelConfig, layout: Layout, flat: Tensor) -> None:
        self.views = layout.views(flat)
        self.embed = self.views["model.embed_tokens.weight"]
        self.head = self.views.get("lm_head.weight", self.embed).T
        self.qkv, self.output = list[_Product](), list[_Product]()
        self.gate_up, self.down = dict[int, _Product](), dict[int, _Product]()
        self.experts = dict[int, list[tuple[Tensor, Tensor]]]()

        def matrix(first: str, last: str) -> Tensor:
            return layout.span(flat, first + "_proj.weight", last + "_proj.weight").T

        def product(first: str, last: str) -> _Product:
            if first + "_proj.bias" not in layout.shapes:
                return partial(torch.mm, mat2=matrix(first, last))
            bias = layout.span(flat, first + "_proj.bias", last + "_proj.bias")
            return partial(torch.addmm, bias, mat2=matrix(first, last))

        for i in range(config.num_hidden_layers):
            attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            self.qkv.append(product(attn + "q", attn + "v"))
            self.output.append(product(attn + "o", attn + "o"))
            if i in config.mixture_layers:
                names = [f"{mlp}experts.{number}." for number in range(config.num_experts)]
                self.experts[i] = [
                    (matrix(x + "gate", x + "up"), matrix(x + "down", x + "down")) for x in names
                ]
            else:
                self.gate_up[i] = product(mlp + "gate", mlp + "up")
                self.down[i] = product(mlp + "down", mlp + "down")


@dataclass(frozen=True)
class _Segment:
    """Rows of one slot, and their part of every buffer."""

    own: _Slot
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
        self._mixtures = workspace.config.mixture_layers
        self._slots = [
            _Slot(workspace.config, workspace.layout, workspace.slot(i))
            for i in range(len(workspace.weights))
        ]
        self.arrange(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def arrange(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Name the rows that decode from now on and their slots; rows of one slot are neighbours."""
        self.batch = Batch(rows, slots)
        self._first_experts = torch.from_numpy(slots)[:, None] * self._work.config.num_experts
        self._segments = [self._segment(*segment) for segment in self.batch.segments()]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Logits [N, vocab] after one token per arranged row, int64 [N], each at its position.

        They are overwritten by the next call.
        """
        work, kernels, batch = self._work, self._kernels, self.batch
        offsets, ids = work.layout.offsets, torch.from_numpy(tokens)
        recorder = Recorder(work.config)
        for s in self._segments:
            torch.index_select(s.own.embed, 0, ids[s.start : s.stop], out=s.x)
        work.delta[: len(batch)].zero_()
        for i in range(work.config.num_hidden_layers):
            kernels.add_norm(batch, offsets[f"model.layers.{i}.input_layernorm.weight"])
            for s in self._segments:
                s.own.qkv[i](s.hidden, out=s.qkv)
            kernels.attend(batch, positions, i)
            for s in self._segments:
                s.own.output[i](s.attended, out=s.delta)
            kernels.add_norm(batch, offsets[f"model.layers.{i}.post_attention_layernorm.weight"])
            if i in self._mixtures:
                self._mixture(i, recorder)
                continue
            for s in self._segments:
                s.own.gate_up[i](s.hidden, out=s.gate_up)
            kernels.swiglu(batch)
            for s in self._segments:
                s.own.down[i](s.gated, out=s.delta)
        kernels.add_norm(batch, offsets["model.norm.weight"])
        for s in self._segments:
            torch.mm(s.hidden, s.own.head, out=s.logits)
        if self._mixtures:
            at = torch.from_numpy(positions)
            blocks = work.tables[torch.from_numpy(batch.rows), at // BLOCK_SIZE]
            work.routes[blocks, at % BLOCK_SIZE] = recorder.routes
        return work.logits[: len(batch)]

    def routes(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """The experts that the tokens with KV in `blocks` were sent to: int16 [N, mixture layers, k]."""
        routes: Tensor = self._work.routes[torch.tensor(blocks)].flatten(0, 1)
        return routes[:num_tokens]

    def prefill(self, slot: int, prompts: list[Prompt]) -> int:
        """Write the KV of prompts with the weights of `slot`; returns the number of tokens computed.

        A prompt may build on blocks of one before it.
        """
        packed: list[Prompt] = []
        for prompt in prompts:
            if packed and sum(p.num_new for p in packed) + prompt.num_new > _PREFILL_TOKENS:
                self._prefill_packed(slot, packed)
                packed = []
            if prompt.num_new:
                packed.append(prompt)
        if packed:
            self._prefill_packed(slot, packed)
        return sum(prompt.num_new for prompt in prompts)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to)."""
        if copies:
            sources, targets = torch.tensor(copies).T
            self._work.kv[targets] = self._work.kv[sources]

    def _prefill_packed(self, slot: int, prompts: list[Prompt]) -> None:
        work = self._work
        positions = torch.cat([torch.arange(p.num_known, len(p.token_ids)) for p in prompts])
        tables = [torch.tensor(prompt.blocks) for prompt in prompts]
        blocks = torch.cat(
            [
                table.repeat_interleave(BLOCK_SIZE)[prompt.num_known : len(prompt.token_ids)]
                for table, prompt in zip(tables, prompts, strict=True)
            ]
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            work.kv[blocks, layer, 0, positions % BLOCK_SIZE] = k
            work.kv[blocks, layer, 1, positions % BLOCK_SIZE] = v
            parts = (x.split([prompt.num_new for prompt in prompts]) for x in (q, k, v))
            out = []
            for prompt, table, own_q, own_k, own_v in zip(prompts, tables, *parts, strict=True):
                if prompt.num_known:
                    known = work.kv[table, layer].transpose(0, 1).flatten(1, 2)[:, : len(prompt.token_ids)]
                    own_k, own_v = known.unbind()
                out.append(_causal(own_q, own_k, own_v))
            return torch.cat(out)

        tokens = torch.tensor([token for p in prompts for token in p.token_ids[p.num_known :]])
        cos, sin, recorder = work.cos[positions], work.sin[positions], Recorder(work.config)
        forward(self._slots[slot].views, work.config, tokens, cos, sin, attend, recorder)
        if self._mixtures:
            work.routes[blocks, positions % BLOCK_SIZE] = recorder.routes

    def _mixture(self, layer: int, recorder: Recorder) -> None:
        """hidden -> delta: each row through experts of its own slot, which are numbered slot by slot."""
        work, config, num_rows = self._work, self._work.config, len(self.batch)
        router = f"model.layers.{layer}.mlp.gate.weight"
        probs = torch.cat([F.linear(s.hidden, s.own.views[router]) for s in self._segments]).softmax(-1)
        ids = recorder(layer, probs)

        def expert(number: int, x: Tensor) -> Tensor:
            slot, i = divmod(number, config.num_experts)
            gate_up, down = self._slots[slot].experts[layer][i]
            gate, up = (x @ gate_up).chunk(2, dim=-1)
            return (F.silu(gate) * up) @ down

        own = ids + self._first_experts
        work.delta[:num_rows] = mix(work.hidden[:num_rows], own, shares(config, probs, ids), expert)

    def _segment(self, slot: int, start: int, stop: int) -> _Segment:
        work, part = self._work, slice(start, stop)
        return _Segment(
            self._slots[slot], start, stop, work.x[part], work.hidden[part], work.delta[part], work.qkv[part],
            work.attended[part], work.gate_up[part], work.gated[part], work.logits[part],
        )  # fmt: skip


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a prompt's last N tokens: q [N, heads, D], k and v [T, kv heads, D] -> like q.

    Query heads that share a kv head are packed into the query length. torch's own attention takes
    six times as long where it falls back to its plain form, and that masks every key for every query.
    """
    (num, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    queries = (q / math.sqrt(dim)).view(num, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [kv heads, G, N, D]
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)  # [kv heads, D, T] and [kv heads, T, D]
    out = torch.empty_like(queries)
    future = torch.ones(_QUERY_TILE, _QUERY_TILE, dtype=torch.bool).triu(1)
    for start in range(0, num, _QUERY_TILE):
        tile = queries[:, :, start : start + _QUERY_TILE]
        width = tile.shape[2]
        stop = length - num + start + width  # keys that the tile's last query sees
        scores = torch.bmm(tile.flatten(1, 2), keys[:, :, :stop]).unflatten(1, (-1, width))
        scores[..., stop - width :].masked_fill_(future[:width, :width], -math.inf)
        mixed = torch.bmm(scores.softmax(-1).flatten(1, 2), values[:, :stop])
        out[:, :, start : start + width] = mixed.unflatten(1, (-1, width))
    return out.permute(2, 0, 1, 3).reshape(num, heads, dim)
