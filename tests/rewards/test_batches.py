"""Reward functions written for TRL score a whole group in one call, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from dora.rewards.base import RewardInput, RewardResult, score, takes_batches

COMPLETIONS: dict[str, tuple[int, ...]] = {"four": (4, 0), "five": (5, 0), "": ()}


def group(prompt: Any = "2+2", /, **row: Any) -> list[RewardInput]:
    return [RewardInput(prompt, text, ids, row) for text, ids in COMPLETIONS.items()]


def rewards_of(function: Callable[..., Any], /, prompt: Any = "2+2", **row: Any) -> list[float | None]:
    return [result.reward for result in score(function, group(prompt, **row))]


def only(results: Iterable[RewardResult]) -> RewardResult:
    (result,) = results
    return result


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


def test_groups_that_are_scored_together_keep_their_own_prompts_and_columns() -> None:
    def reward_func(
        prompts: list[Any], completions: list[Any], answer: list[str | None], **kwargs: Any
    ) -> list[float]:
        assert prompts == ["2+2"] * 3 + [conversation] * 3
        assert answer == ["four"] * 3 + [None] * 3
        assert kwargs["level"] == [None] * 3 + [1] * 3
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [float(len(text)) for text in texts]

    conversation = [{"role": "user", "content": "3+2"}]
    inputs = group(answer="four") + group(conversation, level=1)
    assert [result.reward for result in score(reward_func, inputs)] == [4.0, 4.0, 0.0] * 2


def test_an_async_function_is_awaited() -> None:
    async def reward_func(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.5] * len(completions)

    assert rewards_of(reward_func) == [0.5] * 3


def test_an_array_is_accepted_like_a_list() -> None:
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
    result = only(score(lambda completions, **kwargs: value, group()))
    assert (result.reward, result.reason) == (None, reason)
    assert "must return" in result.detail


def test_a_value_that_is_not_a_number_fails_by_name() -> None:
    results = [*score(lambda completions, **kwargs: [1.0, None, 2.0], group())]
    assert [result.reason for result in results] == ["", "reward returned NoneType", ""]


def test_numpy_scalars_and_tensors_with_one_element_are_rewards() -> None:
    values = [np.bool_(True), torch.tensor(0.5), np.float32(2)]
    assert rewards_of(lambda completions, **kwargs: values) == [1.0, 0.5, 2.0]
    results = [*score(lambda completions, **kwargs: [1, 10**400, np.zeros(0)], group())]
    assert [result.reason for result in results] == ["", "reward returned inf", "reward returned ndarray"]


def test_a_column_may_have_any_name() -> None:
    row = {"function": "def f()", "args": 1, "self": 2}
    assert rewards_of(lambda completions, function, **kwargs: [1.0] * 3, **row) == [1.0] * 3
    assert rewards_of(lambda prompt, completion, *, function, **others: 2.0, **row) == [2.0] * 3


def test_a_function_that_raises_fails_with_its_traceback() -> None:
    def reward_func(completions: list[str], **kwargs: Any) -> list[float]:
        return [1 / len(text) for text in completions]

    result = only(score(reward_func, group()))
    assert result.reason == "reward raised ZeroDivisionError"
    assert "in reward_func" in result.detail


def test_the_parameters_of_a_function_decide_whether_it_takes_batches() -> None:
    class BatchReward:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [2.0] * len(completions)

    assert rewards_of(BatchReward()) == [2.0] * 3
    assert rewards_of(lambda prompt, completion, **row: len(completion)) == [4.0, 4.0, 0.0]
    assert takes_batches(lambda prompts, **kwargs: [])
    assert takes_batches(lambda **kwargs: [])
    assert not takes_batches(print)
    assert not takes_batches(dict)
