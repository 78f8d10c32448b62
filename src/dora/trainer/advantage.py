"""Advantages from the rewards of one group.

GRPO, arXiv 2402.03300, section 4.1.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """(reward - mean) / (std + eps) for every sibling of one group.

    `std` is the sample deviation (n - 1), as in verl. A group whose rewards are all equal, a
    group of one included, compares nothing: its advantages are exactly 0.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]
