"""How the record's numbers are put into words.

The record counts training steps from 0: step t turns version t into t + 1. People are told of the
n-th step, n = t + 1, after which n steps are trained and the newest version is n.
"""

from __future__ import annotations


def nth(step: int) -> int:
    """The number by which people are told of the record's training step `step`."""
    return step + 1


def counted(number: int, noun: str) -> str:
    """A count with its noun, which takes an s unless there is one of it: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
