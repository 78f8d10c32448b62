"""From the rewards of answers to their advantages, as a run's configuration has it.

Plain floats. Most estimators need a group and are asked when it is judged; the others need the
whole batch and are asked by the trainer, from the same stored rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dora.trainer.advantage import batch_advantages, best_and_worst, overlong_penalty
from dora.trainer.recipe import NEEDS, AdvEstimator

MAX_REWARD = 1e6  # in size; beyond it sums and squares of rewards, and of gradients, say nothing


def why_unscorable(rewards: Sequence[float]) -> str:
    """Why nothing can be computed with these rewards; empty if it can."""
    large = [reward for reward in rewards if not abs(reward) <= MAX_REWARD]  # nan is not, either
    return f"rewards too large: {large[0]:g}, and the most is {MAX_REWARD:g}" if large else ""


@dataclass(frozen=True)
class Scoring:
    """How rewards become advantages; lengths in tokens.

    Answers that reach into the last `overlong_buffer_tokens` of `max_tokens` lose reward before that,
    up to `overlong_penalty` (DAPO's soft overlong punishment); 0 leaves rewards alone. With
    `is_paired`, a group's best answer gets 1 and its worst -1, whatever the estimator.
    """

    adv_estimator: AdvEstimator = "grpo"
    max_tokens: int = 0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    is_paired: bool = False

    @property
    def needs_batch(self) -> bool:
        """Whether an advantage depends on all rewards of a batch."""
        return NEEDS[self.adv_estimator] == "batch" and not self.is_paired

    def of_group(self, rewards: Sequence[float], num_tokens: Sequence[int]) -> Sequence[float | None]:
        """Advantages of one group's siblings; None each where they need the whole batch."""
        if self.needs_batch:
            return [None] * len(rewards)
        return self.of_batch([rewards], [num_tokens])[0]

    def of_batch(
        self, rewards: Sequence[Sequence[float]], num_tokens: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Advantages of a batch, group by group; `num_tokens` are the answers' lengths."""
        shaped = self.shaped(rewards, num_tokens)
        if self.is_paired:
            return [best_and_worst(group) for group in shaped]
        return batch_advantages(self.adv_estimator, shaped, num_tokens)

    def shaped(
        self, rewards: Sequence[Sequence[float]], num_tokens: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The rewards of a batch without what long answers lose; what a critic learns to foretell."""
        return [list(map(self._shaped, *group)) for group in zip(rewards, num_tokens, strict=True)]

    def _shaped(self, reward: float, num_tokens: int) -> float:
        if not self.overlong_buffer_tokens:
            return reward
        bounds = self.max_tokens, self.overlong_buffer_tokens, self.overlong_penalty
        return reward + overlong_penalty(num_tokens, *bounds)
