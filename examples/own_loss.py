"""A policy loss and an advantage estimator of one's own.

    dora train examples/gcd.toml --set algorithm.policy_loss=examples/own_loss.py:sapo \\
        --set algorithm.adv_estimator=examples/own_loss.py:by_range \\
        --set "algorithm.policy_loss_options={negative = 1.1}"
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora.trainer.loss import LossInputs, LossSettings, importance_ratios


def sapo(
    tokens: LossInputs, settings: LossSettings, *, positive: float = 1.0, negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """A sigmoid of the ratio in place of a clip range (SAPO, arXiv 2511.20347). No token is clipped.

    `positive` and `negative` are the temperatures for advantages above 0, and for the others.
    """
    ratios = importance_ratios(tokens.logprobs, tokens.old_logprobs)
    temperatures = torch.where(tokens.advantages > 0, positive, negative)
    gates = torch.sigmoid(temperatures * (ratios - 1.0)) * 4.0 / temperatures
    return -tokens.advantages * gates, torch.zeros_like(ratios, dtype=torch.bool)


def by_range(rewards: list[float]) -> list[float]:
    """(reward - mean) / (max - min) of the group; 0 if all rewards are equal."""
    mean, spread = sum(rewards) / len(rewards), max(rewards) - min(rewards)
    return [(reward - mean) / spread if spread else 0.0 for reward in rewards]
