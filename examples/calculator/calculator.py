"""An environment with a calculator as a tool, and the demonstrations for its starting model.

    37*48+15:  37*48  =1776;  1776+15  =1791;  #1791

Each turn of the policy is a product or a sum for the calculator, or the answer after "#". The policy cannot
multiply such numbers: it has to call the calculator in the right order and copy the results.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dora.envs.base import Environment, Step

ALPHABET = "0123456789*+:=;#?"
NUM_ROWS, NUM_HELD_OUT = 1000, 128
GUESS_RATE, ERROR_RATE = 0.5, 0.15  # of demonstrations: guessed answers, turns with a wrong digit


class Calculator(Environment):
    """The reward is 1 if the answer is right."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """The first observation is the prompt of the row."""
        self._answer = str(row["answer"])
        return str(row["prompt"])

    async def step(self, action: str) -> Step:
        """Compute a product or sum, or score the answer."""
        if action.startswith("#"):
            return Step("", float(action[1:] == self._answer), True)
        call = re.fullmatch(r"(\d{1,6})([*+])(\d{1,6})", action)
        if call is None:
            return Step("=?;", 0.0, False)
        a, b = int(call[1]), int(call[3])
        return Step(f"={a * b if call[2] == '*' else a + b};", 0.0, False)


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out tasks of the form a*b+c."""
    tasks: dict[str, int] = {}
    while len(tasks) < NUM_ROWS + NUM_HELD_OUT:
        a, b, c = (source.randint(10, 99) for _ in range(3))
        tasks[f"{a}*{b}+{c}:"] = a * b + c
    found = [{"prompt": prompt, "answer": answer} for prompt, answer in tasks.items()]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def demonstration(row: Mapping[str, Any], observed: Sequence[str], source: random.Random) -> str:
    """The next turn after these observations (the prompt first), sometimes a guess or with an error."""
    if source.random() < GUESS_RATE and len(observed) == 1:
        return f"#{source.randint(100, 9999)}"
    product, _, summand = row["prompt"].rstrip(":").partition("+")
    result = observed[-1].strip("=;")
    correct = (product, f"{result}+{summand}", f"#{result}")[len(observed) - 1]
    return _with_error(correct, source) if source.random() < ERROR_RATE else correct


def _with_error(text: str, source: random.Random) -> str:
    position = source.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:position] + source.choice("0123456789") + text[position + 1 :]
