"""Mixture of experts: routing, and the weighted sum of the experts' outputs.

The caller of the decoder may pass its own Router: the engine records its choices, and the trainer replays
them, so that rounding routes no token to other experts (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig

_PITCH_BYTES = 16  # grouped_mm needs rows that start at multiples of it
_COST_PER_CHOICE, _COST_GROUPED = 8, 32  # in units of the cost of one more expert in a grouped_mm


class Router(Protocol):
    """Chooses the experts of one layer: probabilities [N, experts] -> ids [N, k], int64."""

    def __call__(self, layer: int, probs: Tensor) -> Tensor: ...


class RecordingRouter:
    """Chooses the k most probable experts, and records the choices of one forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        self._top_k = config.num_experts_per_tok
        self._chosen: list[Tensor] = []

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        ids = probs.topk(self._top_k).indices
        self._chosen.append(ids)
        return ids

    @property
    def routes(self) -> Tensor:
        """The recorded choices, int16 [N, MoE layers, k]."""
        return torch.stack(self._chosen, dim=1).to(torch.int16)


def expert_weights(config: ModelConfig, probs: Tensor, ids: Tensor) -> Tensor:
    """The weights [N, k] of the chosen experts `ids` [N, k], from probabilities [N, experts]."""
    chosen = probs.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if config.norm_topk_prob else chosen


def mix_experts(x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Weighted sum of each token's experts: x [N, hidden], ids and weights [N, k] -> [N, hidden].

    `expert(id, x [M, hidden]) -> [M, hidden]` is called once per expert that has tokens, with these tokens.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # groups the choices by expert
    tokens = order // ids.shape[1]
    parts = x.index_select(0, tokens).split(flat.bincount().tolist())
    out = torch.cat([expert(i, part) for i, part in enumerate(parts) if len(part)])
    return torch.zeros_like(x).index_add(0, tokens, out * weights.flatten()[order, None])


class StackedExperts:
    """All experts of a layer, stacked: gate_up [experts * 2 * inner, hidden], down [experts * hidden, inner].

    `mix` is `mix_experts` in few calls: in decode steps, calls take longer than arithmetic.
    """

    def __init__(self, num_experts: int, gate_up: Tensor, down: Tensor) -> None:
        pitches = (stack.shape[1] * stack.element_size() for stack in (gate_up, down))
        self._can_group = all(pitch % _PITCH_BYTES == 0 for pitch in pitches)
        self._gate_up, self._down = (
            stack.view(num_experts, -1, stack.shape[1]).transpose(1, 2) for stack in (gate_up, down)
        )
        self._experts = torch.arange(num_experts, device=down.device)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts: x [N, hidden], ids and weights [N, k] -> [N, hidden]."""
        is_small = not x.is_cuda and _COST_PER_CHOICE * ids.numel() < _COST_GROUPED + len(self._experts)
        if is_small or not self._can_group:
            return self._mix_one_by_one(x, ids, weights)
        ranked, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ranked, self._experts, right=True, out_int32=True)
        chosen = x.index_select(0, order // ids.shape[1])
        out = F.grouped_mm(_gated(F.grouped_mm(chosen, self._gate_up, offs=ends)), self._down, offs=ends)
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(*ids.shape, -1)
        return (by_token * weights[:, :, None]).sum(1)

    def _mix_one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = [
            row_weights @ torch.cat([_gated(row @ self._gate_up[i]) @ self._down[i] for i in chosen])
            for row, chosen, row_weights in zip(x.split(1), ids.tolist(), weights.split(1), strict=True)
        ]
        return torch.cat(out)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
