"""The gap between the log-probs that engines reported and what the trainer finds under the same weights.

Tokens of the newest version are compared as they are trained. Of older ones a few are computed once
more, with the weights that drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_SHARE = 1 / 16  # of a step's tokens are computed once more: of its time a third of that, being forward only
_STRIDE = 0.618034  # of a batch, from step to step: the golden ratio comes by everywhere


@dataclass
class Mismatch:
    """Sums over the tokens compared in a step."""

    num_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    divergence: float = 0.0

    def add(self, logprobs: Tensor, reported: Tensor) -> None:
        """Compare some tokens: the trainer's log-probs and the engine's, each [N]."""
        if len(logprobs):
            ratio = (logprobs - reported).double()
            gap = ratio.abs()
            self.num_tokens += len(gap)
            self.total += float(gap.sum())
            self.largest = max(self.largest, float(gap.max()))
            self.divergence += float((ratio.expm1() - ratio).sum())

    def join(self, other: Mismatch) -> None:
        """Take in what was compared elsewhere."""
        self.num_tokens += other.num_tokens
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self.divergence += other.divergence

    def metrics(self) -> dict[str, float]:
        """Mean, maximum and KL(engine || trainer) by the k3 estimate, per token; nothing without any."""
        if not self.num_tokens:
            return {}
        return {
            "mismatch/num_tokens": float(self.num_tokens),
            "mismatch/logprob_abs_diff_mean": self.total / self.num_tokens,
            "mismatch/logprob_abs_diff_max": self.largest,
            "mismatch/kl": self.divergence / self.num_tokens,
        }


def spot_check(lengths: Sequence[int], num_trained: int, step: int) -> list[int]:
    """Which samples of these lengths (tokens) to compute again: others in every step, at least one.

    They have a small share of the `num_trained` tokens that the step computes anyway.
    """
    num, room = len(lengths), num_trained * _SHARE
    first = int(num * (step * _STRIDE % 1))
    picked: list[int] = []
    for i in ((first + at) % num for at in range(num)):
        if not picked or lengths[i] <= room:
            picked.append(i)
            room -= lengths[i]
    return picked
