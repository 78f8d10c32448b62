"""The built-in task: greatest common divisors by subtraction, every step written out.

    48,36:  ->  12,36;12,24;12,12=12

Two different numbers of 1..60, always written with two digits. The length of an answer cannot be seen in the
prompt: the median is 57 characters, the 99th percentile about 300. Held-out pairs never occur as prompts in
training, in either order, but answers may pass through them.
"""

from __future__ import annotations

import hashlib
import itertools
from functools import cache
from typing import Any

LARGEST = 60
NUM_HELD_OUT = 512
ALPHABET = "0123456789,;=:"


def training_rows() -> list[dict[str, Any]]:
    """Every pair that is not held out, in both orders: 2,516 rows."""
    held_out = {pair for a, b in _held_out_pairs() for pair in ((a, b), (b, a))}
    pairs = itertools.permutations(range(1, LARGEST + 1), 2)
    return [row(*pair) for pair in pairs if pair not in held_out]


def held_out_rows() -> list[dict[str, Any]]:
    """The 512 evaluation rows, each pair in one order."""
    return [row(a, b) if _digest((b, a))[0] % 2 else row(b, a) for a, b in _held_out_pairs()]


def row(a: int, b: int) -> dict[str, Any]:
    """A dataset row; reward functions get `a` and `b` as columns."""
    return {"prompt": prompt(a, b), "a": a, "b": b}


def prompt(a: int, b: int) -> str:
    """The prompt for one pair."""
    return f"{a:02},{b:02}:"


def chain(a: int, b: int) -> str:
    """The one correct answer: the pair after every subtraction, then the divisor."""
    steps = []
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        steps.append(f"{a:02},{b:02}")
    return ";".join(steps) + f"={a:02}"


@cache
def _held_out_pairs() -> tuple[tuple[int, int], ...]:
    """The unordered pairs with the smallest digests, which are the same on every machine."""
    pairs = itertools.combinations(range(1, LARGEST + 1), 2)
    return tuple(sorted(pairs, key=_digest)[:NUM_HELD_OUT])


def _digest(pair: tuple[int, int]) -> bytes:
    return hashlib.blake2b(f"{pair[0]},{pair[1]}".encode()).digest()
