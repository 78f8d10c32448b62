"""pass@k and how sure it is.

An answer passes with a reward of at least 1.
"""

from __future__ import annotations

import math

PASSING_REWARD = 1.0
Z_95 = 1.959964  # standard deviations: a normal value is within them in 95 of 100 cases


def pass_at_k(num_answers: int, num_passing: int, k: int) -> float:
    """Probability that one of k answers, drawn from these without replacement, passes.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_answers - num_passing, k) / math.comb(num_answers, k)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of the mean of `count` independent values between 0 and 1.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927): unlike a bootstrap it has a width where all
    values are 0 or all are 1. It is exact in form for values that are 0 or 1, and too wide rather than
    too narrow for others, whose variance is below mean * (1 - mean).
    """
    spread = Z_95**2 / count
    middle = (mean + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(mean * (1 - mean) / count + spread / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def ks_of(num_answers: int) -> list[int]:
    """The k that pass@k is told for: powers of two, and all answers."""
    powers = [1 << power for power in range(num_answers.bit_length()) if 1 << power < num_answers]
    return [*powers, num_answers]
