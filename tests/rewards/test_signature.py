"""A reward whose signature cannot be called, or returns no reward, is refused with an example."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora.errors import RewardError
from dora.rewards.base import RewardInput, check_signature, load_reward, score, score_one


def by_name(prompt: str, completion: str, *, answer: str, **row: Any) -> float:
    return 0.0


def by_position(prompt: str, completion: str, answer: str) -> bool:
    return True


async def batch(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return []


def only_kwargs(**columns: Any) -> Any:
    return []


def without_row(prompt: str, completion: str) -> float:
    return 0.0


def one_parameter(text: str, **row: Any) -> float:
    return 0.0


def some_batch(completions: list[str]) -> list[float]:
    return []


def no_parameters() -> float:
    return 0.0


def returns_none(prompt: str, completion: str, **row: Any) -> None: ...


def returns_str(prompt: str, completion: str, **row: Any) -> str:
    return ""


def returns_list(prompt: str, completion: str, **row: Any) -> list[float]:
    return []


def batch_returns_number(completions: list[str], **columns: Any) -> float:
    return 0.0


class CallableReward:
    def __call__(self, prompt: str) -> float:
        return 0.0


@pytest.mark.parametrize("function", [by_name, by_position, batch, only_kwargs, math.hypot, print])
@pytest.mark.parametrize("columns", [None, ("answer",)])
def test_a_function_that_can_be_called_passes(
    function: Callable[..., Any], columns: tuple[str, ...] | None
) -> None:
    if function in (math.hypot, print) and columns:
        return  # these take no columns
    check_signature(function, "reward.function", columns)


def test_a_function_whose_first_arguments_are_in_another_order_is_refused() -> None:
    def swapped(completion: str, prompt: str, **row: Any) -> float:
        return 0.0

    def without_prompt(completion: str, solution: str) -> float:
        return 0.0

    def own_names(question: str, response: str) -> float:
        return 0.0

    for function in (swapped, without_prompt):
        with pytest.raises(RewardError, match="gets the prompt as its first argument"):
            check_signature(function, "reward.function", ())
    check_signature(own_names, "reward.function", ())


def test_unknown_columns_are_not_required() -> None:
    check_signature(without_row, "reward.function", None)
    check_signature(without_row, "reward.function", ())


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (without_row, "without_row(prompt, completion) cannot be called with prompt, completion and the columns answer: got an unexpected keyword argument 'answer'"),  # noqa: E501
        (one_parameter, "too many positional arguments"),
        (no_parameters, "too many positional arguments"),
        (some_batch, "cannot be called with prompts, completions, completion_ids"),
        (CallableReward(), "CallableReward(prompt) cannot be called"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused(function: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(RewardError) as refusal:
        check_signature(function, "reward.function = 'mine.py:reward'", ("answer",))
    message = str(refusal.value)
    assert message.startswith("reward.function = 'mine.py:reward': ")
    assert complaint in message
    assert "def reward(prompt, completion, **row):" in message


@pytest.mark.parametrize("columns", [None, (), ("answer",)])
def test_a_finish_reason_is_no_column(columns: tuple[str, ...] | None) -> None:
    def one(prompt: str, completion: str, finish_reason: str, **row: Any) -> float:
        return float(finish_reason == "length")

    def many(completions: list[str], *, finish_reason: list[str], **columns: Any) -> list[float]:
        return [float(reason == "length") for reason in finish_reason]

    def without(prompt: str, completion: str, **row: Any) -> float:
        return float("finish_reason" in row)

    inputs = [RewardInput("p", "c", (), {"answer": 1}, reason) for reason in ("stop", "length", None)]
    for function, expected in ((one, [0, 1, 0]), (many, [0, 1, 0]), (without, [0, 0, 0])):
        check_signature(function, "reward.function", columns, {"finish_reason": "a dataset"})
        assert [result.reward for result in score(function, inputs)] == expected


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(RewardError, match=r"missing a required (keyword-only )?argument: 'answer'"):
        check_signature(by_name, "reward.function", ("a", "b"))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (returns_none, "a finite number"),
        (returns_str, "a finite number"),
        (returns_list, "a finite number"),
        (batch_returns_number, "a list with a finite number for each completion"),
    ],
)
def test_a_function_annotated_to_return_no_reward_is_refused(
    function: Callable[..., Any], wanted: str
) -> None:
    with pytest.raises(RewardError, match=f"annotated to return .*, and must return {wanted}; write it as"):
        check_signature(function, "reward.function", ("answer",))


def test_the_check_is_made_when_a_function_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(prompt):\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"reward\(prompt\) cannot be called with prompt, completion"):
        load_reward(f"{file}:reward")


def test_a_wrong_return_value_is_reported_with_the_name_of_the_function() -> None:
    def without_return(prompt: str, completion: str, **row: Any) -> Any:
        return None

    assert score_one(without_return, "p", "c", {}).detail == (
        "the reward function without_return returned None (NoneType); it must return a finite float; "
        "is a `return` missing?"
    )
