"""Reward functions written for TRL judge a whole group in one call, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from dora.rewards.base import Answer, Outcome, judge
from dora.rewards.signature import takes_batches

ANSWERS: dict[str, tuple[int, ...]] = {"four": (4, 0), "five": (5, 0), "": ()}


def group(prompt: Any = "2+2", /, **row: Any) -> list[Answer]:
    return [Answer(prompt, text, ids, row) for text, ids in ANSWERS.items()]


def rewards_of(function: Callable[..., Any], /, prompt: Any = "2+2", **row: Any) -> list[float | None]:
    return [outcome.reward for outcome in judge(function, group(prompt, **row))]


def only(outcomes: Iterable[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


def test_every_argument_is_a_list_with_a_value_per_completion() -> None:
    def reward_func(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **kwargs: Any,
    ) -> list[float]:
        assert prompts == ["2+2"] * 3
        assert completion_ids == [[4, 0], [5, 0], []]
        assert kwargs == {"level": [1, 1, 1]}
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert rewards_of(reward_func, answer="four", level=1) == [1.0, 0.0, 0.0]


def test_completions_are_conversations_where_the_prompt_is_one() -> None:
    def reward_func(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        assert all(message["role"] == "assistant" for (message,) in completions)
        return [float(len(completion[0]["content"])) for completion in completions]

    assert rewards_of(reward_func, [{"role": "user", "content": "2+2"}]) == [4.0, 4.0, 0.0]


def test_groups_that_are_judged_together_keep_their_own_prompts_and_columns() -> None:
    def reward_func(
        prompts: list[Any], completions: list[Any], answer: list[str | None], **kwargs: Any
    ) -> list[float]:
        assert prompts == ["2+2"] * 3 + [conversation] * 3
        assert answer == ["four"] * 3 + [None] * 3
        assert kwargs["level"] == [None] * 3 + [1] * 3
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [float(len(text)) for text in texts]

    conversation = [{"role": "user", "content": "3+2"}]
    answers = group(answer="four") + group(conversation, level=1)
    assert [outcome.reward for outcome in judge(reward_func, answers)] == [4.0, 4.0, 0.0] * 2


def test_an_async_function_is_awaited() -> None:
    async def reward_func(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.5] * len(completions)

    assert rewards_of(reward_func) == [0.5] * 3


def test_an_array_is_as_good_as_a_list() -> None:
    assert rewards_of(lambda completions, **kwargs: np.arange(3)) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1.0, 2.0], "reward returned 2 values for 3 completions"),
        (1.0, "reward returned float"),
        ("1.0", "reward returned str"),
        (None, "reward returned NoneType"),
    ],
)
def test_anything_but_a_value_per_completion_fails_the_group_by_name(value: object, reason: str) -> None:
    outcome = only(judge(lambda completions, **kwargs: value, group()))
    assert (outcome.reward, outcome.reason) == (None, reason)
    assert "must return" in outcome.detail


def test_a_value_that_is_no_number_fails_by_name() -> None:
    outcomes = [*judge(lambda completions, **kwargs: [1.0, None, 2.0], group())]
    assert [outcome.reason for outcome in outcomes] == ["", "reward returned NoneType", ""]


def test_whatever_holds_one_number_is_a_reward() -> None:
    values = [np.bool_(True), torch.tensor(0.5), np.float32(2)]
    assert rewards_of(lambda completions, **kwargs: values) == [1.0, 0.5, 2.0]
    outcomes = [*judge(lambda completions, **kwargs: [1, 10**400, np.zeros(0)], group())]
    assert [outcome.reason for outcome in outcomes] == ["", "reward returned inf", "reward returned ndarray"]


def test_a_column_may_have_any_name() -> None:
    row = {"function": "def f()", "args": 1, "self": 2}
    assert rewards_of(lambda completions, function, **kwargs: [1.0] * 3, **row) == [1.0] * 3
    assert rewards_of(lambda prompt, completion, *, function, **others: 2.0, **row) == [2.0] * 3


def test_a_function_that_raises_fails_with_its_traceback() -> None:
    def reward_func(completions: list[str], **kwargs: Any) -> list[float]:
        return [1 / len(text) for text in completions]

    outcome = only(judge(reward_func, group()))
    assert outcome.reason == "reward raised ZeroDivisionError"
    assert "in reward_func" in outcome.detail


def test_the_kind_of_a_function_is_seen_in_its_parameters() -> None:
    class Judge:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [2.0] * len(completions)

    assert rewards_of(Judge()) == [2.0] * 3
    assert rewards_of(lambda prompt, completion, **row: len(completion)) == [4.0, 4.0, 0.0]
    assert takes_batches(lambda prompts, **kwargs: [])
    assert takes_batches(lambda **kwargs: [])
    assert not takes_batches(print)
    assert not takes_batches(dict)
