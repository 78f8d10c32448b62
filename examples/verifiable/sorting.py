"""Puts letters into their order. All answers are about equally long: no tail.

qfxabmztkwpsdjyl:  ->  abdfjklmpqstwxyz
"""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS = string.ascii_lowercase
ALPHABET = LETTERS + ":"
NUM_ROWS, NUM_HELD_OUT = 2000, 256
FEWEST, MOST = 14, 18
SLIP = 0.05  # chance that the teacher leaves a letter out


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Different letters in any order."""
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_ROWS + NUM_HELD_OUT:
        prompts["".join(source.sample(LETTERS, source.randint(FEWEST, MOST))) + ":"] = None
    found = [{"prompt": prompt} for prompt in prompts]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def lesson(row: dict[str, Any], source: random.Random) -> str | None:
    """What the teacher writes."""
    return "".join(letter for letter in _sorted(row["prompt"]) if source.random() >= SLIP)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if all letters are there, in order."""
    return float(completion == _sorted(prompt))


def _sorted(prompt: str) -> str:
    return "".join(sorted(prompt.rstrip(":")))
