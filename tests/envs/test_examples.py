"""The environments of the examples: observations, rewards and prompts."""

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
SHOP = f"{EXAMPLES}/tool_caller/environment.py:Shop"
SIMON = f"{EXAMPLES}/game/simon.py:Simon"


def run_episode(name: str, row: Mapping[str, Any], actions: Sequence[str], seed: int = 0) -> list[Any]:
    async def run() -> list[Any]:
        environment = load_environment(name)()
        return [await environment.reset(row, seed), *[await environment.step(action) for action in actions]]

    return asyncio.run(run())


def test_the_calculator_computes_and_scores() -> None:
    row = {"prompt": "37*48+15:", "answer": 1791}
    assert run_episode(CALCULATOR, row, ["37*48", "1776+15", "#1791"]) == [
        "37*48+15:",
        Step("=1776;", 0.0, False),
        Step("=1791;", 0.0, False),
        Step("", 1.0, True),
    ]


@pytest.mark.parametrize("action", ["", "37*", "37*48+15", "1" * 7 + "*2"])
def test_an_invalid_call_of_the_calculator_gets_an_error(action: str) -> None:
    assert run_episode(CALCULATOR, {"prompt": "", "answer": 0}, [action])[-1] == Step("=?;", 0.0, False)


@pytest.mark.parametrize("action", ["#1790", "#", "##1791"])
def test_a_wrong_answer_has_reward_0(action: str) -> None:
    assert run_episode(CALCULATOR, {"prompt": "", "answer": 1791}, [action])[-1] == Step("", 0.0, True)


SHOP_ROW = {"prompt": "What do 7 fig cost?", "item": "fig", "price": 34, "answer": 238}


def call_text(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_shop_calls_tools_and_scores_the_answer() -> None:
    calls = [call_text("lookup", item="fig"), call_text("calculate", expression="7*34")]
    _, *steps = run_episode(SHOP, SHOP_ROW, [*calls, "238"])
    assert steps == [
        Step([{"role": "tool", "content": "34"}], 0.0, False),
        Step([{"role": "tool", "content": "238"}], 0.0, False),
        Step("", 1.0, True),
    ]


@pytest.mark.parametrize(
    "call",
    [
        call_text("search", item="fig"),
        call_text("lookup", item="plum"),
        call_text("lookup"),
        call_text("calculate", expression="7*34*2"),
        call_text("calculate", expression="7**34"),
    ],
)
def test_a_wrong_call_in_the_shop_gets_an_error(call: str) -> None:
    assert run_episode(SHOP, SHOP_ROW, [call])[-1] == Step([{"role": "tool", "content": "error"}], 0.0, False)


@pytest.mark.parametrize("action", ["237", "", '<tool_call>{"name": "lookup"', "238 fig"])
def test_a_wrong_answer_in_the_shop_has_reward_0(action: str) -> None:
    assert run_episode(SHOP, SHOP_ROW, [action])[-1] == Step("", 0.0, True)


async def play_simon(seed: int, wrong_round: int | None = None) -> list[Step]:
    """The steps of a game with correct answers, except in `wrong_round`."""
    game, steps = load_environment(SIMON)(), list[Step]()
    letters_so_far = str(await game.reset({"prompt": "kc:"}, seed)).rstrip(":")
    assert letters_so_far == "kc"
    while not steps or not steps[-1].done:
        steps.append(await game.step(letters_so_far if len(steps) != wrong_round else letters_so_far[::-1]))
        letters_so_far += str(steps[-1].observation).rstrip(":")
    assert len({*letters_so_far}) == len(letters_so_far)
    return steps


def test_a_game_with_correct_answers_has_reward_1() -> None:
    steps = asyncio.run(play_simon(seed=0))
    assert [step.reward for step in steps] == [1 / 6] * 6
    letters = ["".join(str(step.observation) for step in asyncio.run(play_simon(seed))) for seed in (0, 0, 1)]
    assert letters[0] == letters[1] != letters[2]


@pytest.mark.parametrize("round_number", [0, 3, 5])
def test_a_wrong_letter_ends_the_game(round_number: int) -> None:
    steps = asyncio.run(play_simon(seed=0, wrong_round=round_number))
    assert [step.reward for step in steps] == [1 / 6] * round_number + [0.0]


@pytest.mark.parametrize("name", ["calculator", "game", "tool_caller"])
def test_held_out_rows_are_not_among_those_of_training(name: str) -> None:
    rows, held_out = (
        {*(EXAMPLES / name / f"{file}.jsonl").read_text().splitlines()} for file in ("prompts", "held_out")
    )
    assert len(rows) > len(held_out) >= 32
    assert not rows & held_out
