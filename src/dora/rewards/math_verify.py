"""Reward for mathematical problems with the library math-verify, which reads LaTeX and most notations.

The library interrupts slow calls with a signal, which works because a reward worker scores in its main
thread. A call that still hangs is ended after reward.timeout_s.
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

    The final answer is that of `final_answer`; in a completion without one, the last expression that the
    library finds. Raises ValueError if `answer` cannot be read.
    """
    expected = _parse(final_answer(str(answer)) or str(answer))
    if not expected:
        raise ValueError(f"the column answer = {answer!r} holds nothing that math-verify can read")
    found = _parse(final_answer(completion) or completion)
    return float(math_verify.verify(expected, found, timeout_seconds=TIMEOUT_S))


def _parse(text: str) -> list[Any]:
    """The expressions in a text. The library reads LaTeX only between dollar signs."""
    in_dollars = f"${text}$" if "\\" in text and "$" not in text else text
    found: list[Any] = math_verify.parse(in_dollars, parsing_timeout=TIMEOUT_S)
    return found
