"""Off-policy correction of one micro-batch: the old log-probs of the loss, and a weight for every token.

No weight depends on a total of the batch, and a masked token stays in the denominators. A correction of one
token therefore changes no other token, and a batch can be cut anywhere between responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dora.trainer.loss import importance_ratios, sequence_means
from dora.trainer.recipe import Correction


@dataclass(frozen=True)
class CorrectedTokens:
    """`old_logprobs` are the denominator of the loss's ratio, `weights` multiply its value; both detached.

    `is_truncated` marks tokens whose weight was capped, `is_masked` those of weight 0. All [N].
    """

    old_logprobs: Tensor
    weights: Tensor
    is_truncated: Tensor
    is_masked: Tensor


def interpolated_logprobs(behaviour: Tensor, current: Tensor, staleness: Tensor) -> Tensor:
    """A-3PO's approximation of the proximal policy without a forward pass (arXiv 2512.06547); all [N].

    (1 / d) * behaviour + (1 - 1 / d) * current, with d the staleness in versions; current at d = 0. At d = 1
    this is the behaviour policy; with growing staleness it approaches the current one.
    """
    weight = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0).to(current.dtype)
    return torch.lerp(current, behaviour, weight)


def apply_correction(
    correction: Correction,
    logprobs: Tensor,
    behaviour: Tensor,
    num_tokens: Sequence[int],
    staleness: Tensor,
    proximal: Tensor | None = None,
) -> CorrectedTokens:
    """Old log-probs and weights of the N tokens of B whole responses.

    `logprobs` are the current policy's, `behaviour` the engine's, `staleness` (versions) that of each token's
    response; all [N]. `proximal` [N] are the log-probs before the step's first update; None if the step has
    a single update, where they equal the current ones. `num_tokens` are the B response lengths.
    """
    current = logprobs.detach()
    is_coupled = correction.proximal == "behavior"
    if correction.proximal == "interpolated":
        numerator = interpolated_logprobs(behaviour, current, staleness)
    else:
        numerator = current if is_coupled or proximal is None else proximal
    ratio = importance_ratios(numerator, behaviour)

    weights = torch.ones_like(ratio)
    is_truncated = is_masked = torch.zeros_like(ratio, dtype=torch.bool)
    if correction.token == "tis":
        weights, is_truncated = ratio.clamp(max=correction.tis_cap), ratio > correction.tis_cap
    elif correction.token == "icepop":
        is_masked = (ratio < correction.icepop_low) | (ratio > correction.icepop_high)
        weights = weights if is_coupled else ratio
    if correction.sequence == "mis":
        geometric_mean = sequence_means(numerator - behaviour, num_tokens).exp()
        is_masked = is_masked | (geometric_mean < correction.mis_low) | (geometric_mean > correction.mis_high)
    if correction.staleness_decay != 1.0:
        weights = weights * correction.staleness_decay**staleness
    old_logprobs = behaviour if is_coupled else numerator
    return CorrectedTokens(old_logprobs, weights.masked_fill(is_masked, 0.0), is_truncated, is_masked)
