"""A second reward model, small enough to be read at a glance: it has learnt what texts look like.

A real one would load a network in `__init__` and run it in `__call__`; nothing else would change.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path


class Bigrams:
    """How likely each character of an answer is after the one before it, in the texts of a file."""

    def __init__(self, path: str) -> None:
        """Made once, in a process of its own, with the options of its table [[task]]."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._pairs = Counter(pair for line in lines for pair in pairwise(line))
        self._firsts = Counter(first for line in lines for first in line[:-1])

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        """The geometric mean of these probabilities, 0 to 1, for each answer of a micro-batch."""
        return [self._likelihood(text) for text in completions]

    def _likelihood(self, text: str) -> float:
        pairs = [*pairwise(text)]
        if not pairs:
            return 0.0
        shares = ((self._pairs[pair] + 0.01) / (self._firsts[pair[0]] + 1.0) for pair in pairs)
        return math.exp(sum(map(math.log, shares)) / len(pairs))
