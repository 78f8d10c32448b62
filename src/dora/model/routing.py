"""Mixtures of experts: which experts a token is sent to, and the sum of what they return.

Whoever runs the decoder may choose the experts (`Route`): the engine records its choice, and
the trainer can replay it, so that rounding sends no token elsewhere (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dora.model.config import ModelConfig


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


class Replay:
    """Sends tokens where `routes` [N, mixture layers, k] says; where it is negative, to the likeliest."""

    def __init__(self, config: ModelConfig, routes: Tensor) -> None:
        self._layers, self._routes = config.mixture_layers, routes.long()

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        told = self._routes[:, self._layers.index(layer)]
        return torch.where(told < 0, probs.topk(told.shape[1]).indices, told)


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
