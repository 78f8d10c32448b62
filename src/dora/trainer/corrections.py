"""Off-policy corrections of one micro-batch: which log-probs to compare with, how much each token counts.

Nothing here needs a total of the batch: a masked token keeps its place in the denominators, so a
correction changes no other token and a batch can be cut anywhere between responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dora.trainer.loss import MAX_LOG_RATIO, ratios, sequence_means
from dora.trainer.recipe import Correction

KL_BY_AGE = "off_policy/kl_k3_age_"  # and the staleness of the samples: the metric that says so of them alone


@dataclass(frozen=True)
class Corrected:
    """`old_logprobs` are for the loss's ratio, `weights` multiply its value; neither has a gradient.

    `is_truncated` and `is_masked` say which tokens a cap or a mask decided. All [N].
    """

    old_logprobs: Tensor
    weights: Tensor
    is_truncated: Tensor
    is_masked: Tensor


def interpolated_logprobs(behaviour: Tensor, current: Tensor, staleness: Tensor) -> Tensor:
    """A-3PO's stand-in for the proximal policy (arXiv 2512.06547): no forward pass; all [N].

    (1 / d) * behaviour + (1 - 1 / d) * current, with d the staleness in versions; current at d = 0.
    So one version back is the behaviour itself, and older ones come closer to the current policy.
    """
    share = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0).to(current.dtype)
    return torch.lerp(current, behaviour, share)


def correct(
    correction: Correction,
    logprobs: Tensor,
    behaviour: Tensor,
    num_tokens: Sequence[int],
    staleness: Tensor,
    proximal: Tensor | None = None,
) -> Corrected:
    """What `correction` makes of the N tokens of B whole responses.

    `logprobs` are the current policy's, `behaviour` the engine's, `staleness` that of each token's
    response (versions); all [N]. `proximal` [N] are the log-probs before the step's first update;
    None where the step has a single one, so that they are the current ones. `num_tokens` are the B
    lengths.
    """
    current = logprobs.detach()
    is_coupled = correction.proximal == "behaviour"
    if correction.proximal == "interpolated":
        compared = interpolated_logprobs(behaviour, current, staleness)
    else:
        compared = current if is_coupled or proximal is None else proximal
    ratio = ratios(compared, behaviour)

    weights = torch.ones_like(ratio)
    is_truncated = is_masked = torch.zeros_like(ratio, dtype=torch.bool)
    if correction.token == "tis":
        weights, is_truncated = ratio.clamp(max=correction.tis_cap), ratio > correction.tis_cap
    elif correction.token == "icepop":
        is_masked = (ratio < correction.icepop_low) | (ratio > correction.icepop_high)
        weights = weights if is_coupled else ratio
    if correction.sequence == "mis":
        geometric_mean = sequence_means(compared - behaviour, num_tokens).exp()
        is_masked = is_masked | (geometric_mean < correction.mis_low) | (geometric_mean > correction.mis_high)
    if correction.age_decay != 1.0:
        weights = weights * correction.age_decay**staleness
    old = behaviour if is_coupled else compared
    return Corrected(old, weights.masked_fill(is_masked, 0.0), is_truncated, is_masked)


@dataclass
class OffPolicyness:
    """Sums over tokens that say how far the current policy is from the one that sampled.

    r is current / behaviour of a token. Sums of micro-batches add up to those of the batch.
    """

    num_tokens: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    log_ratio: float = 0.0

    def add(self, logprobs: Tensor, behaviour: Tensor) -> None:
        """Count one micro-batch; both [N]."""
        log_ratio = (logprobs.detach() - behaviour).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        self.num_tokens += len(log_ratio)
        self.ratio += float(ratio.sum())
        self.ratio_squared += float(ratio.square().sum())
        self.log_ratio += float(log_ratio.sum())

    def join(self, other: OffPolicyness) -> None:
        """Take in what was counted elsewhere."""
        self.num_tokens += other.num_tokens
        self.ratio += other.ratio
        self.ratio_squared += other.ratio_squared
        self.log_ratio += other.log_ratio

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens: (sum r)**2 / (N * sum r**2), in (0, 1].

        1 where all tokens weigh alike (Kong 1992; PipelineRL's rl/ess, arXiv 2509.19128).
        """
        return self.ratio**2 / (self.num_tokens * self.ratio_squared)

    @property
    def kl_k1(self) -> float:
        """KL(behaviour || current) per token, in nats: the mean of -log r; noisy, may be negative."""
        return -self.log_ratio / self.num_tokens

    @property
    def kl_k3(self) -> float:
        """KL(behaviour || current) per token, in nats: the mean of r - 1 - log r, never negative."""
        return (self.ratio - self.log_ratio) / self.num_tokens - 1.0

    def metrics(self, prefix: str = "off_policy") -> dict[str, float]:
        """The three numbers; none without a token."""
        if not self.num_tokens:
            return {}
        return {f"{prefix}/ess": self.ess, f"{prefix}/kl_k1": self.kl_k1, f"{prefix}/kl_k3": self.kl_k3}
