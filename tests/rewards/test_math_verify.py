"""The reward with the library math-verify is lenient, keeps its time limit, and names a missing library."""

from __future__ import annotations

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


def test_what_takes_too_long_is_wrong(verify: RewardFunction) -> None:
    began_s = time.monotonic()
    assert score_one(verify, "", "#### 10^1000000000", {"answer": "#### 72"}).reward == 0.0
    assert time.monotonic() - began_s < 8
