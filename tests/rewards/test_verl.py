"""A reward function of verl, `compute_score`, is called as verl calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora.errors import RewardError
from dora.rewards.base import RewardInput, check_signature, load_reward, score

# A row as verl's data preprocessing writes it.
ROW = {
    "data_source": "openai/gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert [data_source, ground_truth, extra_info["split"]] == ["openai/gsm8k", "72", "train"]
    return solution_str == "72"

def only_answers(solution_str, ground_truth, method="strict"):
    return {"score": float(solution_str == ground_truth), "acc": True}

def unfinished(solution_str, ground_truth, finish_reason, **kwargs):
    assert finish_reason is None and sorted(kwargs) == ["data_source", "extra_info"]
    return float(solution_str == ground_truth)

async def any_arguments(solution_str, ground_truth, **kwargs):
    return float(sorted(kwargs) == ["data_source", "extra_info"] and solution_str == ground_truth)

def without_score(solution_str, ground_truth):
    return {"acc": 1.0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "verl_reward.py"
    path.write_text(COMPUTE_SCORE)
    return path


def rewards(file: Path, name: str, row: dict[str, Any]) -> list[Any]:
    function = load_reward(f"{file}:{name}", columns=tuple(row))
    inputs = [RewardInput([{"role": "user", "content": "48 + 24?"}], text, (), row) for text in ("72", "7")]
    return [
        result.reward if result.reward is not None else result.detail for result in score(function, inputs)
    ]


@pytest.mark.parametrize("name", ["compute_score", "only_answers", "unfinished", "any_arguments"])
def test_it_gets_the_arguments_of_verl(file: Path, name: str) -> None:
    assert rewards(file, name, ROW) == [1.0, 0.0]


def test_the_ground_truth_may_be_a_column(file: Path) -> None:
    for row in ({}, {"reward_model": None}, {"reward_model": {"style": "rule"}}):
        assert rewards(file, "only_answers", {**row, "ground_truth": "72"}) == [1.0, 0.0]


def test_a_dictionary_needs_a_score(file: Path) -> None:
    assert (
        "it must return a finite float, or a dictionary with a score"
        in rewards(file, "without_score", ROW)[0]
    )


def with_another(solution_str: str, ground_truth: str, tokenizer: Any) -> float:
    return 0.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> dict[str, float]:
    return {}


@pytest.mark.parametrize(
    ("function", "columns", "complaint"),
    [
        (
            compute_score,
            ("answer",),
            "needs the column reward_model with ground_truth in it, or ground_truth",
        ),
        (with_another, ("reward_model",), "missing a required argument: 'tokenizer'"),
    ],
)
def test_a_call_that_must_fail_is_refused(function: Any, columns: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        check_signature(function, "reward.function", columns)


def test_a_dictionary_is_an_accepted_annotation() -> None:
    check_signature(compute_score, "reward.function", tuple(ROW))
    check_signature(compute_score, "reward.function", None)
