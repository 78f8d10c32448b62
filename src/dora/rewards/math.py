"""Reward for mathematical problems: compare the final answer with the column `answer` exactly, without a
library.

The column is as GSM8K has it. `dora.rewards.math_verify` reads LaTeX and is lenient.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from dora.rewards.thoughts import without_thoughts

_MARK = "####"  # GSM8K writes it before the final answer
_HEADING = re.compile(r"[*_]*(?:\d+[.)]\s+)?[*_]*[A-Za-z]{3}")
_MINUS = "\N{MINUS SIGN}"
_UNITS = re.compile(r"(?:^|(?<=^[+-]))\\?\$|\\?[$%]$|(?:\\[,;: ])*\\text\{[^}]*\}$")
_COMMAS = re.compile(r"\{,\}|,\\!")  # of thousands, in LaTeX
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(-?)(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d+)?", re.ASCII)
_RATIO = re.compile(r"[+-]?\d+/\d+", re.ASCII)


def gsm8k(prompt: Any, completion: str, *, answer: object, **row: object) -> float:
    r"""1.0 if the number after the last "####", or in the last \boxed{}, equals that of `answer`.

    Where the completion has both, the later one counts. Thoughts do not count. Numbers are compared exactly:
    0.5 equals 1/2, and 72.0 equals 72. Thousands commas, a dollar sign and a percent sign are ignored. Raises
    ValueError if `answer` has no number.
    """
    expected = parse_number(final_answer(str(answer)) or str(answer))
    if expected is None:
        raise ValueError(f"the column answer = {answer!r} holds no number, neither after {_MARK} nor alone")
    found = final_answer(without_thoughts(completion))
    return float(found is not None and parse_number(found) == expected)


def final_answer(text: str) -> str | None:
    r"""The text after the last "####" on its line, or in the last \boxed{}; the later of the two.

    "####" also begins headings of Markdown: a line of words between a box and more text is no answer.
    """
    mark, box = text.rfind(_MARK), text.rfind(r"\boxed{")
    while mark > box:
        line, _, rest = text[mark + len(_MARK) :].strip().partition("\n")
        if box < 0 or not (rest and _HEADING.match(line)):
            return line.strip()
        mark = text.rfind(_MARK, 0, mark)
    return None if box < 0 else _until_closing_brace(text[box + len(r"\boxed{") :])


def parse_number(text: str) -> Fraction | None:
    r"""The rational number that a text writes: 1,234.50, -3/4 or \frac{3}{4}; None if it writes none."""
    text = text.strip().lstrip("*").rstrip("*.").replace(_MINUS, "-")
    text = _COMMAS.sub(",", _UNITS.sub("", text)).strip()
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        sign = "-" if (fraction[1] == "-") != (fraction[2] == "-") else ""
        text = f"{sign}{fraction[3]}/{fraction[4]}"
    if not text or not (_NUMBER.fullmatch(text) or _RATIO.fullmatch(text)):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):  # "-" alone; 1/0
        return None


def _until_closing_brace(text: str) -> str | None:
    """The text before the matching closing brace; None if there is none."""
    depth = 1
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:position].strip()
    return None
