"""Formatting of numbers in messages."""

from __future__ import annotations


def step_number(step: int) -> int:
    """The step's number in messages, counted from 1; the journal counts training steps from 0."""
    return step + 1


def plural(number: int, noun: str) -> str:
    """A count with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """In GB, or in MB with three digits."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 999.5e6 else f"{num_bytes / 1e6:.3g} MB"
