"""Greatest common divisors by subtraction; taught on short chains, trained on all.

    36,14:  ->  22,14;08,14;08,06;02,06;02,04;02,02=02

How long an answer gets cannot be seen in the prompt, and the longest are an order of magnitude longer than
most: a heavy tail. What is to be learnt is to go on where the lessons ended.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from dora.data.gcd import chain, slipping_chain

ALPHABET = "0123456789,;=:"
LARGEST, NUM_HELD_OUT = 40, 256
LONGEST_TAUGHT = 9  # steps; a third of the pairs needs more
SLIP = 0.07  # share of steps that the teacher gets wrong


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs of different numbers: held-out pairs occur in neither order among the others."""
    pairs = [*itertools.combinations(range(1, LARGEST + 1), 2)]
    source.shuffle(pairs)
    held_out, training = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    both = [pair for a, b in training for pair in ((a, b), (b, a))]
    turned = [(a, b) if source.random() < 0.5 else (b, a) for a, b in held_out]
    return [_row(*pair) for pair in both], [_row(*pair) for pair in turned]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a:02},{b:02}:"}


def lesson(row: dict[str, Any], source: random.Random) -> str | None:
    """What the teacher writes; nothing about pairs that take long."""
    a, b = _numbers(row["prompt"])
    if chain(a, b).count(";") >= LONGEST_TAUGHT:
        return None
    return slipping_chain(a, b, SLIP, source)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if every step and the divisor are right."""
    return float(completion == chain(*_numbers(prompt)))


def _numbers(prompt: str) -> tuple[int, int]:
    a, b = prompt.rstrip(":").split(",")
    return int(a), int(b)
