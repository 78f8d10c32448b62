"""Counts have their nouns in the right number, and people count steps from 1."""

from __future__ import annotations

import pytest

from dora.core.wording import counted, nth


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")]
)
def test_a_noun_takes_an_s_unless_there_is_one_of_it(number: int, words: str) -> None:
    assert counted(number, "step") == words


def test_after_the_nth_step_n_steps_are_trained() -> None:
    first = 0  # as the record has it
    assert nth(first) == 1
