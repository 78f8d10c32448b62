"""Counts down from each number of a list, one after the other.

    k3d1p2:  ->  k3k2k1d1p2p1

The prompt says how long the answer will be: mostly short, at times ten times as long.
"""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdefghijkmnp"
ALPHABET = LETTERS + "123456789:"
NUM_ROWS, NUM_HELD_OUT = 2000, 256
MOST_RUNS = 8
ENDS, STEPS_DOWN = 0.4, 0.3  # chance that a list has no more runs; that a number is no larger
SLIP = 0.06  # chance that the teacher loses count, at each number


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lists of different letters, each with a number from 1 to 9."""
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_ROWS + NUM_HELD_OUT:
        prompts[_list(source)] = None
    found = [{"prompt": prompt} for prompt in prompts]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def _list(source: random.Random) -> str:
    num_runs = min(MOST_RUNS, _geometric(source, ENDS))
    letters = source.sample(LETTERS, num_runs)
    return "".join(f"{letter}{min(9, _geometric(source, STEPS_DOWN))}" for letter in letters) + ":"


def _geometric(source: random.Random, share: float) -> int:
    number = 1
    while source.random() > share:
        number += 1
    return number


def answer(prompt: str) -> str:
    """The one right answer."""
    pairs = zip(prompt[:-1:2], prompt[1::2], strict=True)
    return "".join(f"{letter}{number}" for letter, most in pairs for number in range(int(most), 0, -1))


def lesson(row: dict[str, Any], source: random.Random) -> str | None:
    """What the teacher writes: at times a number is left out or said twice."""
    right = answer(row["prompt"])
    pairs = [right[i : i + 2] for i in range(0, len(right), 2)]
    said = [pair * source.choice((0, 2)) if source.random() < SLIP else pair for pair in pairs]
    return "".join(said)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if nothing is left out and nothing said twice."""
    return float(completion == answer(prompt))
