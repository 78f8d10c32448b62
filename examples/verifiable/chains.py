"""Greatest common divisors by subtraction; demonstrated on short chains, trained on all.

    36,14:  ->  22,14;08,14;08,06;02,06;02,04;02,02=02

The length of an answer cannot be seen in the prompt, and the longest are an order of magnitude longer than
most: a heavy tail. The task is to continue beyond the length of the demonstrations.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from dora.data.gcd import chain

ALPHABET = "0123456789,;=:"
LARGEST, NUM_HELD_OUT = 40, 256
MAX_DEMONSTRATED_STEPS = 9  # a third of the pairs needs more
ERROR_RATE = 0.07  # fraction of wrong steps in demonstrations


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out pairs of different numbers; held-out pairs are trained in neither order."""
    pairs = [*itertools.combinations(range(1, LARGEST + 1), 2)]
    source.shuffle(pairs)
    held_out, training = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    both = [pair for a, b in training for pair in ((a, b), (b, a))]
    turned = [(a, b) if source.random() < 0.5 else (b, a) for a, b in held_out]
    return [_row(*pair) for pair in both], [_row(*pair) for pair in turned]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a:02},{b:02}:"}


def demonstration(row: dict[str, Any], source: random.Random) -> str | None:
    """An answer with errors; None for pairs with long chains."""
    a, b = _numbers(row["prompt"])
    if chain(a, b).count(";") >= MAX_DEMONSTRATED_STEPS:
        return None
    return chain_with_errors(a, b, ERROR_RATE, source)


def chain_with_errors(a: int, b: int, error_rate: float, source: random.Random) -> str:
    """A chain in which each step is wrong with probability `error_rate`; the next step continues from it.

    A wrong step still makes its number smaller, so the chain ends.
    """
    steps = []
    while a != b:
        large, small = max(a, b), min(a, b)
        difference = large - small
        if large > 2 and source.random() < error_rate:
            difference = source.choice([wrong for wrong in range(1, large) if wrong != difference])
        a, b = (difference, small) if a > b else (small, difference)
        steps.append(f"{a:02},{b:02}")
    return ";".join(steps) + f"={a:02}"


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if every step and the divisor are right."""
    return float(completion == chain(*_numbers(prompt)))


def _numbers(prompt: str) -> tuple[int, int]:
    a, b = prompt.rstrip(":").split(",")
    return int(a), int(b)
