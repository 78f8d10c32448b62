"""Sort letters. All answers have about the same length: no tail.

qfxabmztkwpsdjyl:  ->  abdfjklmpqstwxyz
"""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS = string.ascii_lowercase
ALPHABET = LETTERS + ":"
NUM_ROWS, NUM_HELD_OUT = 2000, 256
MIN_LETTERS, MAX_LETTERS = 14, 18
ERROR_RATE = 0.05  # probability that a demonstration leaves a letter out


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out sequences of different letters."""
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_ROWS + NUM_HELD_OUT:
        prompts["".join(source.sample(LETTERS, source.randint(MIN_LETTERS, MAX_LETTERS))) + ":"] = None
    found = [{"prompt": prompt} for prompt in prompts]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def demonstration(row: dict[str, Any], source: random.Random) -> str | None:
    """An answer in which letters may be missing."""
    return "".join(letter for letter in _sorted(row["prompt"]) if source.random() >= ERROR_RATE)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if all letters are there, in order."""
    return float(completion == _sorted(prompt))


def _sorted(prompt: str) -> str:
    return "".join(sorted(prompt.rstrip(":")))
