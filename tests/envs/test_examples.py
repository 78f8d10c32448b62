"""The environments of the examples say what their pages promise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora.envs.base import Step, load_environment

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CALCULATOR = f"{EXAMPLES}/calculator/calculator.py:Calculator"
SIMON = f"{EXAMPLES}/game/simon.py:Simon"


def played(name: str, row: Mapping[str, Any], actions: Sequence[str], seed: int = 0) -> list[Any]:
    async def play() -> list[Any]:
        environment = load_environment(name)()
        return [await environment.reset(row, seed), *[await environment.step(action) for action in actions]]

    return asyncio.run(play())


def test_a_calculator_that_is_asked_knows_the_answer() -> None:
    row = {"prompt": "37*48+15:", "answer": 1791}
    assert played(CALCULATOR, row, ["37*48", "1776+15", "#1791"]) == [
        "37*48+15:",
        Step("=1776;", 0.0, False),
        Step("=1791;", 0.0, False),
        Step("", 1.0, True),
    ]


@pytest.mark.parametrize("action", ["", "37*", "37*48+15", "1" * 7 + "*2"])
def test_a_calculator_does_not_answer_what_it_does_not_understand(action: str) -> None:
    assert played(CALCULATOR, {"prompt": "", "answer": 0}, [action])[-1] == Step("=?;", 0.0, False)


@pytest.mark.parametrize("action", ["#1790", "#", "##1791"])
def test_a_wrong_answer_is_worth_nothing(action: str) -> None:
    assert played(CALCULATOR, {"prompt": "", "answer": 1791}, [action])[-1] == Step("", 0.0, True)


async def repeat(seed: int, slip_at: int | None = None) -> list[Step]:
    """The steps of a game in which all letters are repeated, up to one round."""
    game, steps = load_environment(SIMON)(), list[Step]()
    so_far = str(await game.reset({"prompt": "kc:"}, seed)).rstrip(":")
    assert so_far == "kc"
    while not steps or not steps[-1].done:
        steps.append(await game.step(so_far if len(steps) != slip_at else so_far[::-1]))
        so_far += str(steps[-1].observation).rstrip(":")
    assert len({*so_far}) == len(so_far)
    return steps


def test_a_game_is_won_by_remembering_everything() -> None:
    steps = asyncio.run(repeat(seed=0))
    assert [step.reward for step in steps] == [1 / 6] * 6
    letters = ["".join(str(step.observation) for step in asyncio.run(repeat(seed))) for seed in (0, 0, 1)]
    assert letters[0] == letters[1] != letters[2]


@pytest.mark.parametrize("round_number", [0, 3, 5])
def test_a_wrong_letter_ends_the_game(round_number: int) -> None:
    steps = asyncio.run(repeat(seed=0, slip_at=round_number))
    assert [step.reward for step in steps] == [1 / 6] * round_number + [0.0]


@pytest.mark.parametrize("name", ["calculator", "game"])
def test_held_out_prompts_are_not_among_those_of_training(name: str) -> None:
    prompts, held_out = (
        {json.loads(line)["prompt"] for line in (EXAMPLES / name / f"{file}.jsonl").read_text().splitlines()}
        for file in ("prompts", "held_out")
    )
    assert len(prompts) > len(held_out) >= 32
    assert not prompts & held_out
