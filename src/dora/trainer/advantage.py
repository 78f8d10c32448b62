"""Advantages from rewards, under verl's names of `adv_estimator`, and the reward shaping before them.

Everything is plain floats: one advantage per response, per turn for `gigpo`, per token for `gae`. This module
does not import torch. `recipe.ADVANTAGE_SCOPE` lists which estimators need a group and which the whole batch.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from dora.errors import ConfigError, RunError
from dora.loading import describe_call, load_attribute
from dora.trainer.recipe import advantage_scope, is_own

ESTIMATOR_KEY = "algorithm.adv_estimator"
MAX_REWARD = 1e6  # absolute value; above it, sums and squares of rewards and gradients lose their precision

Rewards = Sequence[float]
T = TypeVar("T")


class Turn(NamedTuple):
    """A turn of the policy: the observation before it, its reward, and how many tokens it has.

    The observation of the first turn is the prompt. That of a turn after a changed history are all tokens
    that it follows. A run passes the token ids as a tuple.
    """

    observation: Hashable
    reward: float
    num_tokens: int


@dataclass(frozen=True)
class AdvantageSettings:
    """How a run turns rewards into advantages.

    `lengths` (tokens) are those of whole responses, with observations, as `max_tokens` limits them. A
    response that uses the last `overlong_buffer_tokens` of `max_tokens` first loses up to `overlong_penalty`
    of its reward (DAPO's soft overlong punishment); 0 leaves the rewards alone. With `is_paired`, the best
    response of a group has advantage 1 and the worst -1, whatever the estimator. With teachers,
    `teacher_coef` > 0, each token has an advantage of its own (`with_teachers`). `gamma` and
    `step_advantage_w` are those of `gigpo_advantages`.
    """

    adv_estimator: str = "grpo"
    max_tokens: int = 0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    is_paired: bool = False
    teacher_coef: float = 0.0
    reward_coef: float = 1.0
    gamma: float = 1.0
    step_advantage_w: float = 1.0

    @property
    def needs_batch(self) -> bool:
        """Whether an advantage depends on all rewards of a batch."""
        return advantage_scope(self.adv_estimator) == "batch" and not self.is_paired

    @property
    def needs_turns(self) -> bool:
        """Whether each turn has an advantage of its own: see `turn_advantages`."""
        return (self.adv_estimator == "gigpo" or takes_turns(self.adv_estimator)) and not self.is_paired

    def group_advantages(self, rewards: Rewards, lengths: Sequence[int]) -> Sequence[float | None]:
        """Advantages of one group's responses; None for each if the estimator needs more than rewards."""
        if self.needs_batch or self.needs_turns:
            return [None] * len(rewards)
        return self.batch_advantages([rewards], [lengths], [lengths])[0]

    def turn_advantages(
        self, rewards: Rewards, lengths: Sequence[int], turns: Sequence[Sequence[Turn]]
    ) -> list[list[float]]:
        """Advantages of the tokens of one group's responses, from their turns; the last has the penalty."""
        (shaped,) = self.shape_rewards([rewards], [lengths])
        penalized = [
            [*own[:-1], own[-1]._replace(reward=own[-1].reward + after - before)]
            for own, after, before in zip(turns, shaped, rewards, strict=True)
        ]
        if is_own(self.adv_estimator):
            advantages = own_turn_advantages(self.adv_estimator, shaped, lengths, penalized)
        else:
            advantages = gigpo_advantages(shaped, penalized, self.gamma, self.step_advantage_w)
        return [
            [advantage for advantage, turn in zip(own, of, strict=True) for _ in range(turn.num_tokens)]
            for own, of in zip(advantages, turns, strict=True)
        ]

    def batch_advantages(
        self,
        rewards: Sequence[Rewards],
        lengths: Sequence[Sequence[int]],
        num_tokens: Sequence[Sequence[int]],
    ) -> list[list[float]]:
        """Advantages of a batch, group by group; `num_tokens` are the tokens of each response in the loss."""
        shaped = self.shape_rewards(rewards, lengths)
        if self.is_paired:
            return [preference_pair(group) for group in shaped]
        return compute_advantages(self.adv_estimator, shaped, num_tokens)

    def shape_rewards(
        self, rewards: Sequence[Rewards], lengths: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Rewards of a batch after the overlong penalty, group by group; a critic learns to predict these."""
        return [list(map(self._shape, *group)) for group in zip(rewards, lengths, strict=True)]

    def with_teachers(self, advantages: Rewards, logprobs: Rewards, teacher_logprobs: Rewards) -> list[float]:
        """Advantages of a response's tokens: teacher_coef (log teacher - log policy) + reward_coef advantage.

        `logprobs` are those of the policy that sampled, in nats. The mean of the first term over its tokens
        is -teacher_coef KL(policy || teacher), whose gradient it estimates (on-policy distillation with the
        reverse KL; arXiv 2306.13649, 2306.08543).
        """
        tokens = zip(teacher_logprobs, logprobs, advantages, strict=True)
        return [self.teacher_coef * (theirs - own) + self.reward_coef * a for theirs, own, a in tokens]

    def _shape(self, reward: float, length: int) -> float:
        if not self.overlong_buffer_tokens:
            return reward
        bounds = self.max_tokens, self.overlong_buffer_tokens, self.overlong_penalty
        return reward + overlong_penalty(length, *bounds)


def invalid_rewards_reason(rewards: Rewards) -> str:
    """Why these rewards cannot be used; empty if they can."""
    invalid = [reward for reward in rewards if not abs(reward) <= MAX_REWARD]  # also catches nan
    return f"reward {invalid[0]:g} must be between {-MAX_REWARD:g} and {MAX_REWARD:g}" if invalid else ""


def grpo_advantages(rewards: Rewards, eps: float = 1e-6) -> list[float]:
    """(reward - mean) / (std + eps) for every response of one group (GRPO, arXiv 2402.03300, 4.1.2).

    `std` is the sample deviation (n - 1), as in verl. If all rewards are equal, as in a group of one, the
    advantages are exactly 0.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


def dr_grpo_advantages(rewards: Rewards) -> list[float]:
    """reward - mean for every response of one group (Dr. GRPO, arXiv 2503.20783).

    Without the division by the deviation, very hard and very easy prompts get no extra weight. Equal rewards
    give exactly 0.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo_advantages(rewards: Rewards) -> list[float]:
    """reward - mean of the other responses' rewards (RLOO, arXiv 2402.14740).

    This is n / (n - 1) times `dr_grpo_advantages`. The advantage in a group of one is 0.
    """
    num = len(rewards)
    return [advantage * num / (num - 1) if num > 1 else 0.0 for advantage in dr_grpo_advantages(rewards)]


def gigpo_advantages(
    rewards: Rewards, turns: Sequence[Sequence[Turn]], gamma: float, step_advantage_w: float
) -> list[list[float]]:
    """An advantage for each turn of one group's responses (GiGPO, arXiv 2505.10978).

    It is the GRPO advantage of the response, plus `step_advantage_w` times that of the turn's return among
    all turns of the group with the same observation before them; the latter is 0 where there is one such
    turn. The return is the sum of the rewards of this and later turns, discounted by `gamma` per turn.
    """
    returns = [discounted_returns([turn.reward for turn in own], gamma) for own in turns]
    same: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)  # observation -> (response, turn)
    for i, own in enumerate(turns):
        for k, turn in enumerate(own):
            same[turn.observation].append((i, k))
    advantages = [[a] * len(own) for a, own in zip(grpo_advantages(rewards), turns, strict=True)]
    for found in same.values():
        steps = grpo_advantages([returns[i][k] for i, k in found])
        for (i, k), step in zip(found, steps, strict=True):
            advantages[i][k] += step_advantage_w * step
    return advantages


def discounted_returns(rewards: Rewards, gamma: float) -> list[float]:
    """From each turn on, the sum of the rewards, discounted by `gamma` per turn."""
    returns = [*rewards]
    for k in range(len(returns) - 2, -1, -1):
        returns[k] += gamma * returns[k + 1]
    return returns


def preference_pair(rewards: Rewards) -> list[float]:
    """+1 for the best response of one group, -1 for the worst, 0 for all others (arXiv 2410.18252).

    Online DPO learns from this pair. Ties go to the earliest response; equal rewards make no pair.
    """
    signs = [0.0] * len(rewards)
    best, worst = max(rewards), min(rewards)
    if best > worst:
        signs[rewards.index(best)], signs[rewards.index(worst)] = 1.0, -1.0
    return signs


def whiten(values: Sequence[float], num_tokens: Sequence[int], eps: float = 1e-8) -> list[float]:
    """(value - mean) / sqrt(variance + eps), where value i counts num_tokens[i] times.

    Mean and variance (n - 1) are over the tokens of the whole batch, as in verl's `masked_whiten`. If all
    values are equal the result is exactly 0.
    """
    total = sum(num_tokens)
    if min(values) == max(values) or total < 2:
        return [0.0] * len(values)
    pairs = list(zip(values, num_tokens, strict=True))
    mean = math.fsum(value * num for value, num in pairs) / total
    variance = math.fsum((value - mean) ** 2 * num for value, num in pairs) / (total - 1)
    return [(value - mean) / math.sqrt(variance + eps) for value in values]


_GROUP_ESTIMATORS: Mapping[str, Callable[[Rewards], list[float]]] = MappingProxyType(
    {
        "grpo": grpo_advantages,
        "dr_grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
        "reinforce_plus_plus": list,
        "reinforce_plus_plus_baseline": dr_grpo_advantages,
    }
)


@cache
def _own_estimator(name: str) -> tuple[Callable[..., Sequence[Any]], frozenset[str]]:
    """The user's function, and which of `num_tokens` and `turns` it takes."""
    function = load_attribute(name, ESTIMATOR_KEY, ConfigError)
    try:
        return function, frozenset({"num_tokens", "turns"} & {*inspect.signature(function).parameters})
    except ValueError:  # written in C
        return function, frozenset()


def takes_turns(estimator: str) -> bool:
    """Whether a user's function gives each turn an advantage. Raises ConfigError if it cannot be loaded."""
    return is_own(estimator) and "turns" in _own_estimator(estimator)[1]


def own_advantages(name: str, rewards: Rewards, num_tokens: Sequence[int]) -> list[float]:
    """Advantages of one group's responses, by the user's function `name`.

    The function gets the group's rewards as a list, and their lengths if it has the parameter `num_tokens`.
    It returns as many finite numbers. Raises ConfigError if it cannot be loaded, RunError if it fails.
    """
    advantages = _call_own(name, float, rewards, num_tokens=[*num_tokens])
    if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
        raise _wrong_result(name, rewards, advantages, "a finite number per response")
    return advantages


def own_turn_advantages(
    name: str, rewards: Rewards, num_tokens: Sequence[int], turns: Sequence[Sequence[Turn]]
) -> list[list[float]]:
    """As `own_advantages`, by a function with the parameter `turns`: a list of advantages per response."""
    columns = {"num_tokens": [*num_tokens], "turns": [[*own] for own in turns]}
    advantages = _call_own(name, lambda own: [*map(float, own)], rewards, **columns)
    is_finite = all(map(math.isfinite, chain.from_iterable(advantages)))
    if [*map(len, advantages)] != [*map(len, turns)] or not is_finite:
        raise _wrong_result(name, rewards, advantages, "a list per response, with a finite number per turn")
    return advantages


def _call_own(name: str, convert: Callable[[Any], T], rewards: Rewards, **columns: object) -> list[T]:
    own, taken = _own_estimator(name)
    try:
        returned = own([*rewards], **{column: columns[column] for column in taken})
        return [convert(value) for value in returned]
    except Exception as error:
        raise RunError(
            f"{ESTIMATOR_KEY} = {name!r}: for the rewards {[*rewards]} it raised "
            f"{describe_call(name, error)}; correct it. It is called with a list of rewards"
            f"{''.join(f', and {column}' for column in sorted(taken))}"
        ) from error


def _wrong_result(name: str, rewards: Rewards, returned: object, expected: str) -> RunError:
    problem = f"{ESTIMATOR_KEY} = {name!r}: for the rewards {[*rewards]} it returned {returned}"
    return RunError(f"{problem}; correct it to return {expected}")


def compute_advantages(
    estimator: str, rewards: Sequence[Rewards], num_tokens: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Advantages of a whole batch, in the layout of `rewards`: group by group, response by response.

    reinforce_plus_plus (arXiv 2501.03262, with discount 1) whitens the rewards over the batch; its baseline
    variant first subtracts the group's mean. The other estimators need the group alone, so a part of a batch
    gives the same values. `num_tokens` are the response lengths, for whitening and own estimators.
    """
    if is_own(estimator):
        groups = zip(rewards, num_tokens, strict=True)
        return [own_advantages(estimator, group, lengths) for group, lengths in groups]
    scores = [_GROUP_ESTIMATORS[estimator](group) for group in rewards]
    if estimator not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return scores
    flat = iter(whiten([x for group in scores for x in group], [n for group in num_tokens for n in group]))
    return [[next(flat) for _ in group] for group in scores]


def gae(rewards: Rewards, values: Rewards, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) of one response: advantages and returns.

    `rewards` are those of the tokens, and `values` are the critic's before them; the value after the last
    token is 0. delta = r + gamma V' - V; A = delta + gamma lam A'; return = A + V.
    """
    advantages = [0.0] * len(values)
    advantage = next_value = 0.0
    for i in range(len(values) - 1, -1, -1):
        delta = rewards[i] + gamma * next_value - values[i]
        advantages[i] = advantage = delta + gamma * lam * advantage
        next_value = values[i]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """Reward shaping of a long response, from 0 to -factor (DAPO, arXiv 2503.14476).

    0 up to max_tokens - buffer_tokens, then linear; -factor at `max_tokens` and beyond.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(excess / buffer_tokens, 0.0), 1.0)
