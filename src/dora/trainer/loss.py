"""Policy losses, the critic's loss, KL estimators and loss aggregation; all plain torch.

A policy loss returns one value per token and whether clipping decided it. Every aggregation mode is a
weighted sum over tokens whose weights depend on lengths alone, so a batch can be cut into micro-batches
without changing its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.errors import ConfigError, RunError
from dora.loading import describe_call, load_attribute
from dora.model.device import to_device
from dora.trainer.recipe import KLEstimator, LossAggMode

LOSS_KEY = "algorithm.policy_loss"
MAX_LOG_RATIO = 20.0  # larger log-ratios carry no information, and exp of them may overflow
MAX_K3 = 10.0  # nats; verl's bound on one token of its low-variance estimate
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class LossSettings:
    """Clip ranges of the importance ratio, and DPO's temperature; each loss reads its own.

    The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]. `clip_ratio_c` is the cap of dual clip
    and triplet clip (no unit). `dpo_beta` is per nat.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    dpo_beta: float = 0.1


@dataclass(frozen=True)
class LossInputs:
    """N tokens of B whole responses, one response after another.

    `logprobs` carry the gradient. `old_logprobs` are the denominator of the ratio, `advantages` are per
    token; all [N]. `num_tokens` are the B response lengths, each at least 1. In a run, losses of one's own
    also get `behavior_logprobs` [N], of the versions that sampled the tokens, and `staleness` [N] (versions).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    num_tokens: Sequence[int]
    reference_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    staleness: Tensor | None = None


# The loss of every token [N] and whether clipping decided it [N].
PolicyLossFunction = Callable[[LossInputs, LossSettings], tuple[Tensor, Tensor]]


def unnormalized_token_weights(
    num_tokens: Sequence[int], mode: LossAggMode, scale: int | None = None
) -> list[float]:
    """The weight of every token of each response, by verl's `loss_agg_mode`, times `batch_divisor`.

    Each weight depends on its own response alone: a gradient accumulated with these weights while the batch
    fills equals the gradient of the whole batch after division by the batch's divisor. `num_tokens` are the
    response lengths. `scale` (tokens) is the constant divisor of seq-mean-token-sum-norm (Dr. GRPO, arXiv
    2503.20783; LongCat's T_max, arXiv 2509.18883); the other modes ignore it.
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


def batch_divisor(num_tokens: Sequence[int], mode: LossAggMode) -> int:
    """The divisor of a batch's summed loss: its tokens for token-mean, else its responses."""
    return sum(num_tokens) if mode == "token-mean" else len(num_tokens)


def importance_ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """new / old probability of every token [N], kept within e**-20 to e**20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """PPO's loss of every token (arXiv 1707.06347, eq. 7) and whether clipping decided it; all [N]."""
    ratio = importance_ratios(tokens.logprobs, tokens.old_logprobs)
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def dual_clipped_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """`clipped_loss` with the loss of a token of A < 0 bounded by -A * clip_ratio_c; all [N].

    Dual-clip PPO (arXiv 1912.09729), where clip_ratio_c > 1; its name is verl's. LongCat's triplet clip
    (arXiv 2509.18883) is the same function: clip_ratio_high is eps_pos_high, clip_ratio_low is eps_neg_low
    and clip_ratio_c is eps_neg_high. It differs by its constant divisor T_max.
    """
    losses, is_clipped = clipped_loss(tokens, settings)
    ceiling = -tokens.advantages * settings.clip_ratio_c
    is_capped = (tokens.advantages < 0) & (losses > ceiling)
    return torch.where(is_capped, ceiling, losses), is_clipped | is_capped


def sequence_means(values: Tensor, num_tokens: Sequence[int]) -> Tensor:
    """The mean over each response, broadcast to its tokens: [N] to [N].

    `num_tokens` are the lengths of the responses in `values`, each at least 1.
    """
    return torch.cat([part.mean().expand(len(part)) for part in values.split(list(num_tokens))])


def gspo_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss with one ratio per response (GSPO-token, arXiv 2507.18071); all [N].

    The ratio is the geometric mean of the token ratios, detached, times p / detach(p): its value is the
    response's, and each token gets its own gradient. The paper clips to [1 - 3e-4, 1 + 4e-4] and aggregates
    by seq-mean-token-mean.
    """
    detached = tokens.logprobs.detach()
    means = sequence_means(detached - tokens.old_logprobs, tokens.num_tokens)
    log_ratio, zeros = tokens.logprobs - detached + means, torch.zeros_like(detached)
    return clipped_loss(replace(tokens, logprobs=log_ratio, old_logprobs=zeros), settings)


def cispo_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """-detach(clip(ratio)) * A * log p (CISPO, arXiv 2506.13585); all [N].

    The weight alone is clipped, so no token loses its gradient. The paper has no lower bound, as with a
    clip_ratio_low of 1.
    """
    ratio = importance_ratios(tokens.logprobs.detach(), tokens.old_logprobs)
    weight = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return -weight * tokens.advantages * tokens.logprobs, weight != ratio


def reinforce_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """-detach(ratio) * A * log p: the policy gradient with an importance weight; all [N].

    The loss does not bound the weight; `corrections` can (as V-trace does, arXiv 1802.01561).
    """
    ratio = importance_ratios(tokens.logprobs.detach(), tokens.old_logprobs)
    return -ratio * tokens.advantages * tokens.logprobs, torch.zeros_like(ratio, dtype=torch.bool)


def online_dpo_loss(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta * margin) of every pair, divided among its tokens (arXiv 2305.18290, eq. 7); all [N].

    The responses come in pairs, best first (`advantage.preference_pair` selects them), so `num_tokens` has an
    even length. margin = (log policy - log reference) of the best response minus that of the worst, each
    summed over its tokens. The tokens of each response add up to the pair's loss, so seq-mean-token-sum over
    the responses is the mean over pairs. The second result marks the tokens of pairs in the wrong order
    (margin below 0). The loss has no ratio to the behaviour policy, so it is off-policy by construction
    (arXiv 2410.18252). Raises ConfigError without log-probs of a reference.
    """
    if tokens.reference_logprobs is None:
        raise ConfigError("policy_loss = online_dpo needs log-probs of a reference policy; pass `reference`")
    lengths, logprobs = list(tokens.num_tokens), tokens.logprobs
    sums = torch.stack([part.sum() for part in (logprobs - tokens.reference_logprobs).split(lengths)])
    margins = sums[0::2] - sums[1::2]
    losses = F.softplus(-settings.dpo_beta * margins).repeat_interleave(2)
    repeats, num = to_device(torch.tensor(lengths), logprobs.device), len(logprobs)
    is_wrong = (margins.detach() < 0).repeat_interleave(2).repeat_interleave(repeats, output_size=num)
    return (losses / repeats).repeat_interleave(repeats, output_size=num), is_wrong


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """A critic's loss of every token, and whether clipping decided it; all [N].

    max of (V - R)**2 / 2 for V and for V clipped to old_V +- clip, as in verl.
    """
    unclipped = (values - returns).square()
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) at every token [N], in nats (joschu.net/blog/kl-approx.html).

    With d = log policy - log reference: k1 = d; k2 = d**2 / 2; k3 = exp(-d) - 1 + d, at most MAX_K3 as in
    verl's low_var_kl. As a term of the loss, the gradient of k1 averages to 0 (k1 belongs into the reward),
    that of k2 is the gradient of the true divergence, and that of k3 is biased. k1+ and k3+ have the value of
    k1 and k3 and the gradient of k2 (verl's names).
    """
    log_ratio = logprobs - reference_logprobs
    k2 = 0.5 * log_ratio.square()
    if estimator == "k2":
        return k2
    if estimator in ("k1", "k1+"):
        value = log_ratio
    else:
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = ((-bounded).exp() - 1.0 + bounded).clamp(max=MAX_K3)  # never negative
    return value.detach() + k2 - k2.detach() if estimator.endswith("+") else value


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = MappingProxyType(
    {
        "ppo_clip": clipped_loss,
        "dual_clip": dual_clipped_loss,
        "triplet_clip": dual_clipped_loss,
        "gspo": gspo_loss,
        "cispo": cispo_loss,
        "reinforce": reinforce_loss,
        "online_dpo": online_dpo_loss,
    }
)


def policy_loss_function(name: str, options: Mapping[str, object] = _NO_OPTIONS) -> PolicyLossFunction:
    """The loss of a name in `POLICY_LOSSES`, or the user's own, "file.py:function".

    `options` are keyword arguments of the user's own. Raises ConfigError.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    own: Callable[..., object] = load_attribute(name, LOSS_KEY, ConfigError)

    def checked(tokens: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
        try:
            returned = own(tokens, settings, **options)
        except Exception as error:
            hint = ", whose reference_logprobs are None without algorithm.kl_loss_coef"
            raise RunError(
                f"{LOSS_KEY} = {name!r} raised {describe_call(name, error)}; correct it. It is called with "
                f"LossInputs{hint if tokens.reference_logprobs is None else ''}, LossSettings, and the "
                f"arguments in {LOSS_KEY}_options: {', '.join(options) or 'none'}"
            ) from error
        shape = tokens.logprobs.shape
        match returned:
            case (Tensor() as losses, Tensor(dtype=torch.bool) as is_clipped):
                if losses.shape == is_clipped.shape == shape and losses.requires_grad:
                    return losses, is_clipped
        raise ConfigError(
            f"{LOSS_KEY} = {name!r} must return two tensors of shape {[*shape]}, one value per token: the "
            "loss, computed from tokens.logprobs, which carry the gradient, and whether clipping decided it "
            f"(torch.bool); it returned {_describe(returned)}"
        )

    return checked


def _describe(returned: object) -> str:
    if isinstance(returned, Tensor):
        gradient = "" if returned.requires_grad else " without a gradient"
        return f"a tensor of shape {[*returned.shape]} and {returned.dtype}{gradient}"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_describe, returned))})"
    return type(returned).__name__


def check_own_loss(
    name: str,
    settings: LossSettings,
    *,
    has_reference: bool,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> None:
    """Call the user's own loss with two short responses. Raises ConfigError, also if it has no gradient."""
    function = policy_loss_function(name, options)
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], requires_grad=True)
    old = logprobs.detach() - torch.tensor([0.1, -0.1, 0.0, 0.3, -0.3])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    ages = torch.tensor([0, 0, 1, 1, 1])
    inputs = LossInputs(logprobs, old, advantages, [2, 3], old if has_reference else None, old, ages)
    try:
        losses, _ = function(inputs, settings)
        losses.sum().backward()
    except (ConfigError, RunError) as error:
        raise ConfigError(f"{error}") from error
    except Exception as error:
        raise ConfigError(
            f"{LOSS_KEY} = {name!r}: its gradient raised {describe_call(name, error)}"
        ) from error
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise ConfigError(
            f"{LOSS_KEY} = {name!r}: the gradient with respect to tokens.logprobs is {logprobs.grad} for two "
            "short responses; compute the loss of each token from tokens.logprobs"
        )
