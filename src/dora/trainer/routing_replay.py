"""Routing replay for MoE models, and the balance of expert load.

Rounding differs between trainer and engine, so their routers may choose different experts if two are nearly
equal. Replaying the engine's choice (R3, arXiv 2510.11370) removes that difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.device import to_device
from dora.model.moe import Router
from dora.trainer.packing import PackedBatch


def replay_routes(
    config: ModelConfig, batch: PackedBatch, routes: Sequence[NDArray[np.int16] | None]
) -> ReplayRouter:
    """A router that sends each sequence's tokens along its `routes` [tokens - 1, MoE layers * k].

    The router's probabilities still weight the experts, so the router learns. Sequences without routes go
    where the router chooses.
    """
    shape = (len(config.moe_layers), config.num_experts_per_tok)
    chosen = np.full((len(batch.input_ids), *shape), -1)
    for indices, route in zip(batch.sequence_indices, routes, strict=True):
        if route is not None:
            chosen[indices[: len(route)]] = route.reshape(-1, *shape)
    return ReplayRouter(config, to_device(torch.from_numpy(chosen), batch.input_ids.device))


class ReplayRouter:
    """Routes tokens by `routes` [N, MoE layers, k]; a negative entry leaves the choice to the router."""

    def __init__(self, config: ModelConfig, routes: Tensor) -> None:
        self._layers, self._routes = config.moe_layers, routes.long()

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        chosen = self._routes[:, self._layers.index(layer)]
        return torch.where(chosen < 0, probs.topk(chosen.shape[1]).indices, chosen)


class CountingRouter:
    """Routes as another router does, and counts for each expert the tokens at `indices` [M] that it gets.

    `num_tokens` is int64 [MoE layers, experts].
    """

    def __init__(self, config: ModelConfig, router: Router, indices: Tensor) -> None:
        self._layers, self._router, self._indices = config.moe_layers, router, indices
        shape = (len(self._layers), config.num_experts)
        self.num_tokens = torch.zeros(shape, dtype=torch.int64, device=indices.device)

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        ids = self._router(layer, probs)
        chosen = ids[self._indices].flatten()
        # Assigned and not added, because activation checkpointing runs a layer twice.
        self.num_tokens[self._layers.index(layer)] = chosen.bincount(minlength=probs.shape[1])
        return ids


def load_imbalance(num_tokens: Tensor) -> Tensor:
    """Tokens of the busiest expert over the mean, for every layer: [layers, experts] to [layers].

    1 is perfect balance. It is 1 + MaxVio of arXiv 2408.15664.
    """
    return num_tokens.amax(1) / num_tokens.double().mean(1)
