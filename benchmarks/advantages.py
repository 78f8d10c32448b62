"""DORA's advantages, critic loss and KL estimates against verl's on the same tensors.

Needs `pip install verl`. Tensors are in double precision. Advantages and KL estimates are compared token by
token, the critic's loss also by its gradient.

    python benchmarks/advantages.py [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from dora.trainer.advantage import compute_advantages, gae, whiten
from dora.trainer.loss import kl_divergence, value_loss
from dora.trainer.recipe import AdvEstimator, KLEstimator
from report import Row, parse_options, publish

try:
    from verl.trainer.ppo import core_algos as verl
except ImportError as error:
    sys.exit(
        f"benchmarks/advantages.py compares with verl, which cannot be imported ({error}): pip install verl"
    )

GROUP_SIZE, MAX_TOKENS = 4, 24
LENGTHS = [24, 1, 7, 13, 20, 3, 9, 16, 5, 5, 11, 2]
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2


class Batch:
    """Three groups with rewards, values and log-probs; verl's functions read padded tensors."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)

        def noise(num: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(num, generator=source, dtype=torch.float64)

        num = sum(LENGTHS)
        self.rewards, self.values = noise(len(LENGTHS)), noise(num)
        self.new_values = self.values + noise(num, 0.3)
        self.logprobs = -noise(num).abs()
        self.reference = self.logprobs + noise(num, 0.5)
        self.mask = torch.tensor([[i < num for i in range(MAX_TOKENS)] for num in LENGTHS])
        ends = torch.tensor(LENGTHS)[:, None] - 1
        self.terminal = torch.zeros(self.mask.shape, dtype=torch.float64)
        self.terminal.scatter_(1, ends, self.rewards[:, None])
        self.groups = np.repeat(np.arange(len(LENGTHS) // GROUP_SIZE), GROUP_SIZE)

    def padded(self, values: Tensor) -> Tensor:
        """[N] to [B, MAX_TOKENS], padded with zeros on the right."""
        return torch.zeros(self.mask.shape, dtype=values.dtype).masked_scatter(self.mask, values)

    @property
    def rewards_of_groups(self) -> list[list[float]]:
        return self.rewards.view(-1, GROUP_SIZE).tolist()


def dora_gae(batch: Batch) -> tuple[list[float], list[float]]:
    """DORA's whitened advantages and returns of all tokens."""
    parts = batch.values.split(LENGTHS)
    pairs = [gae(r, v.tolist(), GAMMA, LAM) for r, v in zip(batch.rewards.tolist(), parts, strict=True)]
    raw = [advantage for advantages, _ in pairs for advantage in advantages]
    return whiten(raw, [1] * len(raw)), [value for _, returns in pairs for value in returns]


def dora_advantages(estimator: AdvEstimator, batch: Batch) -> Tensor:
    """DORA's advantages of all tokens [N]."""
    if estimator == "gae":
        return torch.tensor(dora_gae(batch)[0], dtype=torch.float64)
    lengths = [LENGTHS[i : i + GROUP_SIZE] for i in range(0, len(LENGTHS), GROUP_SIZE)]
    advantages = compute_advantages(estimator, batch.rewards_of_groups, lengths)
    flat = torch.tensor([x for group in advantages for x in group], dtype=torch.float64)
    return flat.repeat_interleave(torch.tensor(LENGTHS))


def verl_advantages(estimator: AdvEstimator, batch: Batch) -> Tensor:
    """verl's advantages of all tokens [N]."""
    rewards, mask, groups = batch.terminal.clone(), batch.mask.double(), batch.groups
    discount = SimpleNamespace(gamma=1.0)
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "grpo": lambda: verl.compute_grpo_outcome_advantage(rewards, mask, groups),
        "dr_grpo": lambda: verl.compute_grpo_outcome_advantage(
            rewards, mask, groups, norm_adv_by_std_in_grpo=False
        ),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(rewards, mask, groups),
        "reinforce_plus_plus": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=discount
        ),
        "reinforce_plus_plus_baseline": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, groups
        ),
        "gae": lambda: verl.compute_gae_advantage_return(
            rewards, batch.padded(batch.values), mask, GAMMA, LAM
        ),
    }
    return calls[estimator]()[0][batch.mask]


def critic_losses(batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The critic's loss and its gradient by every value [N], DORA's and verl's, on the returns of gae."""
    returns = torch.tensor(dora_gae(batch)[1], dtype=torch.float64)
    leaf = batch.new_values.clone().requires_grad_()
    own = value_loss(leaf, batch.values, returns, CLIP)[0].mean()
    padded = (batch.padded(x) for x in (leaf, returns, batch.values))
    other, _ = verl.compute_value_loss(*padded, batch.mask.double(), CLIP)
    return tuple((x.detach(), torch.autograd.grad(x, leaf)[0]) for x in (own, other))  # type: ignore[return-value]


def gap(own: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((own - other).abs().max() / other.abs().max())


def main() -> None:
    options = parse_options(__doc__ or "")
    batches = [Batch(seed) for seed in range(3 if options.quick else 20)]
    gaps: dict[str, float] = {}
    for estimator in get_args(AdvEstimator):
        gaps[estimator] = max(
            gap(dora_advantages(estimator, batch), verl_advantages(estimator, batch)) for batch in batches
        )
    pairs = [critic_losses(batch) for batch in batches]
    for i, name in enumerate(("critic's loss", "critic's gradient")):
        gaps[name] = max(gap(own[i], other[i]) for own, other in pairs)
    for name in get_args(KLEstimator):
        logprobs = [(b.logprobs, b.reference) for b in batches]
        gaps[f"KL {name}"] = max(gap(kl_divergence(*x, name), verl.kl_penalty(*x, name)) for x in logprobs)
    rows: list[Row] = [
        {"what": name, "peer": f"verl {version('verl')}", "relative_gap": f"{value:.1e}"}
        for name, value in gaps.items()
    ]
    publish(options, rows, {"common_digits": -math.log10(max(*gaps.values(), 1e-17))})


if __name__ == "__main__":
    main()
