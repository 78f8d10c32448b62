"""Reward of the built-in task (`data/gcd.py`): every step and the divisor must be right.

A reward for the divisor alone would teach the model to answer "01": most pairs are coprime.
"""

from __future__ import annotations


def reward(prompt: str, completion: str, **row: object) -> float:
    """1.0 if every step and the divisor are right ("48,36:" -> "12,36;12,24;12,12=12"), else 0.0."""
    a, b = (int(number) for number in prompt.rstrip(":").split(","))
    steps = []
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        steps.append(f"{a:02},{b:02}")
    return float(completion == ";".join(steps) + f"={a:02}")
