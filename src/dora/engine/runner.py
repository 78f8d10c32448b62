"""The model runner: prefill and decode over the paged KV pool, for rows of several versions at once.

Norms, attention and activations run once over all rows. Linear layers and experts run once per version, on
its contiguous segment of rows, and write straight into the step's buffers.
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

from dora.engine.block_manager import BLOCK_SIZE
from dora.engine.kernels import Kernels, Linear, choose_kernels
from dora.engine.kernels.sampler import Int64s, SamplerOutput, SamplingMetadata, sample
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.engine.request import PrefillInput
from dora.model.attention import varlen_attention, varlen_layout
from dora.model.config import ModelConfig
from dora.model.decoder import forward
from dora.model.device import to_device
from dora.model.moe import RecordingRouter, StackedExperts, expert_weights
from dora.model.weights import WeightLayout

_PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}  # per forward pass; longer ones overflow a CPU's cache
_QUERY_TILE = 64  # queries of a prompt per tile of `causal_attention`


class ModelRunner:
    """Computes on a Workspace, in terms of version slots, rows and blocks."""

    num_steps_ahead = 0  # decode steps that may be in flight when the next one is requested

    def __init__(self, workspace: Workspace, kernels: str) -> None:
        self._workspace = workspace
        self._kernels = choose_kernels(kernels, workspace)
        self.kernels_name = self._kernels.name
        self._moe_layers = workspace.config.moe_layers
        self._slots = [
            _SlotWeights(workspace.config, workspace.layout, workspace.slot_weights(i), self._kernels)
            for i in range(len(workspace.weights))
        ]
        self.set_batch(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def set_batch(self, rows: Int64s, slots: Int64s) -> None:
        """Set the rows [N] that decode from now on, and their slots [N]; a slot's rows are contiguous."""
        self.batch = ForwardBatch(rows, slots)
        self._segments = [self._segment(*segment) for segment in self.batch.segments()]

    def decode(self, tokens: Int64s, positions: Int64s) -> Tensor:
        """Logits [N, vocab] after one token [N] per row of the batch, at its position [N].

        The next call overwrites them.
        """
        self._forward_and_store_routes(tokens, positions)
        for s in self._segments:
            s.weights.lm_head(s.hidden, out=s.logits)
        return self._workspace.logits[: len(self.batch)]

    def decode_and_sample(
        self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata, can_continue: Callable[[], bool]
    ) -> SamplerOutput:
        """Decode, and sample a token for each row of the batch.

        `can_continue` returns whether the same rows decode in the next step for any sampled tokens. If so,
        a runner may start that step before the tokens of this one are on the host.
        """
        return sample(self.decode(tokens, positions).numpy(), positions + 1, metadata)

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a decode step has started that the next `decode_and_sample` returns.

        Until then, rows may leave the batch, and none may join it.
        """
        return False

    def start_ahead(self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata) -> None:
        """Start a step that the next `decode_and_sample` returns, if the runner can."""

    def discard_step(self) -> None:
        """Forget the step in flight, if there is one."""

    def prefill(self, slot: int, prompts: list[PrefillInput]) -> int:
        """Write the KV of prompts with the weights of `slot`; returns the number of tokens computed.

        A prompt may build on blocks of an earlier one.
        """
        packed: list[PrefillInput] = []
        max_tokens = _PREFILL_TOKENS[self._workspace.device.type]
        for prompt in prompts:
            if packed and sum(p.num_new for p in packed) + prompt.num_new > max_tokens:
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
            sources, targets = to_device(torch.tensor(copies).T.contiguous(), self._workspace.device)
            self._workspace.kv[targets] = self._workspace.kv[sources]

    def routes(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """The experts of the first `num_tokens` tokens with KV in `blocks`: int16 [tokens, MoE layers, k]."""
        routes: Tensor = self._workspace.routes[torch.tensor(blocks)].flatten(0, 1)
        return routes[:num_tokens].cpu()

    def _forward_and_store_routes(self, tokens: Int64s, positions: Int64s) -> None:
        """Compute KV and hidden states of one token per row of the batch."""
        router = self._forward(torch.from_numpy(tokens), positions)
        if self._moe_layers:
            self._store_routes(router, torch.from_numpy(self.batch.rows), torch.from_numpy(positions))

    def _forward(self, ids: Tensor, positions: NDArray[np.int64]) -> RecordingRouter:
        """Run the decoder over the rows of the batch; returns the router with the experts it chose."""
        work, kernels, batch = self._workspace, self._kernels, self.batch
        offsets, router = work.layout.offsets, RecordingRouter(work.config)
        for s in self._segments:
            torch.index_select(s.weights.embed, 0, ids[s.start : s.stop], out=s.x)
        work.delta[: len(batch)].zero_()
        for i in range(work.config.num_hidden_layers):
            kernels.add_norm(batch, offsets[f"model.layers.{i}.input_layernorm.weight"])
            for s in self._segments:
                s.weights.qkv[i](s.hidden, out=s.qkv)
            kernels.attend(batch, positions, i)
            for s in self._segments:
                s.weights.output[i](s.attended, out=s.delta)
            kernels.add_norm(batch, offsets[f"model.layers.{i}.post_attention_layernorm.weight"])
            if i in self._moe_layers:
                self._moe(i, router)
                continue
            for s in self._segments:
                s.weights.gate_up[i](s.hidden, out=s.gate_up)
            kernels.swiglu(batch)
            for s in self._segments:
                s.weights.down[i](s.gated, out=s.delta)
        kernels.add_norm(batch, offsets["model.norm.weight"])
        return router

    def _moe(self, layer: int, router: RecordingRouter) -> None:
        """hidden -> delta: each row through experts of its own slot."""
        name = f"model.layers.{layer}.mlp.gate.weight"
        scores = [F.linear(s.hidden, s.weights.views[name]) for s in self._segments]
        probs = torch.cat(scores).float().softmax(-1)
        ids = router(layer, probs)
        weights = expert_weights(self._workspace.config, probs, ids).to(self._workspace.dtype)
        for s in self._segments:
            part = slice(s.start, s.stop)
            s.delta.copy_(s.weights.experts[layer].mix(s.hidden, ids[part], weights[part]))

    def _store_routes(self, router: RecordingRouter, rows: Tensor, positions: Tensor) -> None:
        blocks = self._workspace.block_tables[rows, positions // BLOCK_SIZE]
        self._workspace.routes[blocks, positions % BLOCK_SIZE] = router.routes

    def _prefill_packed(self, slot: int, prompts: list[PrefillInput]) -> None:
        work, device = self._workspace, self._workspace.device
        attention = fused_causal_attention if device.type == "cuda" else causal_attention
        num_queries, num_keys = [p.num_new for p in prompts], [len(p.token_ids) for p in prompts]
        layout = varlen_layout(num_queries, num_keys, device)
        tokens, positions, blocks = to_device(torch.from_numpy(prefill_inputs(prompts)), device)
        tables = {  # of prompts that attend to cached tokens
            i: to_device(torch.tensor(p.block_table), device) for i, p in enumerate(prompts) if p.num_cached
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            work.kv[blocks, layer, 0, positions % BLOCK_SIZE] = k
            work.kv[blocks, layer, 1, positions % BLOCK_SIZE] = v
            queries, keys, values = (x.split(num_queries) for x in (q, k, v))
            pairs = [*zip(keys, values, strict=True)]
            for i, table in tables.items():
                kv = work.kv[table, layer].transpose(0, 1).flatten(1, 2)[:, : num_keys[i]]
                pairs[i] = (kv[0], kv[1])
            if kernel := varlen_attention(q):
                all_k, all_v = (torch.cat(x) for x in zip(*pairs, strict=True))
                return kernel(q, all_k, all_v, layout)
            return torch.cat([attention(own_q, *pair) for own_q, pair in zip(queries, pairs, strict=True)])

        cos, sin, router = work.cos[positions], work.sin[positions], RecordingRouter(work.config)
        views = self._slots[slot].views
        forward(views, work.config, tokens, cos, sin, lambda layer: partial(attend, layer), router)
        if self._moe_layers:
            work.routes[blocks, positions % BLOCK_SIZE] = router.routes

    def _segment(self, slot: int, start: int, stop: int) -> _Segment:
        work, part = self._workspace, slice(start, stop)
        return _Segment(
            self._slots[slot], start, stop, work.x[part], work.hidden[part], work.delta[part], work.qkv[part],
            work.attended[part], work.gate_up[part], work.gated[part], work.logits[part],
        )  # fmt: skip


class _SlotWeights:
    """The linear layers of a version slot: views of its flat buffer.

    The q, k and v projections of a layer are one linear layer, and so are gate and up. Only dense layers have
    gate_up and down, only MoE layers have experts.
    """

    def __init__(self, config: ModelConfig, layout: WeightLayout, flat: Tensor, kernels: Kernels) -> None:
        self.views = layout.views(flat)
        self.embed = self.views["model.embed_tokens.weight"]
        head = self.views.get("lm_head.weight", self.embed)
        is_fp32 = flat.dtype == torch.float32
        self.lm_head = kernels.linear(head, None) if is_fp32 else partial(_linear_to_fp32, head)
        self.qkv, self.output = list[Linear](), list[Linear]()
        self.gate_up, self.down = dict[int, Linear](), dict[int, Linear]()
        self.experts = dict[int, StackedExperts]()

        def linear(first: str, last: str) -> Linear:
            names = (first + "_proj.bias", last + "_proj.bias")
            bias = layout.span(flat, *names) if names[0] in layout.shapes else None
            return kernels.linear(layout.span(flat, first + "_proj.weight", last + "_proj.weight"), bias)

        for i in range(config.num_hidden_layers):
            attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            self.qkv.append(linear(attn + "q", attn + "v"))
            self.output.append(linear(attn + "o", attn + "o"))
            if i in config.moe_layers:
                first, last = f"{mlp}experts.0.", f"{mlp}experts.{config.num_experts - 1}."
                gate_up = layout.span(flat, first + "gate_proj.weight", last + "up_proj.weight")
                down = layout.span(flat, first + "down_proj.weight", last + "down_proj.weight")
                self.experts[i] = StackedExperts(config.num_experts, gate_up, down)
            else:
                self.gate_up[i] = linear(mlp + "gate", mlp + "up")
                self.down[i] = linear(mlp + "down", mlp + "down")


@dataclass(frozen=True)
class _Segment:
    """The rows of one slot, and their part of each buffer."""

    weights: _SlotWeights
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


def prefill_inputs(prompts: Sequence[PrefillInput]) -> NDArray[np.int64]:
    """Token, position and KV block of each token to compute: [3, N]."""
    columns = []
    for prompt in prompts:
        positions = np.arange(prompt.num_cached, len(prompt.token_ids))
        blocks = np.array(prompt.block_table)[positions // BLOCK_SIZE]
        columns.append(np.stack((np.array(prompt.token_ids[prompt.num_cached :]), positions, blocks)))
    return np.concatenate(columns, axis=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a prompt's last N tokens: q [N, heads, D], k and v [T, kv heads, D] -> like q.

    Query heads that share a kv head are packed into the query length. Tiles of queries skip the keys after
    them. torch's attention on a CPU takes six times as long, because it masks every key for every query.
    """
    (num, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    queries = (q / math.sqrt(dim)).view(num, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [kv heads, G, N, D]
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)  # [kv heads, D, T] and [kv heads, T, D]
    out = torch.empty_like(queries)
    future = torch.ones(_QUERY_TILE, _QUERY_TILE, dtype=torch.bool).triu(1)
    for start in range(0, num, _QUERY_TILE):
        tile = queries[:, :, start : start + _QUERY_TILE]
        width = tile.shape[2]
        stop = length - num + start + width  # keys that the tile's last query attends to
        scores = torch.bmm(tile.flatten(1, 2), keys[:, :, :stop]).unflatten(1, (-1, width))
        scores[..., stop - width :].masked_fill_(future[:width, :width], -math.inf)
        mixed = torch.bmm(scores.softmax(-1).flatten(1, 2), values[:, :stop])
        out[:, :, start : start + width] = mixed.unflatten(1, (-1, width))
    return out.permute(2, 0, 1, 3).reshape(num, heads, dim)


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Like `causal_attention`, by torch's fused kernel if it has one for the dtype."""
    from torch.nn.attention.bias import causal_lower_right  # importing it takes a second: on GPUs only

    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = causal_lower_right(len(q), len(k))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _linear_to_fp32(weights: Tensor, x: Tensor, /, *, out: Tensor) -> None:
    """See `Linear`: fp32 sums of bf16 products, not rounded to bf16."""
    if x.is_cuda:
        torch.mm(x, weights.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weights.T.float(), out=out)
