"""Counts down from each number of a list, one after the other.

    k3d1p2:  ->  k3k2k1d1p2p1

The prompt determines the length of the answer: usually short, sometimes ten times as long.
"""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdefghijkmnp"
ALPHABET = LETTERS + "123456789:"
NUM_ROWS, NUM_HELD_OUT = 2000, 256
MAX_RUNS = 8
LIST_ENDS, NUMBER_ENDS = 0.4, 0.3  # probabilities that a list has no more runs, that a number is no larger
ERROR_RATE = 0.06  # probability of an error at each number of a demonstration


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out lists of different letters, each with a number from 1 to 9."""
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_ROWS + NUM_HELD_OUT:
        prompts[_list(source)] = None
    found = [{"prompt": prompt} for prompt in prompts]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def _list(source: random.Random) -> str:
    num_runs = min(MAX_RUNS, _geometric(source, LIST_ENDS))
    letters = source.sample(LETTERS, num_runs)
    return "".join(f"{letter}{min(9, _geometric(source, NUMBER_ENDS))}" for letter in letters) + ":"


def _geometric(source: random.Random, probability: float) -> int:
    number = 1
    while source.random() > probability:
        number += 1
    return number


def answer(prompt: str) -> str:
    """The one correct answer."""
    pairs = zip(prompt[:-1:2], prompt[1::2], strict=True)
    return "".join(f"{letter}{number}" for letter, start in pairs for number in range(int(start), 0, -1))


def demonstration(row: dict[str, Any], source: random.Random) -> str | None:
    """An answer in which a number may be missing or repeated."""
    correct = answer(row["prompt"])
    pairs = [correct[i : i + 2] for i in range(0, len(correct), 2)]
    return "".join(pair * source.choice((0, 2)) if source.random() < ERROR_RATE else pair for pair in pairs)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if no number is missing or repeated."""
    return float(completion == answer(prompt))
