"""Advantages from rewards, by verl's names of `adv_estimator`, and the shaping that precedes them.

All are plain floats: one per response, except for `gae`, where it is one per token. `recipe.NEEDS`
says which estimators look at a group and which at the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dora.trainer.recipe import AdvEstimator

Rewards = Sequence[float]


def group_advantages(rewards: Rewards, eps: float = 1e-6) -> list[float]:
    """(reward - mean) / (std + eps) for every sibling of one group (GRPO, arXiv 2402.03300, 4.1.2).

    `std` is the sample deviation (n - 1), as in verl. A group whose rewards are all equal, a
    group of one included, compares nothing: its advantages are exactly 0.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


def centred(rewards: Rewards) -> list[float]:
    """reward - mean for every sibling of one group (Dr. GRPO, arXiv 2503.20783).

    Without the division, hard and easy prompts are not weighted up. Equal rewards give exactly 0.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Rewards) -> list[float]:
    """reward - mean of the *other* siblings' rewards (RLOO, arXiv 2402.14740).

    It is n / (n - 1) times `centred`; a group of one has nobody to compare with and gets 0.
    """
    num = len(rewards)
    return [advantage * num / (num - 1) if num > 1 else 0.0 for advantage in centred(rewards)]


def best_and_worst(rewards: Rewards) -> list[float]:
    """+1 for the best sibling of one group, -1 for the worst, 0 for all others (arXiv 2410.18252).

    The pair that online DPO learns from. Ties go to the earliest; equal rewards make no pair.
    """
    signs = [0.0] * len(rewards)
    best, worst = max(rewards), min(rewards)
    if best > worst:
        signs[rewards.index(best)], signs[rewards.index(worst)] = 1.0, -1.0
    return signs


def whitened(values: Sequence[float], num_tokens: Sequence[int], eps: float = 1e-8) -> list[float]:
    """(value - mean) / sqrt(variance + eps), where value i stands for num_tokens[i] tokens.

    Mean and variance (over n - 1) are over the tokens of the whole batch, as verl's
    `masked_whiten`. A batch without any spread compares nothing and gives exactly 0.
    """
    total = sum(num_tokens)
    if min(values) == max(values) or total < 2:
        return [0.0] * len(values)
    pairs = list(zip(values, num_tokens, strict=True))
    mean = math.fsum(value * num for value, num in pairs) / total
    variance = math.fsum((value - mean) ** 2 * num for value, num in pairs) / (total - 1)
    return [(value - mean) / math.sqrt(variance + eps) for value in values]


_OF_A_GROUP: Mapping[AdvEstimator, Callable[[Rewards], list[float]]] = MappingProxyType(
    {
        "grpo": group_advantages,
        "dr_grpo": centred,
        "rloo": leave_one_out,
        "reinforce_plus_plus": list,
        "reinforce_plus_plus_baseline": centred,
    }
)


def batch_advantages(
    estimator: AdvEstimator, rewards: Sequence[Rewards], num_tokens: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Advantages of a whole batch, laid out as `rewards`: group by group, sibling by sibling.

    reinforce_plus_plus (arXiv 2501.03262, with discount 1) whitens the rewards over the batch, its
    baseline variant first subtracts the group's mean; the others stop at the group, so that a part
    of a batch gives the same values. `num_tokens` are response lengths, used for whitening only.
    """
    scores = [_OF_A_GROUP[estimator](group) for group in rewards]
    if estimator not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return scores
    flat = iter(whitened([x for group in scores for x in group], [n for group in num_tokens for n in group]))
    return [[next(flat) for _ in group] for group in scores]


def gae(reward: float, values: Sequence[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) of one response: advantages and returns.

    `values` are the critic's before each token; beyond the last one the value is 0, and `reward` comes
    with it. delta = r + gamma V' - V; A = delta + gamma lam A'; return = A + V.
    """
    advantages = [0.0] * len(values)
    advantage = next_value = 0.0
    for i in range(len(values) - 1, -1, -1):
        delta = reward + gamma * next_value - values[i]
        advantages[i] = advantage = delta + gamma * lam * advantage
        next_value, reward = values[i], 0.0
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """What to add to the reward of a long response, from 0 to -factor (DAPO, arXiv 2503.14476).

    0 up to max_tokens - buffer_tokens, then linear; -factor at `max_tokens` and beyond.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(excess / buffer_tokens, 0.0), 1.0)
