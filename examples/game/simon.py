"""A text game of memory: repeat all letters so far, every time one is added; and the teacher of the model.

    kc:  kc  f:  kcf  a:  kcfa  ...

The next letter is told once the row so far has been repeated; a wrong letter ends the game.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import permutations
from string import ascii_lowercase
from typing import Any

from dora.envs.base import Environment, Step

ALPHABET = ascii_lowercase + ":"
NUM_ROUNDS = 6
NUM_HELD_OUT = 128
SLIP = 0.12  # of the teacher: wrong letters


class Simon(Environment):
    """Letters are drawn with the seed, so all siblings of a group hear the same."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """The prompt of the row has the first two letters."""
        self._so_far = row["prompt"].rstrip(":")
        others = [letter for letter in ascii_lowercase if letter not in self._so_far]
        self._to_come = random.Random(seed).sample(others, NUM_ROUNDS - 1)
        return f"{self._so_far}:"

    async def step(self, action: str) -> Step:
        """Each round is worth the same, all of them 1."""
        if action != self._so_far:
            return Step("", 0.0, True)
        if not self._to_come:
            return Step("", 1 / NUM_ROUNDS, True)
        letter = self._to_come.pop()
        self._so_far += letter
        return Step(f"{letter}:", 1 / NUM_ROUNDS, False)


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All pairs of letters, for training and held out."""
    found = [{"prompt": f"{first}{second}:"} for first, second in permutations(ascii_lowercase, 2)]
    source.shuffle(found)
    return found[NUM_HELD_OUT:], found[:NUM_HELD_OUT]


def teacher(
    row: Mapping[str, Any], said: Sequence[str], observed: Sequence[str], source: random.Random
) -> str:
    """The letters so far, as somebody repeats them who is not quite there."""
    right = "".join(observed).replace(":", "")
    return "".join(source.choice(ascii_lowercase) if source.random() < SLIP else letter for letter in right)
