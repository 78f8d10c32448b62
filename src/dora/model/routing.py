"""Mixtures of experts: which experts a token is sent to, and the sum of what they return.

Whoever runs the decoder may choose the experts (`Route`): the engine records its choice, and
the trainer can replay it, so that rounding sends no token elsewhere (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig

_PITCH_BYTES = 16  # rows of matrices must begin at multiples of it to be multiplied as a group
_CALLS_PER_CHOICE, _CALLS_GROUPED = 8, 32  # what they cost, in the unit that one more expert of a group does


class Route(Protocol):
    """Chooses experts in one layer: the router's probabilities [N, experts] -> ids [N, k], int64."""

    def __call__(self, layer: int, probs: Tensor) -> Tensor: ...


class Recorder:
    """Sends tokens to their likeliest experts and keeps the choice, for one forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_chosen = config.num_experts_per_tok
        self._chosen: list[Tensor] = []

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        ids = probs.topk(self._num_chosen).indices
        self._chosen.append(ids)
        return ids

    @property
    def routes(self) -> Tensor:
        """What has been chosen, int16 [N, mixture layers, k]."""
        return torch.stack(self._chosen, dim=1).to(torch.int16)


def shares(config: ModelConfig, probs: Tensor, ids: Tensor) -> Tensor:
    """The weight of each chosen expert [N, k], from the router's probabilities [N, experts]."""
    chosen = probs.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if config.norm_topk_prob else chosen


def mix(x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Sum over each token's experts: x [N, hidden], ids and weights [N, k] -> [N, hidden].

    `expert(id, x [M, hidden]) -> [M, hidden]` is called once per expert that has tokens, on these only.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # choices, expert by expert
    tokens = order // ids.shape[1]
    parts = x.index_select(0, tokens).split(flat.bincount().tolist())
    out = torch.cat([expert(i, part) for i, part in enumerate(parts) if len(part)])
    return torch.zeros_like(x).index_add(0, tokens, out * weights.flatten()[order, None])


class Experts:
    """All experts of a layer, stacked: gate_up [experts * 2 * inner, hidden], down [experts * hidden, inner].

    `mix` is the function of that name in few calls, for decoding, where calls cost more than numbers.
    """

    def __init__(self, num_experts: int, gate_up: Tensor, down: Tensor) -> None:
        pitches = (stack.shape[1] * stack.element_size() for stack in (gate_up, down))
        self._can_group = all(pitch % _PITCH_BYTES == 0 for pitch in pitches)
        self._gate_up, self._down = (
            stack.view(num_experts, -1, stack.shape[1]).transpose(1, 2) for stack in (gate_up, down)
        )
        self._experts = torch.arange(num_experts, device=down.device)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's experts: x [N, hidden], ids and weights [N, k] -> [N, hidden]."""
        is_few = not x.is_cuda and _CALLS_PER_CHOICE * ids.numel() < _CALLS_GROUPED + len(self._experts)
        if is_few or not self._can_group:
            return self._mix_one_by_one(x, ids, weights)
        ranked, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ranked, self._experts, right=True, out_int32=True)
        chosen = x.index_select(0, order // ids.shape[1])
        out = F.grouped_mm(_gated(F.grouped_mm(chosen, self._gate_up, offs=ends)), self._down, offs=ends)
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(*ids.shape, -1)
        return (by_token * weights[:, :, None]).sum(1)

    def _mix_one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = [
            share @ torch.cat([_gated(row @ self._gate_up[i]) @ self._down[i] for i in chosen])
            for row, chosen, share in zip(x.split(1), ids.tolist(), weights.split(1), strict=True)
        ]
        return torch.cat(out)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
