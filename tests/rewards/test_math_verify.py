"""The reward with the library math-verify is lenient, cannot be exploited, and keeps its time limit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rewards import hostile_answers
from tests.rewards.hostile_answers import HOSTILE

from dora.errors import RewardError
from dora.rewards.base import RewardFunction, load_reward, score_one

NAME = "dora.rewards.math_verify:reward"
ROOT = Path(__file__).parents[2]


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
        (r"As \(p = 1\), the probability is \(\frac{\sqrt{2}}{2}\).", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\[ p = 1 \] and so \[ q = \frac{\sqrt{2}}{2} \]", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", 1.0),
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
        r"\boxed{f(3) = 1234}",
        r"\boxed{a + b = 1234}",
        r"\boxed{|A| = 1,234\text{ m}}",
        r"\boxed{\angle ABC = 1233 + 1 = 1234^\circ}",
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
        r"\boxed{5\text{ m} = 1234}",
        r"\boxed{5 cm = 1234}",
        r"\boxed{a + b = 5 = 1234}",
        r"\boxed{x = 5 \lor x = 1234}",
        r"\boxed{y = 5 \quad z = 1234}",
        r"\boxed{5 \quad z = 1234}",
        r"\boxed{\sqrt{25} = 1234}",
        "#### 5 1/1234",
        r"\boxed{x = 5 \text{ or } x = 1234}",
        "#### x = 5 or x = 1234",
        r"\boxed{1234 \neq 5}",
        r"\boxed{5 < 1234}",
        r"\boxed{5 \to 1234}",
        r"\boxed{\pm 1234}",
        "#### 5 1234",
        "#### between 5 and 1234",
        "#### not 1234",
        r"\boxed{5|1234}",
        r"\boxed{5$ $1234}",
        r"\boxed{5$ or $1234}",
        "\\boxed{5\n1234}",
        r"\boxed{1234}\boxed{5}",
    ],
)
def test_an_answer_that_names_several_values_is_wrong(verify: RewardFunction, final: str) -> None:
    assert verify("", final, answer="1234") == 0.0
    assert verify("", final, answer="5") == float(final == r"\boxed{1234}\boxed{5}")  # the last box counts


@pytest.mark.parametrize(
    ("final", "answer", "reward"),
    [
        ("1.6e-19", r"1.6 \times 10^{-19}", 1.0),
        (r"1.60 \times 10^{-19}", "1.6e-19", 1.0),
        ("0.00012", r"\frac{3}{25000}", 1.0),
        ("-0.00012", "-0.00012", 1.0),
        ("3.2e-19", "1.6e-19", 0.0),
        (r"9.1 \times 10^{-31}", r"6.6 \times 10^{-34}", 0.0),
        ("0", "0.0000002", 0.0),
        ("0.0000001", "0.0000002", 0.0),
        ("0.0001204", "0.00012", 1.0),
        ("0.0001208", "0.00012", 0.0),
        (r"\frac{1}{3000}", "0.000333", 1.0),
        ("6.6e-34", "6.626e-34", 1.0),
        ("0.333333", r"\frac{1}{3}", 1.0),
        ("0.012346", r"\frac{1}{81}", 1.0),
    ],
)
def test_small_numbers_are_not_all_equal(
    verify: RewardFunction, final: str, answer: str, reward: float
) -> None:
    assert verify("", rf"\boxed{{{final}}}", answer=answer) == reward


@pytest.mark.parametrize("answer", ["(100,200)", "[1,100]", r"\{1,100\}"])
def test_a_comma_within_brackets_separates_values(verify: RewardFunction, answer: str) -> None:
    assert verify("", rf"\boxed{{{answer}}}", answer=answer) == 1.0
    assert verify("", rf"\boxed{{{answer.replace(',', '')}}}", answer=answer) == 0.0
    assert verify("", rf"\boxed{{{answer.strip('()[]{}').replace(',', '')}}}", answer=answer) == 0.0


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
        ("2, -3", r"x = 2 \text{ or } x = -3"),
        ("2, -3", "x = -3 or x = 2"),
        ("2, -3", r"x_1 = 2 \quad \text{and} \quad x_2 = -3"),
        (r"\frac{3}{2}", "1 1/2"),
        (r"-\frac{3}{2}", "-1 1/2"),
        (r"0.\overline{3}", r"\frac13"),
        (r"-\frac{7}{6}", r"-1.1\overline{6}"),
        (r"\emptyset", r"\varnothing"),
        ("no solution", r"\text{no solution}"),
        ("(1, 2)", "(1,2)"),
        ("(100,200)", "(100, 200)"),
        ("[0, 100)", r"\left[0,100\right)"),
        (r"\{1,200\}", r"\{200, 1\}"),
        (r"\sqrt{1,000}", r"10\sqrt{10}"),
        (r"(1{,}000, 2)", "(1000,2)"),
        (r"\{1000, 2000\}", r"\{1,000, 2,000\}"),
        ("(1200, 1300)", "(1,200, 1,300)"),
        ("[0, 1250]", "[0, 1,250]"),
        (r"[0, 1] \cup [100, 200]", r"[0, 1] \cup [100,200]"),
        ("4000", r"(1,000) \cdot 4"),
        ("1, 2", "2, 1"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "\n\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}\n"),
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


def test_a_column_may_have_truth_values(verify: RewardFunction) -> None:
    assert verify("", r"\boxed{True}", answer=True) == 1.0
    assert verify("", r"\boxed{False}", answer=True) == 0.0


@pytest.mark.parametrize("answer", [None, float("nan"), ["1", "2"], {"value": "72"}])
def test_a_column_without_text_or_number_is_refused(verify: RewardFunction, answer: object) -> None:
    with pytest.raises(ValueError, match="is neither a text nor a number"):
        verify("", "#### 72", answer=answer)
    assert [verify("", "#### 72", answer=each) for each in (72, 72.0, ["72"])] == [1.0] * 3


def test_what_takes_too_long_is_wrong(verify: RewardFunction) -> None:
    began_s = time.monotonic()
    assert score_one(verify, "", "#### 10^1000000000", {"answer": "#### 72"}).reward == 0.0
    assert time.monotonic() - began_s < 60


def test_hostile_answers_end_and_are_wrong() -> None:
    """In a process of its own, as in a run: if an answer does not end, another process continues."""
    pytest.importorskip("math_verify")
    names, rewards, num_killed = list(HOSTILE), dict[str, str](), 0
    while names:
        command = [sys.executable, "-m", hostile_answers.__name__, *names]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        scored = [line.partition("\t") for line in ended.stdout.splitlines()]
        rewards |= {name: reward for name, _, reward in scored}
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGXCPU, f"{scored[-1]}: {ended.stderr[-2000:]}"
        rewards[scored[-1][0]], num_killed = "0.0\t0.0", num_killed + 1
        names = names[names.index(scored[-1][0]) + 1 :]
    assert rewards == dict.fromkeys(HOSTILE, "0.0\t0.0")
    assert num_killed < len(HOSTILE) / 10
