"""Rewards read the answer of a reasoning model, not the thoughts before it."""

from __future__ import annotations

import pytest

from dora.rewards.base import load_reward
from dora.rewards.code import extract_program
from dora.rewards.math import gsm8k
from dora.rewards.thoughts import without_thoughts

CUT = "<think>\nPerhaps \\boxed{72}. Let me check with 24 + 48 = 72"  # at max_response_length
CHANGED = "<think>\n\\boxed{71}? No.\n</think>\n\nIt is \\boxed{72}."
UNANSWERED = "<think>\n\\boxed{72}\n</think>\n\nI am not sure."


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("no thoughts", "no thoughts"),
        ("<think>\nfirst\n</think>\n\nanswer", "\n\nanswer"),
        ("thoughts that the chat template began</think>answer", "answer"),
        ("<think>first</think>a<think>second</think>answer", "answer"),
        ("<think>first</think>answer<think>cut", "answer"),
        (CUT, ""),
    ],
)
def test_the_answer_is_what_follows_the_last_thoughts(completion: str, answer: str) -> None:
    assert without_thoughts(completion) == answer


def test_exact_math_ignores_thoughts() -> None:
    assert [gsm8k("", text, answer="#### 72") for text in (CUT, CHANGED, UNANSWERED)] == [0.0, 1.0, 0.0]


def test_math_verify_ignores_thoughts() -> None:
    pytest.importorskip("math_verify")
    verify = load_reward("dora.rewards.math_verify:reward")
    assert [verify("", text, answer="72") for text in (CUT, CHANGED, UNANSWERED)] == [0.0, 1.0, 0.0]


def test_a_program_in_thoughts_is_not_run() -> None:
    draft = "<think>\n```python\ndraft\n```\n"
    assert extract_program(draft) == ""
    assert extract_program(f"{draft}</think>\n```python\nfinal\n```") == "final\n"
