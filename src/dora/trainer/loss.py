"""The policy loss: PPO's clipped objective, an optional KL term, four ways to average.

Every way to average is a weighted sum over tokens whose weights depend on lengths alone, so
a batch can be cut into micro-batches without changing its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dora.errors import ConfigError

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(num_tokens: Sequence[int], mode: LossAggMode, scale: int | None = None) -> list[float]:
    """The weight of every token of each response, by verl's `loss_agg_mode`.

    `num_tokens` are the response lengths of the whole batch. `scale` (tokens) is the constant
    divisor of seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783); the others ignore it.
    """
    num_sequences = len(num_tokens)
    if mode == "token-mean":
        return [1.0 / sum(num_tokens)] * num_sequences
    if mode == "seq-mean-token-mean":
        return [1.0 / (num_sequences * max(1, num)) for num in num_tokens]
    if mode == "seq-mean-token-sum":
        return [1.0 / num_sequences] * num_sequences
    if mode == "seq-mean-token-sum-norm" and scale is not None:
        return [1.0 / (num_sequences * scale)] * num_sequences
    raise ConfigError(
        f"loss_agg_mode = {mode!r} with loss_scale_factor = {scale}: choose one of "
        f"{', '.join(get_args(LossAggMode))}; seq-mean-token-sum-norm needs loss_scale_factor, "
        "for example the longest response allowed"
    )


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's loss of every token (arXiv 1707.06347, eq. 7) and whether clipping decided it; all [N].

    The ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    ratio = (logprobs - old_logprobs).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free, clipped), clipped > free


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at every token [N], never negative.

    Schulman's k3: r - 1 - log r with r = reference / policy (joschu.net/blog/kl-approx.html).
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - 1.0 - log_ratio
