"""Where a trainer sends the tokens of a mixture of experts, and how evenly that uses the experts.

Rounding differs between trainer and engine, so that their routers may choose otherwise where two
experts are nearly alike. Replaying the engine's choice (R3, arXiv 2510.11370) takes that away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.routing import Route
from dora.trainer.packing import Packed


def replay(config: ModelConfig, batch: Packed, routes: Sequence[NDArray[np.int16] | None]) -> Replay:
    """Send tokens where their sequence's `routes` [tokens - 1, mixture layers * k] say.

    The router still weighs the experts that it is told, and so learns. Sequences without routes are left
    to it.
    """
    shape = (len(config.mixture_layers), config.num_experts_per_tok)
    told = np.full((len(batch.inputs), *shape), -1)
    for rows, own in zip(batch.members, routes, strict=True):
        if own is not None:
            told[rows[: len(own)]] = own.reshape(-1, *shape)
    return Replay(config, torch.from_numpy(told).to(batch.inputs.device))


class Replay:
    """Sends tokens where `routes` [N, mixture layers, k] says; where it is negative, to the likeliest."""

    def __init__(self, config: ModelConfig, routes: Tensor) -> None:
        self._layers, self._routes = config.mixture_layers, routes.long()

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        told = self._routes[:, self._layers.index(layer)]
        return torch.where(told < 0, probs.topk(told.shape[1]).indices, told)


class Counted:
    """Chooses as another route does, and counts how many of the tokens at `rows` [M] each expert gets.

    `num_tokens` is int64 [mixture layers, experts].
    """

    def __init__(self, config: ModelConfig, route: Route, rows: Tensor) -> None:
        self._layers, self._route, self._rows = config.mixture_layers, route, rows
        shape = (len(self._layers), config.num_experts)
        self.num_tokens = torch.zeros(shape, dtype=torch.int64, device=rows.device)

    def __call__(self, layer: int, probs: Tensor) -> Tensor:
        ids = self._route(layer, probs)
        chosen = ids[self._rows].flatten()
        # A layer may run twice, to keep less in between: it counts once.
        self.num_tokens[self._layers.index(layer)] = chosen.bincount(minlength=probs.shape[1])
        return ids


def imbalance(num_tokens: Tensor) -> Tensor:
    """Tokens of the busiest expert over those of the mean one, of every layer: [layers] of [layers, experts].

    1 is perfect balance. It is 1 + MaxVio of arXiv 2408.15664.
    """
    return num_tokens.amax(1) / num_tokens.double().mean(1)
