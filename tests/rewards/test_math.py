"""The strict verifier compares final answers as exact numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dora.rewards.base import load_reward
from dora.rewards.math import final_answer, gsm8k, parse_number

ANSWER = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.mark.parametrize(
    "completion",
    [
        "48 + 24 = 72\n#### 72",
        "#### 72.",
        "#### $72.00",
        "####\n72\nThat is all.",
        r"The answer is \boxed{72}.",
        r"\boxed{\frac{144}{2}}",
        r"#### 71, no: \boxed{72}",
        r"\boxed{71}, no: #### 72",
        "\\boxed{72}\n#### Verification\n48 + 24 = 72",
        "\\boxed{72}\n#### **Step 3: check**\n48 + 24 = 72",
        "\\boxed{72}\n#### 2. Check\n48 + 24 = 72",
        "\\boxed{71}, no:\n#### 72\n#### Check\n48 + 24 = 72",
        r"\boxed{72\text{ clips}}",
        r"\boxed{72\,\text{clips}}",
        "#### **72**",
        "**#### 72.**",
        "#### **72**.",
    ],
)
def test_the_right_final_answer_is_rewarded(completion: str) -> None:
    assert gsm8k("", completion, answer=ANSWER) == 1.0


def test_words_after_the_last_mark_of_a_text_are_its_answer() -> None:
    assert final_answer("It is not \\boxed{Bob}.\n#### Eve\n") == "Eve"


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "72",
        "#### 71",
        "#### 720",
        "#### 72 or 73",
        "#### 7 2",
        r"\boxed{72",
        r"\boxed{}",
        "#### 1/0",
        "####",
        "\\boxed{71}\n#### Answer: 72",
        "#### Step 72",
    ],
)
def test_any_other_final_answer_is_not_rewarded(completion: str) -> None:
    assert gsm8k("", completion, answer=ANSWER) == 0.0


def test_the_last_final_answer_counts() -> None:
    assert gsm8k("", "#### 72\n#### 71", answer=ANSWER) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)),
        ("-3/4", Fraction(-3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{-3}{4}", Fraction(3, 4)),
        (r"+\frac{-3}{4}", Fraction(-3, 4)),
        ("\N{MINUS SIGN}3.5", Fraction(-7, 2)),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        (r"25\%", Fraction(25)),
        ("$1,000,000", Fraction(1000000)),
        ("-$5", Fraction(-5)),
        (r"-\$1,000.50", Fraction(-2001, 2)),
        (r"\$1{,}234", Fraction(1234)),
        (r"10,\!000", Fraction(10000)),
        ("+1234", Fraction(1234)),
        ("+1/2", Fraction(1, 2)),
        ("+", None),
        ("+-1", None),
        ("12,34", None),
        ("1e3", None),
        ("-", None),
        ("", None),
        ("two", None),
    ],
)
def test_numbers_are_read_exactly_or_not_at_all(text: str, value: Fraction | None) -> None:
    assert parse_number(text) == value


def test_braces_within_a_box_belong_to_the_answer() -> None:
    assert final_answer(r"so \boxed{\frac{1}{2}} it is") == r"\frac{1}{2}"


def test_an_answer_column_may_hold_the_number_alone() -> None:
    assert gsm8k("", "#### 0.5", answer="1/2") == 1.0


def test_an_answer_column_may_hold_numbers() -> None:
    assert gsm8k("", "#### 72", answer=72) == 1.0
    assert gsm8k("", "#### 72", answer=71) == 0.0


def test_an_answer_column_without_a_number_is_a_mistake_of_the_data() -> None:
    with pytest.raises(ValueError, match="the column answer = 'many' holds no number"):
        gsm8k("", "#### 72", answer="many")


def test_it_is_chosen_by_its_name() -> None:
    assert load_reward("dora.rewards.math:gsm8k") is gsm8k
