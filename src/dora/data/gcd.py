"""The built-in task: greatest common divisors by subtraction, every step written out.

    48,36:  ->  12,36;12,24;12,12=12

Two different numbers of 1..60, always written with two digits. How long an answer gets cannot be
seen in the prompt: the median is 57 characters, the 99th percentile about 300. Held-out pairs
never occur as prompts in training, in either order, but answers may pass through them.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import cache
from typing import Any

LARGEST = 60
NUM_HELD_OUT = 512
ALPHABET = "0123456789,;=:"


def prompt(a: int, b: int) -> str:
    """The question for one pair."""
    return f"{a:02},{b:02}:"


def chain(a: int, b: int) -> str:
    """The one right answer: the pair after every subtraction, then the divisor."""
    return slipping_chain(a, b, 0.0, random.Random(0))


def slipping_chain(a: int, b: int, slip: float, source: random.Random) -> str:
    """The answer of a teacher who gets each step wrong with probability `slip` and goes on from there.

    A wrong step still makes its number smaller, so the chain ends.
    """
    steps = []
    while a != b:
        large, small = max(a, b), min(a, b)
        rest = large - small
        if large > 2 and source.random() < slip:
            rest = source.choice([wrong for wrong in range(1, large) if wrong != rest])
        a, b = (rest, small) if a > b else (small, rest)
        steps.append(f"{a:02},{b:02}")
    return ";".join(steps) + f"={a:02}"


def row(a: int, b: int) -> dict[str, Any]:
    """A dataset row; `a` and `b` reach the reward function too."""
    return {"prompt": prompt(a, b), "a": a, "b": b}


@cache
def _held_out_pairs() -> tuple[tuple[int, int], ...]:
    """Unordered pairs kept for evaluation: those with the smallest digests, the same everywhere."""
    pairs = itertools.combinations(range(1, LARGEST + 1), 2)
    return tuple(sorted(pairs, key=_digest)[:NUM_HELD_OUT])


def _digest(pair: tuple[int, int]) -> bytes:
    return hashlib.blake2b(f"{pair[0]},{pair[1]}".encode()).digest()


def held_out_rows() -> list[dict[str, Any]]:
    """The 512 evaluation rows, each pair in one order."""
    return [row(a, b) if _digest((b, a))[0] % 2 else row(b, a) for a, b in _held_out_pairs()]


def training_rows() -> list[dict[str, Any]]:
    """Every other pair, in both orders: 2,516 rows."""
    held_out = {pair for a, b in _held_out_pairs() for pair in ((a, b), (b, a))}
    pairs = itertools.permutations(range(1, LARGEST + 1), 2)
    return [row(*pair) for pair in pairs if pair not in held_out]
