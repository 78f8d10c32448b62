"""Policy losses of every token, and four ways to average them.

Every way to average is a weighted sum over tokens whose weights depend on lengths alone, so
a batch can be cut into micro-batches without changing its gradient. A loss returns one value
per token and whether a bound decided it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dora.errors import ConfigError

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]

MAX_LOG_RATIO = 20.0  # exp of more says nothing and may overflow
MAX_K3 = 10.0  # nats; verl's bound on one token of its low-variance estimate


def token_weights(num_tokens: Sequence[int], mode: LossAggMode, scale: int | None = None) -> list[float]:
    """The weight of every token of each response, by verl's `loss_agg_mode`.

    `num_tokens` are the response lengths of the whole batch. `scale` (tokens) is the constant
    divisor of seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783; LongCat's T_max, arXiv
    2509.18883); the others ignore it.
    """
    total = batch_total(num_tokens, mode)
    return [share / total for share in token_shares(num_tokens, mode, scale)]


def token_shares(num_tokens: Sequence[int], mode: LossAggMode, scale: int | None = None) -> list[float]:
    """`token_weights` times `batch_total`: what each response knows of its weight by itself.

    A gradient summed with these while the batch is still filling up is that of the whole batch
    once it has been divided by the total.
    """
    if mode in ("token-mean", "seq-mean-token-sum"):
        return [1.0] * len(num_tokens)
    if mode == "seq-mean-token-mean":
        return [1.0 / max(1, num) for num in num_tokens]
    if mode == "seq-mean-token-sum-norm" and scale is not None:
        return [1.0 / scale] * len(num_tokens)
    raise ConfigError(
        f"loss_agg_mode = {mode!r} with loss_scale_factor = {scale}: choose one of "
        f"{', '.join(get_args(LossAggMode))}; seq-mean-token-sum-norm needs loss_scale_factor, "
        "for example the longest response allowed"
    )


def batch_total(num_tokens: Sequence[int], mode: LossAggMode) -> int:
    """What a batch's sum is divided by: its tokens for token-mean, else its responses."""
    return sum(num_tokens) if mode == "token-mean" else len(num_tokens)


def ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """new / old probability of every token [N], kept within e**-20 to e**20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's loss of every token (arXiv 1707.06347, eq. 7) and whether clipping decided it; all [N].

    The ratio is clipped to [1 - clip_low, 1 + clip_high].
    """
    ratio = ratios(logprobs, old_logprobs)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free, clipped), clipped > free


def dual_clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_cap: float,
) -> tuple[Tensor, Tensor]:
    """`clipped_loss` with the loss of a bad token (A < 0) held below -A * clip_cap; all [N].

    Dual-clip PPO (arXiv 1912.09729; verl's `clip_ratio_c`), where clip_cap > 1. LongCat's
    triplet clip (arXiv 2509.18883) is the same function: clip_high is eps_pos_high, clip_low is
    eps_neg_low and clip_cap is eps_neg_high; it differs by its constant divisor T_max.
    """
    losses, is_clipped = clipped_loss(logprobs, old_logprobs, advantages, clip_low, clip_high)
    ceiling = -advantages * clip_cap
    is_capped = (advantages < 0) & (losses > ceiling)
    return torch.where(is_capped, ceiling, losses), is_clipped | is_capped


def sequence_means(values: Tensor, num_tokens: Sequence[int]) -> Tensor:
    """The mean of each response's tokens, given back to every one of them: [N] to [N].

    `num_tokens` are the lengths of the responses in `values`, each at least 1.
    """
    return torch.cat([part.mean().expand(len(part)) for part in values.split(list(num_tokens))])


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    num_tokens: Sequence[int],
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss with one ratio per response (GSPO-token, arXiv 2507.18071); all [N].

    The ratio is the geometric mean of the token ratios, held constant, times p / constant(p): the
    value is the response's, the gradient reaches each token by itself. The paper clips to
    [1 - 3e-4, 1 + 4e-4] and averages by seq-mean-token-mean.
    """
    own = logprobs.detach()
    log_ratio = logprobs - own + sequence_means(own - old_logprobs, num_tokens)
    return clipped_loss(log_ratio, torch.zeros_like(own), advantages, clip_low, clip_high)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-constant(clip(ratio)) * A * log p (CISPO, arXiv 2506.13585); all [N].

    The weight is clipped to [1 - clip_low, 1 + clip_high], so no token loses its gradient. The
    paper has no lower bound: clip_low = 1.
    """
    ratio = ratios(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-constant(ratio) * A * log p: the policy gradient with an importance weight; all [N].

    Nothing bounds the weight; `corrections` can (V-trace's, arXiv 1802.01561).
    """
    ratio = ratios(logprobs.detach(), old_logprobs)
    return -ratio * advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """A critic's loss of every token, and whether clipping decided it; all [N].

    max of (V - R)**2 / 2 with V free and V clipped to old_V +- clip, as in verl.
    """
    free = (values - returns).square()
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at every token [N], never negative.

    Schulman's k3: r - 1 - log r with r = reference / policy (joschu.net/blog/kl-approx.html).
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - 1.0 - log_ratio


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) at every token [N], in nats (joschu.net/blog/kl-approx.html).

    With d = log policy - log reference: k1 = d; k2 = d**2 / 2; k3 = exp(-d) - 1 + d, held below
    MAX_K3 as verl's low_var_kl. As a term of the loss, k1's gradient averages to 0 (it belongs into
    the reward), k2's is that of the true divergence, and k3's is
    biased. k1+ and k3+ have the value of k1 and k3 and the gradient of k2 (verl's names).
    """
    gap = logprobs - reference_logprobs
    k2 = 0.5 * gap.square()
    if estimator == "k2":
        return k2
    if estimator in ("k1", "k1+"):
        value = gap
    else:
        bounded = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = k3_divergence(bounded, torch.zeros_like(gap)).clamp(max=MAX_K3)
    return value.detach() + k2 - k2.detach() if estimator.endswith("+") else value
