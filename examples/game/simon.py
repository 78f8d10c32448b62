"""A memory game, repeat all letters so far; and the demonstrations for its starting model.

    kc:  kc  f:  kcf  a:  kcfa  ...

The next letter follows a correct repetition; a wrong letter ends the game.
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
ERROR_RATE = 0.12  # fraction of wrong letters in demonstrations


class Simon(Environment):
    """Letters are drawn with the seed, so all siblings of a group get the same."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """The prompt of the row has the first two letters."""
        self._letters = row["prompt"].rstrip(":")
        others = [letter for letter in ascii_lowercase if letter not in self._letters]
        self._next_letters = random.Random(seed).sample(others, NUM_ROUNDS - 1)
        return f"{self._letters}:"

    async def step(self, action: str) -> Step:
        """Each round has the same reward; all rounds together have 1."""
        if action != self._letters:
            return Step("", 0.0, True)
        if not self._next_letters:
            return Step("", 1 / NUM_ROUNDS, True)
        letter = self._next_letters.pop()
        self._letters += letter
        return Step(f"{letter}:", 1 / NUM_ROUNDS, False)


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out pairs of letters."""
    found = [{"prompt": f"{first}{second}:"} for first, second in permutations(ascii_lowercase, 2)]
    source.shuffle(found)
    return found[NUM_HELD_OUT:], found[:NUM_HELD_OUT]


def demonstration(row: Mapping[str, Any], observed: Sequence[str], source: random.Random) -> str:
    """The letters so far, some of them wrong."""
    correct = "".join(observed).replace(":", "")
    return "".join(
        source.choice(ascii_lowercase) if source.random() < ERROR_RATE else letter for letter in correct
    )
