"""A reward that cannot be called, or returns no reward, is refused by its signature, with an example."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora.errors import RewardError
from dora.rewards.base import load_reward, score
from dora.rewards.signature import check_signature


def by_name(prompt: str, completion: str, *, answer: str, **row: Any) -> float:
    return 0.0


def by_place(prompt: str, completion: str, answer: str) -> bool:
    return True


async def of_many(
    prompts: list[str], completions: list[str], answer: list[str], **columns: Any
) -> list[float]:
    return []


def everything(**columns: Any) -> Any:
    return []


def without_row(prompt: str, completion: str) -> float:
    return 0.0


def text_alone(text: str, **row: Any) -> float:
    return 0.0


def some_of_many(completions: list[str]) -> list[float]:
    return []


def of_nothing() -> float:
    return 0.0


def nothing(prompt: str, completion: str, **row: Any) -> None: ...


def words(prompt: str, completion: str, **row: Any) -> str:
    return ""


def a_list(prompt: str, completion: str, **row: Any) -> list[float]:
    return []


def a_number(completions: list[str], **columns: Any) -> float:
    return 0.0


class Judge:
    def __call__(self, prompt: str) -> float:
        return 0.0


@pytest.mark.parametrize("function", [by_name, by_place, of_many, everything, math.hypot, print])
@pytest.mark.parametrize("columns", [None, ("answer",)])
def test_a_function_that_can_be_called_passes(
    function: Callable[..., Any], columns: tuple[str, ...] | None
) -> None:
    if function in (math.hypot, print) and columns:
        return  # these take no columns
    check_signature(function, "reward.function", columns)


def test_columns_that_nobody_knows_yet_are_not_asked_for() -> None:
    check_signature(without_row, "reward.function", None)
    check_signature(without_row, "reward.function", ())


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (without_row, "without_row(prompt, completion) cannot be called with prompt, completion and the first row's answer: got an unexpected keyword argument 'answer'"),  # noqa: E501
        (text_alone, "too many positional arguments"),
        (of_nothing, "too many positional arguments"),
        (some_of_many, "cannot be called with prompts, completions, completion_ids"),
        (Judge(), "Judge(prompt) cannot be called"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused(function: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(RewardError) as refusal:
        check_signature(function, "reward.function = 'mine.py:reward'", ("answer",))
    told = str(refusal.value)
    assert told.startswith("reward.function = 'mine.py:reward': ")
    assert complaint in told
    assert "def reward(prompt, completion, **row):" in told


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(RewardError, match=r"missing a required (keyword-only )?argument: 'answer'"):
        check_signature(by_name, "reward.function", ("a", "b"))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (nothing, "a finite number"),
        (words, "a finite number"),
        (a_list, "a finite number"),
        (a_number, "a list with a finite number for each completion"),
    ],
)
def test_a_function_that_says_it_returns_no_reward_is_refused(
    function: Callable[..., Any], wanted: str
) -> None:
    with pytest.raises(RewardError, match=f"says that it returns .*, and must return {wanted}; write it as"):
        check_signature(function, "reward.function", ("answer",))


def test_the_check_is_made_when_a_function_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(prompt):\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"reward\(prompt\) cannot be called with prompt, completion"):
        load_reward(f"{file}:reward")


def test_what_a_function_returns_is_told_with_its_name() -> None:
    def forgetful(prompt: str, completion: str, **row: Any) -> Any:
        return None

    assert score(forgetful, "p", "c", {}).detail == (
        "the reward function forgetful returned None (NoneType); it must return a finite float; "
        "is a `return` missing?"
    )
