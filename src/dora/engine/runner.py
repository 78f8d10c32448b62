"""Prefill and decode: the model over the paged KV pool, for rows of several versions at once.

Norms, attention and activations run once over all rows; a matrix product runs once per
version, on its contiguous segment of rows, straight into the step's buffers; so does a mixture
of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dora.engine.blocks import BLOCK_SIZE
from dora.engine.kernels import Kernels, Product, choose_kernels
from dora.engine.sampler import Drawn, Int64s, Rules, sample
from dora.engine.workspace import Batch, Workspace
from dora.model.config import ModelConfig
from dora.model.decoder import forward
from dora.model.routing import Experts, Recorder, shares
from dora.model.weights import Layout

_PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}  # per forward pass; on a CPU longer ones fall out of the cache
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


class _Slot:
    """The weights of one version slot, ready to multiply: views of its flat buffer.

    By layer, q, k and v are one product, and so are gate and up. Only dense layers have gate_up and down,
    only mixtures have experts.
    """

    def __init__(self, config: ModelConfig, layout: Layout, flat: Tensor, kernels: Kernels) -> None:
        self.views = layout.views(flat)
        self.embed = self.views["model.embed_tokens.weight"]
        head = self.views.get("lm_head.weight", self.embed)
        is_fp32 = flat.dtype == torch.float32
        self.head = kernels.product(head, None) if is_fp32 else partial(_wide_product, head)
        self.qkv, self.output = list[Product](), list[Product]()
        self.gate_up, self.down = dict[int, Product](), dict[int, Product]()
        self.experts = dict[int, Experts]()

        def product(first: str, last: str) -> Product:
            names = (first + "_proj.bias", last + "_proj.bias")
            bias = layout.span(flat, *names) if names[0] in layout.shapes else None
            return kernels.product(layout.span(flat, first + "_proj.weight", last + "_proj.weight"), bias)

        for i in range(config.num_hidden_layers):
            attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            self.qkv.append(product(attn + "q", attn + "v"))
            self.output.append(product(attn + "o", attn + "o"))
            if i in config.mixture_layers:
                first, last = f"{mlp}experts.0.", f"{mlp}experts.{config.num_experts - 1}."
                gate_up = layout.span(flat, first + "gate_proj.weight", last + "up_proj.weight")
                down = layout.span(flat, first + "down_proj.weight", last + "down_proj.weight")
                self.experts[i] = Experts(config.num_experts, gate_up, down)
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

    num_ahead = 0  # steps that may be under way when the next one is asked for

    def __init__(self, workspace: Workspace, kernels: str) -> None:
        self._work = workspace
        self._kernels = choose_kernels(kernels, workspace)
        self.kernels_name = self._kernels.name
        self._mixtures = workspace.config.mixture_layers
        self._slots = [
            _Slot(workspace.config, workspace.layout, workspace.slot(i), self._kernels)
            for i in range(len(workspace.weights))
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
        self._advance(tokens, positions)
        for s in self._segments:
            s.own.head(s.hidden, out=s.logits)
        return self._work.logits[: len(self.batch)]

    def draw(self, tokens: Int64s, positions: Int64s, rules: Rules, has_next: Callable[[], bool]) -> Drawn:
        """Decode, and draw a token for every arranged row by its rule.

        `has_next` says whether the same rows could decode once more, whatever is drawn: the next step may
        then be begun before this one's tokens are known.
        """
        return sample(self.decode(tokens, positions).numpy(), positions + 1, rules)

    def _advance(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """One token per arranged row: its KV, and the hidden state that the head reads."""
        recorder = self._pass(torch.from_numpy(tokens), positions)
        if self._mixtures:
            self._keep_routes(recorder, torch.from_numpy(self.batch.rows), torch.from_numpy(positions))

    def _pass(self, ids: Tensor, positions: NDArray[np.int64]) -> Recorder:
        """The decoder over the arranged rows; returns who was sent to which experts."""
        work, kernels, batch = self._work, self._kernels, self.batch
        offsets, recorder = work.layout.offsets, Recorder(work.config)
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
        return recorder

    def _keep_routes(self, recorder: Recorder, rows: Tensor, positions: Tensor) -> None:
        blocks = self._work.tables[rows, positions // BLOCK_SIZE]
        self._work.routes[blocks, positions % BLOCK_SIZE] = recorder.routes

    def routes(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """The experts that the tokens with KV in `blocks` were sent to: int16 [N, mixture layers, k]."""
        routes: Tensor = self._work.routes[torch.tensor(blocks)].flatten(0, 1)
        return routes[:num_tokens].cpu()

    def prefill(self, slot: int, prompts: list[Prompt]) -> int:
        """Write the KV of prompts with the weights of `slot`; returns the number of tokens computed.

        A prompt may build on blocks of one before it.
        """
        packed: list[Prompt] = []
        most = _PREFILL_TOKENS[self._work.device.type]
        for prompt in prompts:
            if packed and sum(p.num_new for p in packed) + prompt.num_new > most:
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
            sources, targets = torch.tensor(copies, device=self._work.device).T
            self._work.kv[targets] = self._work.kv[sources]

    def _prefill_packed(self, slot: int, prompts: list[Prompt]) -> None:
        work, device = self._work, self._work.device
        causal = _causal_on_gpu if device.type == "cuda" else _causal
        positions = torch.cat([torch.arange(p.num_known, len(p.token_ids)) for p in prompts]).to(device)
        tables = [torch.tensor(prompt.blocks, device=device) for prompt in prompts]
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
                out.append(causal(own_q, own_k, own_v))
            return torch.cat(out)

        tokens = torch.tensor([token for p in prompts for token in p.token_ids[p.num_known :]]).to(device)
        cos, sin, recorder = work.cos[positions], work.sin[positions], Recorder(work.config)
        forward(self._slots[slot].views, work.config, tokens, cos, sin, attend, recorder)
        if self._mixtures:
            work.routes[blocks, positions % BLOCK_SIZE] = recorder.routes

    def _mixture(self, layer: int, recorder: Recorder) -> None:
        """hidden -> delta: each row through experts of its own slot."""
        router = f"model.layers.{layer}.mlp.gate.weight"
        scores = [F.linear(s.hidden, s.own.views[router]) for s in self._segments]
        probs = torch.cat(scores).float().softmax(-1)
        ids = recorder(layer, probs)
        weights = shares(self._work.config, probs, ids).to(self._work.dtype)
        for s in self._segments:
            part = slice(s.start, s.stop)
            s.delta.copy_(s.own.experts[layer].mix(s.hidden, ids[part], weights[part]))

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


def _causal_on_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `_causal`, by the fused kernel where torch has one for the dtype."""
    from torch.nn.attention.bias import causal_lower_right  # takes a second, which a CPU need not wait for

    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = causal_lower_right(len(q), len(k))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _wide_product(weights: Tensor, x: Tensor, /, *, out: Tensor) -> None:
    """See `Product`: fp32 sums of bf16 products, not rounded to bf16."""
    if x.is_cuda:
        torch.mm(x, weights.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weights.T.float(), out=out)
