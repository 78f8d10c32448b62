"""Formatting of counts and step numbers in messages."""

from __future__ import annotations

import pytest

from dora.text import plural, step_number


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")]
)
def test_plural_adds_an_s_except_for_one(number: int, text: str) -> None:
    assert plural(number, "step") == text


def test_steps_are_numbered_from_1_in_messages() -> None:
    first = 0  # as in the journal
    assert step_number(first) == 1
