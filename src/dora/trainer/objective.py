"""Policy losses behind one door, chosen by name.

`recipe.TRAITS` says what each asks of the micro-batch it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.loss import cispo_loss, clipped_loss, dual_clipped_loss, gspo_loss, reinforce_loss
from dora.trainer.preference import online_dpo_loss
from dora.trainer.recipe import PolicyLoss


@dataclass(frozen=True)
class LossSettings:
    """Bounds of the ratio, and DPO's temperature; each loss reads its own.

    The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]; `clip_ratio_c` is the cap of
    dual and triplet clip (no unit). `dpo_beta` is per nat.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    dpo_beta: float = 0.1


@dataclass(frozen=True)
class Tokens:
    """N tokens of B whole responses, one response after another.

    `logprobs` carry the gradient. `old_logprobs` are what the ratio divides by, `advantages` are
    per token; all [N]. `num_tokens` are the B lengths, each at least 1.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    num_tokens: Sequence[int]
    reference_logprobs: Tensor | None = None


# A policy loss: the value of every token [N] and whether a bound decided it [N].
Objective = Callable[[Tokens, LossSettings], tuple[Tensor, Tensor]]


def _ppo_clip(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    return clipped_loss(t.logprobs, t.old_logprobs, t.advantages, s.clip_ratio_low, s.clip_ratio_high)


def _dual_clip(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    bounds = s.clip_ratio_low, s.clip_ratio_high, s.clip_ratio_c
    return dual_clipped_loss(t.logprobs, t.old_logprobs, t.advantages, *bounds)


def _gspo(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    bounds = s.clip_ratio_low, s.clip_ratio_high
    return gspo_loss(t.logprobs, t.old_logprobs, t.advantages, t.num_tokens, *bounds)


def _cispo(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    return cispo_loss(t.logprobs, t.old_logprobs, t.advantages, s.clip_ratio_low, s.clip_ratio_high)


def _reinforce(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    return reinforce_loss(t.logprobs, t.old_logprobs, t.advantages)


def _online_dpo(t: Tokens, s: LossSettings) -> tuple[Tensor, Tensor]:
    if t.reference_logprobs is None:
        raise ConfigError(
            "policy_loss = online_dpo: its margin is measured from a reference policy; give the trainer one"
        )
    return online_dpo_loss(t.logprobs, t.reference_logprobs, t.num_tokens, s.dpo_beta)


OBJECTIVES: Mapping[PolicyLoss, Objective] = MappingProxyType(
    {
        "ppo_clip": _ppo_clip,
        "dual_clip": _dual_clip,
        "triplet_clip": _dual_clip,
        "gspo": _gspo,
        "cispo": _cispo,
        "reinforce": _reinforce,
        "online_dpo": _online_dpo,
    }
)
