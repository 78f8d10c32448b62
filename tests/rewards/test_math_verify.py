"""The reward with the library math-verify is lenient, cannot be exploited, and keeps its time limit."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from dora.errors import RewardError
from dora.rewards.base import RewardFunction, load_reward, score_one

NAME = "dora.rewards.math_verify:reward"


@pytest.fixture
def verify() -> RewardFunction:
    pytest.importorskip("math_verify")
    return load_reward(NAME)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "dora.rewards.math_verify", raising=False)
    with pytest.raises(RewardError, match=r"needs math-verify; run pip install 'dora-rl\[math\]'"):
        load_reward(NAME)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("That makes 72.", "24 + 48\n#### 72", 1.0),
        ("#### 72 clips", "#### 72", 1.0),
        (r"\boxed{\frac{144}{2}}", "#### 72", 1.0),
        (r"It is $\frac{\sqrt{2}}{2}$.", r"\frac{1}{\sqrt{2}}", 1.0),
        ("That makes 71.", "#### 72", 0.0),
        ("", "#### 72", 0.0),
    ],
)
def test_equal_answers_are_equal_however_they_are_written(
    verify: RewardFunction, completion: str, answer: str, reward: float
) -> None:
    assert score_one(verify, "", completion, {"answer": answer, "level": 3}).reward == reward


@pytest.mark.parametrize(
    "final",
    [
        r"\boxed{\$1{,}234}",
        "#### \\$1234",
        "#### +1234",
        "#### 1.234e3",
        r"\boxed{1.234 \times 10^3}",
        "#### $1,234.00",
        r"\boxed{10,\!000 - 8766}",
        "#### \\(1234\\)",
        "#### **1234**",
        r"\boxed{x = 1,234}",
        r"\boxed{f(x) = 1234}",
        r"\boxed{x = 1233 + 1 = 1234}",
        "#### 1234 US dollars.",
        r"\boxed{1234\text{ m}}",
    ],
)
def test_the_right_answer_may_have_any_of_these_forms(verify: RewardFunction, final: str) -> None:
    assert verify("", final, answer="#### 1234") == 1.0
    assert verify("", final, answer="#### 5") == 0.0


@pytest.mark.parametrize(
    "final",
    [
        r"\boxed{5, 1234}",
        r"\boxed{5; 1234}",
        "#### 5 or 1234",
        "#### 5 and 1234",
        r"\boxed{5 \text{ or } 1234}",
        r"\boxed{\{5, 1234\}}",
        r"\boxed{5 = 1234}",
        r"\boxed{5 = 1,234}",
        r"\boxed{5 == 1234}",
        r"\boxed{5 \equiv 1234}",
        r"\boxed{5 = 6 = 1234}",
        r"\boxed{5, x = 1234}",
        r"\boxed{1234 \neq 5}",
        r"\boxed{5 < 1234}",
        r"\boxed{5 \to 1234}",
        r"\boxed{\pm 1234}",
        "#### 5 1234",
        "#### between 5 and 1234",
        "#### not 1234",
        r"\boxed{5|1234}",
        r"\boxed{1234}\boxed{5}",
    ],
)
def test_an_answer_that_names_several_values_is_wrong(verify: RewardFunction, final: str) -> None:
    assert verify("", final, answer="1234") == 0.0
    assert verify("", final, answer="5") == float(final == r"\boxed{1234}\boxed{5}")  # the last box counts


@pytest.mark.parametrize("final", ["#### 18%", r"\boxed{18\%}", "#### 18 percent", "It is 18%.", "#### 18"])
@pytest.mark.parametrize("sign", ["", "%"])
def test_a_percent_sign_is_ignored(verify: RewardFunction, final: str, sign: str) -> None:
    assert verify("", final, answer=f"18{sign}") == 1.0
    assert verify("", final, answer=f"0.18{sign}") == 0.0


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("So 5 = 5.\nIt is \\boxed{5}, no: #### 72", "72"),
        ("1. First, #### 5\n2. Then \\boxed{72}", "72"),
        ("12 square units", "12"),
        ("$2x + 3$", "y = 3 + 2x"),
        ("y = 2x + 3", "y = 3 + 2x"),
        ("x = 2 or x = 3", r"x = 2 \text{ or } x = 3"),
        ("no solution", r"\text{no solution}"),
        ("(1, 2)", "(1,2)"),
        ("1, 2", "2, 1"),
    ],
)
def test_the_column_has_a_marked_answer_or_the_answer_alone(
    verify: RewardFunction, answer: str, final: str
) -> None:
    assert verify("", rf"\boxed{{{final}}}", answer=answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "She sold 24.\nSo it is 72.",
        "The answer is 72.",
        "48 and then 24 more make 72",
        r"so \boxed{72",
        "####",
        "a long text that has many words in it",
    ],
)
def test_a_solution_without_a_marked_answer_is_refused(verify: RewardFunction, answer: str) -> None:
    with pytest.raises(ValueError, match=r"is a text without a marked answer; write the answer alone, or"):
        verify("", "#### 72", answer=answer)


def test_what_takes_too_long_is_wrong(verify: RewardFunction) -> None:
    began_s = time.monotonic()
    assert score_one(verify, "", "#### 10^1000000000", {"answer": "#### 72"}).reward == 0.0
    assert time.monotonic() - began_s < 60


@pytest.fixture
def early_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's time limits end after a tenth of their time."""
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 10))


# Each is an answer that costs time or memory, breaks a parser, or looks like code. None of them is 73.
HOSTILE = {
    # powers and factorials
    "power": r"10^{1000000000}",
    "power tower": r"9^{9^{9^{9}}}",
    "tall tower": "^{".join(["2"] * 60) + "}" * 59,
    "power of a power": r"((10^{1000})^{1000})^{1000}",
    "negative power": r"2^{-1000000000}",
    "fractional power": r"2^{0.5^{0.5^{0.5^{1000000000}}}}",
    "power of a fraction": r"(\frac{1}{3})^{100000000}",
    "plain power": "9**9**9**9",
    "plain tower": "9^9^9^9^9",
    "long exponent": "7^{" + "9" * 300 + "}",
    "modulus of a power": r"3^{10^{15}} \mod 7",
    "factorial": r"1000000000!",
    "factorial of a factorial": "((9!)!)!",
    "many factorials": "9" + "!" * 50,
    "binomial": r"\binom{10^{9}}{5 \cdot 10^{8}}",
    "gamma": r"\Gamma(10^{10})",
    "exponential": r"e^{e^{e^{e^{e}}}}",
    "root": r"\sqrt[1000000]{2^{1000000}}",
    "scientific": "1e999999999",
    "negative scientific": "1e-999999999",
    "long scientific": "1e" + "9" * 400,
    "logarithm": r"\log_{10}(10^{10^{10^{10}}})",
    # long
    "digits": "9" * 1900,
    "too many digits": "9" * 100_000,
    "decimals": "0." + "3" * 1900,
    "sum": "+".join(["1"] * 900),
    "product": r" \cdot ".join(["99999"] * 150),
    "sum of fractions": "+".join(rf"\frac{{1}}{{{n}}}" for n in range(1, 130)),
    "letters": "abcdefghijklmnopqrstuvwxyz" * 70,
    "commas": "," * 1900,
    "list": ",".join(map(str, range(480))),
    "signs": "-" * 1900 + "1",
    "minus plus": "-+" * 900 + "1",
    "thousands": "1" + ",000" * 450,
    "spaces": " " * 100_000 + "5",
    "dollars": "$" * 1900,
    "percents": "%" * 100_000,
    "equals": "=" * 1900,
    "equations": "=".join(["1"] * 900),
    "names": "=".join(["x"] * 900) + "=5",
    "pluses and minuses": r"\pm 1 " * 40,
    # nested
    "parentheses": "(" * 900 + "1" + ")" * 900,
    "braces": "{" * 900 + "1" + "}" * 900,
    "brackets": "[" * 900 + "1" + "]" * 900,
    "fractions": r"\frac{1}{" * 200 + "2" + "}" * 200,
    "roots": r"\sqrt{" * 250 + "2" + "}" * 250,
    "absolute values": r"\left|" * 200 + "1" + r"\right|" * 200,
    "sines": r"\sin(" * 300 + "1" + ")" * 300,
    "subscripts": "x_{" * 500 + "1" + "}" * 500,
    "powers": "x^{" * 500 + "1" + "}" * 500,
    "texts": r"\text{" * 250 + "a" + "}" * 250,
    "boxes": r"\boxed{" * 200 + "5" + "}" * 200,
    "polynomial": "(x+1)" * 300,
    "expansion": "(x+y+z)^{1000}",
    "deep expansion": "((((x+1)^{99}+1)^{99}+1)^{99}+1)^{99}",
    # unbalanced and broken
    "open braces": "{" * 1000,
    "closed braces": "}" * 1000,
    "open parentheses": "(" * 1000,
    "open fraction": r"\frac{1}{",
    "empty fraction": r"\frac{}{}",
    "fraction without arguments": r"\frac",
    "backslash": "\\",
    "backslashes": "\\" * 1000,
    "open left": r"\left(\left(\left( 1",
    "lone right": r"\right)",
    "open environment": r"\begin{pmatrix} 1 & 2 \\ 3",
    "ragged matrix": r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
    "unknown command": r"\notacommand{5}",
    "definition": r"\def\x{\x\x}\x",
    "operators": "+*/^-" * 200,
    "carets": "5^^^^^5",
    "underscores": "5____5",
    "empty text": r"\text{}",
    # undefined values
    "division by zero": r"\frac{1}{0}",
    "zero by zero": r"\frac{0}{0}",
    "zero to the zero": "0^{0}",
    "infinity": r"\infty - \infty",
    "infinite product": r"0 \cdot \infty",
    "logarithm of zero": r"\log(0)",
    "imaginary": r"i^{i^{i^{i}}}",
    "nan": r"\text{nan}",
    "not a number": "nan",
    "tangent": r"\tan(\frac{\pi}{2})",
    # calculus
    "integral": r"\int_{0}^{\infty} e^{-x^{x^{x}}} dx",
    "integral without value": r"\int \sin(\sin(\sin(\sin(x)))) dx",
    "endless sum": r"\sum_{n=1}^{\infty} \frac{\sin(n^{n})}{n!}",
    "long sum": r"\sum_{n=1}^{1000000000} n^{n}",
    "long product": r"\prod_{n=1}^{1000000000} n",
    "limit": r"\lim_{x \to 0} \frac{\sin(\sin(x)) - x}{x^{100}}",
    "derivative": r"\frac{d^{1000}}{dx^{1000}} \sin(x^{x})",
    "determinant": r"\det\begin{pmatrix}"
    + r" \\ ".join(" & ".join(["x"] * 12) for _ in range(12))
    + r"\end{pmatrix}",
    "matrix power": r"\begin{pmatrix} 1 & 1 \\ 1 & 0 \end{pmatrix}^{1000000000}",
    "equation": "x^{100} + x^{99} = 5",
    "interval": r"[10^{10^{10}}, 10^{10^{11}}]",
    "set": r"\{" + ",".join(f"{n}^{{{n}}}" for n in range(100, 300)) + r"\}",
    # characters
    "null": "\0",
    "control characters": "".join(map(chr, range(1, 32))),
    "lone surrogate": "\ud800",
    "byte order mark": "\ufeff7",
    "right to left": "\u202e27",
    "zero width": "7\u200b\u200b3",
    "combining": "7" + "\u0301" * 1000,
    "other digits": "٧٢",
    "full width": "\uff17\uff13",
    "superscript": "7²",
    "roman": "Ⅻ",
    "emoji": "🙂" * 500,
    "minus sign": "\u221273",
    "vulgar fraction": "½",
    "infinity sign": "∞" * 100,
    # code
    "code": "__import__('os').system('true')",
    "attribute": "(1).__class__.__bases__",
    "lambda": "(lambda: 0)()",
    "format": "%s%n{0}{}",
    "markup": "<script>72</script>",
    "regular expression": "(a+)+" * 50 + "!",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.usefixtures("early_alarms")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm during a finaliser
def test_hostile_answers_end_and_are_wrong(verify: RewardFunction, text: str) -> None:
    for completion in (f"#### {text}", text):
        assert score_one(verify, "", completion, {"answer": "#### 73"}).reward == 0.0
