"""Whatever a reward function does, its result is a finite number or a named reason."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora.errors import RewardError
from dora.rewards.base import RewardInput, RewardResult, load_reward, score, score_one


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("WORTH = 2.5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from neighbour_of_reward import WORTH\ndef reward(prompt, completion, **row):\n    return WORTH\n"
    )
    assert score_one(load_reward(f"{file}:reward"), "p", "c", {}).reward == 2.5


def test_a_function_is_loaded_from_a_module() -> None:
    assert load_reward("math:hypot")(3, 4) == 5


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("reward", "must read file.py:name or module:name"),
        ("nowhere.py:reward", "does not exist"),
        ("no_such_module_here:reward", "ModuleNotFoundError"),
        ("math:no_such_function", "has no 'no_such_function'"),
        ("math:pi", "has no 'pi'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_explained(name: str, complaint: str) -> None:
    with pytest.raises(RewardError) as refusal:
        load_reward(name)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "def reward(prompt, completion, **row)\n    return 1.0\n",
            ":1: SyntaxError: expected ':'; correct that line",
        ),
        ("x = 1\n  y = 2\n", ":2: IndentationError: unexpected indent; correct that line"),
        ("\nimport nothere\n", ":2: ModuleNotFoundError: No module named 'nothere'; install it, or correct"),
        ("from json import nothere\n", ":1: ImportError: cannot import name 'nothere' from 'json'"),
        ("import json\nX = json.loads('{')\n", ":2: JSONDecodeError: Expecting property name"),
        (
            "def f():\n    return 1 / 0\n\n\nf()\n",
            ":2: ZeroDivisionError: division by zero; correct that line",
        ),
        ("raise SystemExit(3)\n", ":1: SystemExit: 3; correct that line"),
        ("x = '\\ud800'\nassert False, 'a\\nb'\n", ":2: AssertionError: a b; correct that line"),
    ],
)
def test_a_file_that_cannot_be_imported_is_explained_in_one_line(
    source: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(RewardError) as refusal:
        load_reward(f"{file}:reward")
    assert str(refusal.value).startswith(f"reward.function = '{file}:reward': {file}{complaint}")
    assert "\n" not in str(refusal.value)


PAIR = """
class Pair:
    def __init__(self, *, worth=1.0):
        self.worth = 1 / worth

    def __call__(self, prompt, completion, **row):
        return self.worth * (completion == prompt)


class NotCallable:
    pass
"""


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    (tmp_path / "pair.py").write_text(PAIR)
    return tmp_path / "pair.py"


def test_a_class_is_instantiated_with_its_options_and_then_called(pair: Path) -> None:
    reward = load_reward(f"{pair}:Pair", "reward_task.echo.class", {"worth": 4})
    assert [score_one(reward, "p", text, {"answer": 1}).reward for text in "pq"] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("Pair", {"wroth": 1}, "unexpected keyword argument 'wroth'"),
        ("Pair", {"worth": 0}, "the class raised ZeroDivisionError"),
        ("NotCallable", {}, "give the class a __call__"),
    ],
)
def test_a_class_that_is_no_reward_is_explained(
    pair: Path, name: str, options: dict[str, int], complaint: str
) -> None:
    with pytest.raises(RewardError, match=complaint) as refusal:
        load_reward(f"{pair}:{name}", "reward_task.echo.class", options)
    assert str(refusal.value).startswith(f"reward_task.echo.class = '{pair}:{name}'")


def test_a_function_takes_no_options() -> None:
    with pytest.raises(RewardError, match="a function takes no options; remove them, or name a class"):
        load_reward("math:hypot", "reward_task.echo.class", {"worth": 1})


def test_an_error_in_a_library_names_the_line_of_the_file_that_called_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import subprocess\n\n\nsubprocess.run(['no-model-server'])\n")
    with pytest.raises(RewardError) as refusal:
        load_reward(f"{file}:reward")
    assert f"{file}:4: FileNotFoundError: [Errno 2]" in str(refusal.value)
    command = re.search(r"`python (.*)` shows the traceback$", str(refusal.value))
    assert command is not None
    shown = subprocess.run([sys.executable, command[1]], capture_output=True, text=True, check=False)
    assert f'File "{file}", line 4, in <module>' in shown.stderr


def test_prompt_completion_and_row_reach_the_function() -> None:
    def reward(prompt: str, completion: str, **row: Any) -> float:
        return float(prompt == "p" and completion == "c" and row == {"answer": 4})

    assert score_one(reward, "p", "c", {"answer": 4}).reward == 1.0


def test_a_function_may_change_its_arguments() -> None:
    def reward(prompt: list[dict[str, str]], completion: str, *, words: list[str]) -> float:
        prompt.append({"role": "assistant", "content": completion})
        words.remove(completion)
        return float(len(prompt) - len(words))

    def rewards(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        pairs = zip(prompts, completions, columns["words"], strict=True)
        return [reward(prompt, completion[0]["content"], words=own) for prompt, completion, own in pairs]

    prompt, row = [{"role": "user", "content": "?"}], {"words": ["a", "b"]}
    inputs = [RewardInput(prompt, "b", [], row)] * 3
    for function in (reward, rewards):
        assert [result.reward for result in score(function, inputs)] == [1.0] * 3


def test_an_async_function_is_awaited() -> None:
    async def reward(prompt: str, completion: str, **row: Any) -> float:
        await asyncio.get_running_loop().run_in_executor(None, str)
        return 0.25

    assert score_one(reward, "p", "c", {}).reward == 0.25


def test_an_async_function_may_keep_what_belongs_to_an_event_loop() -> None:
    lock = asyncio.Lock()

    async def wait() -> None:
        async with lock:
            await asyncio.get_running_loop().run_in_executor(None, str)

    async def reward(prompt: str, completion: str, **row: Any) -> float:
        await asyncio.gather(wait(), wait())
        return 1.0

    assert [score_one(reward, "p", "c", {}) for _ in range(2)] == [RewardResult(1.0)] * 2


@pytest.mark.parametrize(("value", "reward"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (-2.0, -2.0)])
def test_every_finite_real_number_is_a_reward(value: object, reward: float) -> None:
    outcome = score_one(lambda prompt, completion: value, "p", "c", {})
    assert (outcome.reward, outcome.reason) == (reward, "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "reward returned nan"),
        (float("-inf"), "reward returned -inf"),
        ("1.0", "reward returned str"),
        (None, "reward returned NoneType"),
        ([1.0], "reward returned list"),
        (np.ones(2), "reward returned ndarray"),
        (torch.ones(2), "reward returned Tensor"),
    ],
)
def test_anything_else_fails_by_name(value: object, reason: str) -> None:
    outcome = score_one(lambda prompt, completion: value, "p", "c", {})
    assert outcome.reward is None
    assert outcome.reason == reason
    assert "must return a finite float" in outcome.detail


@pytest.mark.parametrize("error", [ValueError("no digits"), SystemExit(3), asyncio.CancelledError()])
def test_a_function_that_raises_fails_with_its_traceback(error: BaseException) -> None:
    def reward(prompt: str, completion: str) -> float:
        raise error

    outcome = score_one(reward, "p", "c", {})
    assert outcome.reason == f"reward raised {type(error).__name__}"
    assert "in reward" in outcome.detail


def test_a_column_the_function_does_not_take_fails_by_name() -> None:
    def reward(prompt: str, completion: str) -> float:
        return 1.0

    assert score_one(reward, "p", "c", {"answer": 4}).reason == "reward raised TypeError"
