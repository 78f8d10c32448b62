"""A second reward model in a few lines: a bigram model of the characters in a corpus.

A real one would load a network in `__init__` and run it in `__call__`; nothing else would change.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path


class Bigrams:
    """Probability of each character of a completion after the one before it, in the texts of a file."""

    def __init__(self, path: str) -> None:
        """Made once per reward worker, with the options of its table [[reward_task]]."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._pairs = Counter(pair for line in lines for pair in pairwise(line))
        self._firsts = Counter(first for line in lines for first in line[:-1])

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        """The geometric mean of these probabilities, 0 to 1, for each completion of a micro-batch."""
        return [self._likelihood(text) for text in completions]

    def _likelihood(self, text: str) -> float:
        pairs = [*pairwise(text)]
        if not pairs:
            return 0.0
        probabilities = ((self._pairs[pair] + 0.01) / (self._firsts[pair[0]] + 1.0) for pair in pairs)
        return math.exp(sum(map(math.log, probabilities)) / len(pairs))
