"""A calculator that can be asked before one answers, and the teacher of the model that begins.

    37*48+15:  37*48  =1776;  1776+15  =1791;  #1791

What the policy writes up to its end token is a turn: a product or a sum for the calculator, or the
answer after "#". The policy cannot multiply such numbers; it has to ask, in the right order, and to
copy what it reads.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dora.envs.base import Environment, Step

ALPHABET = "0123456789*+:=;#?"
NUM_ROWS, NUM_HELD_OUT = 1000, 128
GUESS, SLIP = 0.5, 0.15  # of the teacher: answers without asking, and digits copied wrongly


class Calculator(Environment):
    """One task after another; worth 1 if the answer is right."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """The prompt of the row is the task."""
        self._answer = str(row["answer"])
        return str(row["prompt"])

    async def step(self, action: str) -> Step:
        """Compute what is asked, or judge the answer."""
        if action.startswith("#"):
            return Step("", float(action[1:] == self._answer), True)
        asked = re.fullmatch(r"(\d{1,6})([*+])(\d{1,6})", action)
        if asked is None:
            return Step("=?;", 0.0, False)
        a, b = int(asked[1]), int(asked[3])
        return Step(f"={a * b if asked[2] == '*' else a + b};", 0.0, False)


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Different tasks of the form a*b+c, for training and held out."""
    tasks: dict[str, int] = {}
    while len(tasks) < NUM_ROWS + NUM_HELD_OUT:
        a, b, c = (source.randint(10, 99) for _ in range(3))
        tasks[f"{a}*{b}+{c}:"] = a * b + c
    found = [{"prompt": prompt, "answer": answer} for prompt, answer in tasks.items()]
    return found[:NUM_ROWS], found[NUM_ROWS:]


def teacher(
    row: Mapping[str, Any], said: Sequence[str], observed: Sequence[str], source: random.Random
) -> str:
    """What a teacher in a hurry writes after what was observed so far, the prompt first."""
    if source.random() < GUESS and len(observed) == 1:
        return f"#{source.randint(100, 9999)}"
    product, _, summand = row["prompt"].rstrip(":").partition("+")
    read = observed[-1].strip("=;")
    right = (product, f"{read}+{summand}", f"#{read}")[len(observed) - 1]
    return _with_slip(right, source) if source.random() < SLIP else right


def _with_slip(text: str, source: random.Random) -> str:
    place = source.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:place] + source.choice("0123456789") + text[place + 1 :]
