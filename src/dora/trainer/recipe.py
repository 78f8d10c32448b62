"""Names of algorithms, what each one needs, and the combinations that are rejected.

This module does not import torch, so a configuration is validated before anything heavy is loaded. The
mathematics is in `advantage`, `loss` and `corrections`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from dora.errors import ConfigError

AdvEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "gigpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]
PolicyLoss = Literal["ppo_clip", "dual_clip", "triplet_clip", "gspo", "cispo", "reinforce", "online_dpo"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
ProximalPolicy = Literal["behavior", "recomputed", "interpolated"]
TokenCorrection = Literal["none", "tis", "icepop"]
SequenceCorrection = Literal["none", "mis"]
LrDecay = Literal["linear", "cosine", "constant"]
ModelImplementation = Literal["auto", "dora", "transformers"]
Dtype = Literal["float32", "bfloat16"]  # of forward and backward passes, and of engines


class EarlierSchedule(NamedTuple):
    """The learning-rate schedule of the steps before `until_step`, in a run that then got more steps."""

    until_step: int
    num_steps: int  # that the run had
    lr_decay: LrDecay
    min_lr_ratio: float = 0.0


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `lr`, then constant, or to `lr * min_lr_ratio` at `num_steps`, the run's length.

    It falls on a line, or on half a period of a cosine. A run that got more steps when it was resumed has
    `earlier_schedules`, in order. Their steps have the rate of the first one that covers them.
    """

    lr: float
    num_steps: int
    warmup_steps: int = 0
    lr_decay: LrDecay = "linear"
    earlier_schedules: tuple[EarlierSchedule, ...] = ()
    min_lr_ratio: float = 0.0

    def lr_of(self, step: int) -> float:
        """The rate of the 0-based `step`."""
        covering = (earlier for earlier in self.earlier_schedules if step < earlier.until_step)
        last = EarlierSchedule(self.num_steps, self.num_steps, self.lr_decay, self.min_lr_ratio)
        _, num_steps, decay, lowest = next(covering, last)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if decay == "constant":
            return self.lr
        part_left = max(0.0, (num_steps - step) / (num_steps - self.warmup_steps))
        if decay == "cosine":
            part_left = 0.5 * (1.0 - math.cos(math.pi * part_left))
        return self.lr * (lowest + (1.0 - lowest) * part_left)


# The rewards that an estimator needs before it computes the first advantage. Scope "batch" rules out gradient
# accumulation while the batch fills: a clipped loss cannot be rescaled afterwards by a mean and a deviation.
ADVANTAGE_SCOPE: Mapping[str, Literal["group", "batch"]] = MappingProxyType(
    {
        "grpo": "group",
        "dr_grpo": "group",
        "rloo": "group",
        "gigpo": "group",
        "reinforce_plus_plus": "batch",
        "reinforce_plus_plus_baseline": "batch",
        "gae": "batch",
    }
)


@dataclass(frozen=True)
class PolicyLossTraits:
    """Requirements of a policy loss on the trainer.

    `unit`: what a micro-batch must not split. `is_clipped`: tokens whose ratio leaves the clip range lose
    their gradient or have their weight bounded. `loss_agg_mode`: the only aggregation that gives the
    published objective; None if any does. `needs_advantage`: a token of advantage 0 has no gradient.
    """

    unit: Literal["token", "sequence", "pair"] = "token"
    is_clipped: bool = True
    loss_agg_mode: str | None = None
    needs_advantage: bool = True


LOSS_TRAITS: Mapping[str, PolicyLossTraits] = MappingProxyType(
    {
        "ppo_clip": PolicyLossTraits(),
        "dual_clip": PolicyLossTraits(),
        "triplet_clip": PolicyLossTraits(loss_agg_mode="seq-mean-token-sum-norm"),
        "gspo": PolicyLossTraits(unit="sequence"),
        "cispo": PolicyLossTraits(),
        "reinforce": PolicyLossTraits(is_clipped=False),
        "online_dpo": PolicyLossTraits(unit="pair", loss_agg_mode="seq-mean-token-sum"),
    }
)


def is_own(name: str) -> bool:
    """Whether an estimator or a loss is the user's, "file.py:function" or "package.module:function"."""
    return ":" in name


def advantage_scope(estimator: str) -> Literal["group", "batch"]:
    """See `ADVANTAGE_SCOPE`. A user's own estimator gets the rewards of one group."""
    return ADVANTAGE_SCOPE.get(estimator, "group")


def traits_of(loss: str) -> PolicyLossTraits:
    """See `LOSS_TRAITS`. Of a user's own loss only the arguments are known."""
    return LOSS_TRAITS.get(loss, PolicyLossTraits(unit="sequence", needs_advantage=False))


@dataclass(frozen=True)
class Correction:
    """Off-policy correction between the behaviour policy, which sampled, and the policy in training.

    `proximal` selects the old log-probs of the loss, which are the centre of its clip range: `behavior`, the
    engine's; `recomputed`, the trainer's before the step (decoupled PPO, arXiv 2110.00641, 2505.24298);
    `interpolated`, between behaviour and current by staleness (A-3PO, arXiv 2512.06547).

    `token` acts on the importance ratio r = proximal / behaviour of each token. `tis` multiplies the token's
    loss by min(r, tis_cap) (arXiv 1802.01561; fengyao.notion.site/off-policy-rl). `icepop` multiplies it by r
    inside [icepop_low, icepop_high] and by 0 outside (arXiv 2510.18855). `sequence` = `mis` masks a response
    whose geometric mean of r is outside [mis_low, mis_high] (richardli.xyz/rl-collapse). With `proximal` =
    `behavior` the ratio of the loss itself already is current / behaviour, so icepop and mis take that ratio
    as r and only mask.

    `staleness_decay` multiplies the loss of a response by staleness_decay ** staleness (ours; 1: off).
    """

    proximal: ProximalPolicy = "behavior"
    token: TokenCorrection = "none"
    sequence: SequenceCorrection = "none"
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    mis_low: float = 0.9
    mis_high: float = 1.1
    staleness_decay: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a combination that would have no effect, or would lose a weight."""
        if self.proximal == "behavior" and self.token == "tis":
            raise ConfigError(
                "correction.token = tis with correction.proximal = behavior: the weight proximal / behaviour "
                "is 1 for every token; choose proximal = recomputed or interpolated"
            )
        if self.proximal != "behavior" and self.token == "none":
            raise ConfigError(
                f"correction.proximal = {self.proximal} with correction.token = none: the importance weight "
                "proximal / behaviour would be lost; choose token = tis or icepop"
            )


def unsafe_reason(loss: str, correction: Correction, max_staleness: int) -> str | None:
    """Why stale samples can destabilise a run with this recipe; None if they cannot, or for one's own loss.

    A constant must bound the influence of a stale token: either the clip range of the loss around the
    behaviour policy, or a bounded importance weight on a ratio that cannot drift itself. The weights of tis
    and icepop are bounded, and every proximal policy but the behaviour policy needs one of the two. Pair
    losses use no ratio: online DPO was the most robust to staleness in arXiv 2410.18252.
    """
    traits = traits_of(loss)
    if max_staleness == 0 or traits.unit == "pair" or traits.is_clipped:
        return None
    if correction.proximal == "behavior" and correction.token == "none":
        return (
            f"loss {loss} multiplies each token by its unbounded ratio current / behaviour; choose a "
            "clipped loss, correction.token = icepop, or proximal = recomputed with token = tis"
        )
    if correction.proximal == "interpolated":
        return (
            f"loss {loss} multiplies each token by its unbounded ratio current / interpolated; choose a "
            "clipped loss or proximal = recomputed"
        )
    return None


def never_clipped_reason(
    loss: str, proximal: str, max_staleness: int, mini_batch_tokens: int | None
) -> str | None:
    """Why the clip range of a loss has no effect; None if it may clip a token.

    With `mini_batch_tokens` a step has several updates, so the later ones move away from the proximal policy.
    """
    if is_own(loss):
        return None
    if not traits_of(loss).is_clipped:
        return f"with policy_loss = {loss}: it clips nothing"
    where = f"with correction.proximal = {proximal}"
    if proximal == "recomputed" and mini_batch_tokens is None:
        return f"{where}: in the only update of a step the ratio to it is 1, and is never clipped"
    if proximal == "interpolated" and max_staleness == 0:
        return f"{where} and max_staleness = 0: the ratio to it is 1, and is never clipped"
    return None


def check_recipe(loss: str, loss_agg_mode: str, correction: Correction, max_staleness: int) -> None:
    """Raise ConfigError, with reason and remedy, for a recipe that is unsafe or partly without effect."""
    traits = traits_of(loss)
    if traits.loss_agg_mode not in (None, loss_agg_mode):
        raise ConfigError(
            f"loss_agg_mode = {loss_agg_mode} with policy_loss = {loss}: this loss is defined with "
            f"{traits.loss_agg_mode}; set loss_agg_mode = {traits.loss_agg_mode} or choose another loss"
        )
    if traits.unit == "pair" and correction != Correction():
        raise ConfigError(
            f"policy_loss = {loss} with correction = {correction}: it uses no behaviour log-probs, so a "
            "correction would do nothing; remove the correction"
        )
    reason = unsafe_reason(loss, correction, max_staleness)
    if reason:
        raise ConfigError(f"policy_loss = {loss} at max_staleness = {max_staleness}: {reason}")
