"""Verify the final answer of a mathematical problem: strict, exact, without any library.

For data with a column `answer`, as GSM8K has it. `dora.rewards.math_verify` is the lenient one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_MARK = "####"  # GSM8K writes it before the final answer
_UNITS = re.compile(r"^\\?\$|\\?[$%]$|\\text\{[^}]*\}$")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d+)?", re.ASCII)
_RATIO = re.compile(r"-?\d+/\d+", re.ASCII)


def gsm8k(prompt: Any, completion: str, *, answer: object, **row: object) -> float:
    r"""1.0 if the number after the last "####", or in the last \boxed{}, is that of `answer`.

    Where the completion has both, the later one counts. Numbers are compared exactly: 0.5 is 1/2,
    and 72.0 is 72. Thousands commas, a dollar sign and a percent sign do not count.
    Raises ValueError if `answer` has no number.
    """
    wanted = number(final_answer(str(answer)) or str(answer))
    if wanted is None:
        raise ValueError(f"the column answer = {answer!r} holds no number, neither after {_MARK} nor alone")
    given = final_answer(completion)
    return float(given is not None and number(given) == wanted)


def final_answer(text: str) -> str | None:
    r"""What stands after the last "####" on its line, or in the last \boxed{}, whichever is later."""
    mark, box = text.rfind(_MARK), text.rfind(r"\boxed{")
    if mark > box:
        return text[mark + len(_MARK) :].strip().partition("\n")[0].strip()
    return None if box < 0 else _braced(text[box + len(r"\boxed{") :])


def number(text: str) -> Fraction | None:
    r"""The rational number that a text is: 1,234.50, -3/4 or \frac{3}{4}; None if it is no number."""
    text = _UNITS.sub("", text.strip().removesuffix(".")).strip()
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    if not text or not (_NUMBER.fullmatch(text) or _RATIO.fullmatch(text)):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):  # "-" alone; 1/0
        return None


def _braced(text: str) -> str | None:
    """The text up to the brace that closes; None if it never does."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place].strip()
    return None
