"""Which algorithm: its names, what each part needs, and the combinations that are refused.

Plain values without torch, so that a configuration can be judged before anything heavy is
loaded. The mathematics is in `advantage`, `loss`, `preference` and `corrections`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dora.errors import ConfigError

AdvEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]
PolicyLoss = Literal["ppo_clip", "dual_clip", "triplet_clip", "gspo", "cispo", "reinforce", "online_dpo"]

# What must be known before the first advantage is: a group's rewards, or those of the whole batch (of gae
# also the critic's values). A trainer that accumulates gradients while the batch fills up has to wait for
# the latter: a mean and a deviation cannot be divided out of a clipped loss afterwards.
NEEDS: Mapping[AdvEstimator, Literal["group", "batch"]] = MappingProxyType(
    {
        "grpo": "group",
        "dr_grpo": "group",
        "rloo": "group",
        "reinforce_plus_plus": "batch",
        "reinforce_plus_plus_baseline": "batch",
        "gae": "batch",
    }
)


@dataclass(frozen=True)
class Traits:
    """What a policy loss asks of the trainer.

    `unit` is what a micro-batch must hold whole. `is_clipped` says that a token whose probability
    has moved too far loses its influence. `loss_agg_mode` is the only one that gives the published
    objective; None where any does.
    """

    unit: Literal["token", "sequence", "pair"] = "token"
    is_clipped: bool = True
    loss_agg_mode: str | None = None


TRAITS: Mapping[PolicyLoss, Traits] = MappingProxyType(
    {
        "ppo_clip": Traits(),
        "dual_clip": Traits(),
        "triplet_clip": Traits(loss_agg_mode="seq-mean-token-sum-norm"),
        "gspo": Traits(unit="sequence"),
        "cispo": Traits(),
        "reinforce": Traits(is_clipped=False),
        "online_dpo": Traits(unit="pair", loss_agg_mode="seq-mean-token-sum"),
    }
)


@dataclass(frozen=True)
class Correction:
    """How the gap between the policy that sampled and the policy in training is corrected.

    `proximal`: the log-probs that the loss compares with, and so where its clip range is centred.
    behaviour: those the engine sampled with. recomputed: the trainer's own before the step
    (decoupled PPO, arXiv 2110.00641, 2505.24298). interpolated: between behaviour and current, by
    staleness (A-3PO, arXiv 2512.06547).
    `token`, on r = proximal / behaviour of each token: tis multiplies its loss by min(r, tis_cap)
    (arXiv 1802.01561; fengyao.notion.site/off-policy-rl); icepop by r inside [icepop_low,
    icepop_high] and by 0 outside (arXiv 2510.18855). `sequence` = mis drops a response whose
    geometric mean of r is outside [mis_low, mis_high] (richardli.xyz/rl-collapse). Where `proximal`
    is behaviour, the loss's own ratio already carries r = current / behaviour, and icepop and mis
    only mask. `age_decay` weights a response by age_decay ** staleness (ours; 1: off).
    """

    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    token: Literal["none", "tis", "icepop"] = "none"
    sequence: Literal["none", "mis"] = "none"
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    mis_low: float = 0.9
    mis_high: float = 1.1
    age_decay: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work, or would silently do nothing."""
        if self.proximal == "behaviour" and self.token == "tis":
            raise ConfigError(
                "correction.token = tis with correction.proximal = behaviour: its weight, proximal / "
                "behaviour, is 1 for every token; choose proximal = recomputed or interpolated"
            )
        if self.proximal != "behaviour" and self.token == "none":
            raise ConfigError(
                f"correction.proximal = {self.proximal} with correction.token = none: the importance weight "
                "proximal / behaviour would be lost; choose token = tis or icepop"
            )
        if self.tis_cap < 1.0:
            raise ConfigError(
                f"correction.tis_cap = {self.tis_cap}: a cap below 1 shrinks on-policy tokens; use 2"
            )
        for name, low, high in (
            ("icepop", self.icepop_low, self.icepop_high),
            ("mis", self.mis_low, self.mis_high),
        ):
            if not 0.0 <= low <= 1.0 <= high:
                raise ConfigError(
                    f"correction.{name}_low = {low}, correction.{name}_high = {high}: the range must "
                    "hold 1, the ratio of an on-policy token"
                )
        if not 0.0 < self.age_decay <= 1.0:
            raise ConfigError(
                f"correction.age_decay = {self.age_decay}: must be above 0 and at most 1 (1: off)"
            )

    @property
    def bounds_tokens(self) -> bool:
        """Whether no token's importance weight can exceed a constant."""
        return self.token == "icepop" or (self.token == "tis" and math.isfinite(self.tis_cap))


def why_unsafe(loss: PolicyLoss, correction: Correction, max_staleness: int) -> str | None:
    """Why stale samples could wreck a run of this recipe; None where they cannot.

    The rule: some constant must bound what one stale token can do. It is the loss's clip range
    around the behaviour, or a bounded importance weight on a ratio that cannot drift itself.
    Recomputed log-probs equal the current ones when a batch gets one step, so a clip range around
    them never acts. A loss over pairs uses no ratio at all: online DPO was the most robust to
    staleness in arXiv 2410.18252.
    """
    traits = TRAITS[loss]
    if max_staleness == 0 or traits.unit == "pair":
        return None
    if correction.proximal == "behaviour" and not traits.is_clipped and not correction.bounds_tokens:
        return (
            f"loss {loss} multiplies each token by its unbounded ratio current / behaviour; choose a "
            "clipped loss, correction.token = icepop, or proximal = recomputed with token = tis"
        )
    if correction.proximal != "behaviour" and not correction.bounds_tokens:
        return (
            f"correction.tis_cap = {correction.tis_cap} leaves the ratio proximal / behaviour unbounded, "
            "and clipping around the proximal policy does not limit it; set a finite tis_cap"
        )
    if correction.proximal == "interpolated" and not traits.is_clipped:
        return (
            f"loss {loss} multiplies each token by its unbounded ratio current / interpolated; choose a "
            "clipped loss or proximal = recomputed"
        )
    return None


def why_never_clipped(
    loss: PolicyLoss, proximal: str, max_staleness: int, batch_tokens: int | None
) -> str | None:
    """What leaves a loss's bounds of the ratio without effect; None where they may decide a token.

    `batch_tokens`: a step has several updates, so that the last ones are away from the policy before it.
    """
    if not TRAITS[loss].is_clipped:
        return f"with policy_loss = {loss}: it clips nothing"
    where = f"with correction.proximal = {proximal}"
    if proximal == "recomputed" and batch_tokens is None:
        return f"{where}: in the only update of a step the ratio to it is 1, and is never clipped"
    if proximal == "interpolated" and max_staleness == 0:
        return f"{where} and max_staleness = 0: the ratio to it is 1, and is never clipped"
    return None


def check_recipe(loss: PolicyLoss, loss_agg_mode: str, correction: Correction, max_staleness: int) -> None:
    """Raise ConfigError, with reason and remedy, for a recipe that is unsafe or partly without effect."""
    traits = TRAITS[loss]
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
    reason = why_unsafe(loss, correction, max_staleness)
    if reason:
        raise ConfigError(f"policy_loss = {loss} at max_staleness = {max_staleness}: {reason}")
