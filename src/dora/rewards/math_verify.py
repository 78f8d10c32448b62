"""Verify the final answer of a mathematical problem with the library math-verify.

It reads LaTeX and most of what people write. It ends what takes too long by a signal, which
works because a rewarder judges in its main thread; reward.timeout_s stands behind that.
"""

from __future__ import annotations

from typing import Any

from dora.errors import RewardError
from dora.rewards.math import final_answer

try:
    import math_verify
except ImportError as error:
    raise RewardError(
        "reward.function: dora.rewards.math_verify needs math-verify; run pip install 'dora-rl[math]'"
    ) from error

TIMEOUT_S = 2  # of each of the three calls: together less than the default of reward.timeout_s


def reward(prompt: Any, completion: str, *, answer: object, **row: object) -> float:
    """1.0 if the completion's final answer equals that of `answer`, else 0.0.

    The final answer is what `final_answer` finds; a completion without one is searched whole, and
    what the library finds last in it counts. Raises ValueError if `answer` cannot be read.
    """
    wanted = _read(final_answer(str(answer)) or str(answer))
    if not wanted:
        raise ValueError(f"the column answer = {answer!r} holds nothing that math-verify can read")
    given = _read(final_answer(completion) or completion)
    return float(math_verify.verify(wanted, given, timeout_seconds=TIMEOUT_S))


def _read(text: str) -> list[Any]:
    """What a text may mean; LaTeX is only read between dollars."""
    in_dollars = f"${text}$" if "\\" in text and "$" not in text else text
    found: list[Any] = math_verify.parse(in_dollars, parsing_timeout=TIMEOUT_S)
    return found
