r"""Reward for mathematical problems with the library math-verify, which reads LaTeX and most notations.

A marked answer is read as a whole, so a response that names several candidates is wrong. A percent sign and a
dollar sign are units and are ignored, as in `rewards/math.py`: 18% equals 18, and does not equal 0.18.

The library interrupts slow calls with a signal, which works because a reward worker scores in its main
thread. A call that still hangs is ended after reward.timeout_s.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

from dora.errors import RewardError
from dora.rewards.math import final_answer, parse_number
from dora.rewards.thoughts import without_thoughts

try:
    import math_verify
    from math_verify import LatexExtractionConfig
except ImportError as error:
    raise RewardError(
        "reward.function: dora.rewards.math_verify needs math-verify; run pip install 'dora-rl[math]'"
    ) from error

TIMEOUT_S = 2  # of each call of the library
BUDGET_S = 4  # no further side of an equation is read after this time
MAX_LENGTH = 2000  # of a marked answer; a longer one is wrong (characters)
_SMALL, _RELATIVE_DIFFERENCE = 1e-3, 5e-3  # numbers below the first agree in three digits
_DELIMITERS = (("**", "**"), (r"\(", r"\)"), (r"\[", r"\]"))
_PERCENT = re.compile(r"\\?%|\b[Pp]ercent(?:age)?\b")
_UNITS = re.compile(rf"{_PERCENT.pattern}|\\?\$")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?!\d)")
_OPENING, _CLOSING = re.compile(r"[(\[]|\\\{"), re.compile(r"[)\]]|\\\}")  # of intervals, points and sets
_SCIENTIFIC = re.compile(r"(\d)[eE]([+-]?\d+)(?!\w)")
_MIXED = re.compile(r"(?<![\d./])(\d+) (\d+)/(\d+)(?!\d)")  # 1 1/2
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}(?!\d)")  # 0.1\overline{6}
_NUMBER_WITH_WORDS = re.compile(r"(\S+)[A-Za-z \-]+")
_EQUALS = re.compile(r"(?<![\\<>!:])==?|\\equiv(?![A-Za-z])")
_LIST = re.compile(r"[,;]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'?(?:\([A-Za-z]\))?")  # x, \theta, x_{1}, f(x)
_COMMANDS = re.compile(r"\\(?:text|mathrm)\{[^}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(
    r"####|\\boxed|(?=.*\d).*[A-Za-z]{2}\s+[A-Za-z]{2}|(?:[A-Za-z]+\s+){5}[A-Za-z]", re.DOTALL
)


def reward(prompt: Any, completion: str, *, answer: object, **row: object) -> float:
    """1.0 if the completion's final answer equals that of `answer`, else 0.0.

    The final answer is that of `final_answer`; in a completion without one, the last expression that the
    library finds. Thoughts do not count. Raises ValueError if `answer` cannot be read.
    """
    began_s = time.monotonic()
    expected_text = _expected_answer(_text_of(answer))
    expected = _parse(expected_text)
    if not expected:
        raise ValueError(f"the column answer = {answer!r:.80} holds nothing that math-verify can read")
    response = without_thoughts(completion)
    marked = final_answer(response)
    if not marked:
        return float(_is_equal(expected, _find_last(response)))
    if len(marked) > MAX_LENGTH:
        return 0.0
    for side in _sides(_normalized(marked), expected_text):
        if time.monotonic() - began_s > BUDGET_S or not _is_equal(expected, _parse(side)):
            return 0.0
    return 1.0


def _text_of(answer: object) -> str:
    """The text of a column. Raises ValueError for anything but a text, a number or a truth value, alone or in
    a list.
    """
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    is_number = isinstance(answer, int | float) and math.isfinite(answer)
    if not (isinstance(answer, str) or is_number):
        raise ValueError(f"the column answer = {answer!r:.80} is neither a text nor a number")
    return str(answer)


def _expected_answer(text: str) -> str:
    """The final answer of the column. Raises ValueError for a solution in which it is not marked."""
    marked = final_answer(text)
    found = _normalized(marked or text)
    if not marked and ("\n" in text.strip() or _PROSE.search(found)):
        raise ValueError(
            f"the column answer = {text!r:.80} is a text without a marked answer; write the answer alone, "
            r"or after #### or in \boxed{} at its end"
        )
    return found


def _normalized(text: str) -> str:
    """A number without its unit; any other answer without signs of units and thousands."""
    text = " ".join(_UNITS.sub("", text).split()).removesuffix(".")
    for opening, closing in _DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)]
    text = _THOUSANDS.sub(_without_signs_of_thousands, text.strip())
    text = _REPEATING.sub(_as_fraction, _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = text.replace(r"\varnothing", r"\emptyset")
    words = _NUMBER_WITH_WORDS.fullmatch(text)
    if words is not None and parse_number(words[1]) is not None:
        text = words[1]
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def _without_signs_of_thousands(number: re.Match[str]) -> str:
    """The digits of a number. Within brackets a plain comma separates values, as in (100,200), unless zeros
    follow it, as in (1,000), or the values have a comma and a blank between them, as in (1,200, 1,300).
    """
    before, after = number.string[: number.start()], number.string[number.end() :]
    is_list = len(_OPENING.findall(before)) > len(_CLOSING.findall(before)) and (
        re.search(r"\d,\d", number[0]) is not None
        and ",0" not in number[0]
        and ", " not in _OPENING.split(before)[-1] + _CLOSING.split(after)[0]
    )
    return number[0] if is_list else re.sub(r"\D", "", number[0])


def _as_fraction(decimal: re.Match[str]) -> str:
    """The fraction that a decimal with repeating digits equals."""
    whole, fixed, repeating = decimal.groups()
    difference = int(whole + fixed + repeating) - int(whole + fixed or "0")
    return rf"\frac{{{difference}}}{{{(10 ** len(repeating) - 1) * 10 ** len(fixed)}}}"


def _sides(text: str, expected: str) -> list[str]:
    """The values that an answer states, which must all be right: of x = 2 + 3 = 5 these are 2 + 3 and 5.

    If the right answer is a number, a first side with variables, as in f(3) = 5 and a + b = 5, is no value,
    unless it begins with a digit. If it has an equation itself, or the answer is a list, it is compared as a
    whole.
    """
    if _EQUALS.search(expected) or _LIST.search(text):
        return [text]
    sides = [side.strip() for side in _EQUALS.split(text)]
    if not (_has_variable(expected) or re.match(r"[-+]?\d", sides[0])) and _has_variable(sides[0]):
        del sides[0]
    return [side for side in sides if not _NAME.fullmatch(side)] or [text]


def _has_variable(text: str) -> bool:
    """Whether a text has letters besides those of units and of LaTeX commands."""
    return re.search("[A-Za-z]", _COMMANDS.sub("", _normalized(text))) is not None


def _parse(text: str) -> list[Any]:
    """The expression that the whole text is, in LaTeX."""
    found: list[Any] = math_verify.parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=TIMEOUT_S)
    return found


def _find_last(text: str) -> list[Any]:
    r"""The last expression in a text. The library reads LaTeX between $ and $, \( and \), \[ and \]."""
    text = _PERCENT.sub("", text.replace(r"\$", ""))
    has_signs = any(sign in text for sign in ("$", r"\(", r"\["))
    in_dollars = f"${text}$" if "\\" in text and not has_signs else text
    found: list[Any] = math_verify.parse(in_dollars, parsing_timeout=TIMEOUT_S)
    return found


def _is_equal(expected: list[Any], found: list[Any]) -> bool:
    is_equal = bool(math_verify.verify(expected, found, timeout_seconds=TIMEOUT_S))
    return is_equal and _is_near(expected[0], found[0])


def _is_near(expected: Any, found: Any) -> bool:
    """Whether a small number is near the expected one. The library rounds to six decimals, so that all small
    numbers are equal to it.
    """
    if not (getattr(expected, "is_number", False) and getattr(found, "is_number", False)):
        return True
    try:
        number = complex(expected)
        is_small = 0 < abs(number) < _SMALL
        return not is_small or abs(complex(found) - number) <= _RELATIVE_DIFFERENCE * abs(number)
    except Exception:  # of many types: a number beyond floats, or one that cannot be evaluated
        return True
