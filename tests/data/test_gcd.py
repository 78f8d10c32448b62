"""The built-in task: chains, their reward, and held-out pairs."""

from __future__ import annotations

import pytest

from dora.data import gcd
from dora.rewards.gcd import reward


def test_a_chain_has_every_step_and_the_divisor() -> None:
    assert gcd.prompt(48, 36) == "48,36:"
    assert gcd.chain(48, 36) == "12,36;12,24;12,12=12"
    assert gcd.chain(7, 7) == "=07"


def test_every_correct_chain_is_rewarded() -> None:
    rows = gcd.training_rows() + gcd.held_out_rows()
    assert all(reward(completion=gcd.chain(row["a"], row["b"]), **row) == 1.0 for row in rows)


@pytest.mark.parametrize(
    "completion",
    ["=12", "12,36;12,24;12,12=06", "12,36;24,12;12,12=12", "12,36;12,24;12,12=12;", "12,36;12,12=12", ""],
)
def test_an_incorrect_chain_is_not_rewarded(completion: str) -> None:
    assert reward("48,36:", completion) == 0.0


def test_no_held_out_pair_is_trained_on_in_either_order() -> None:
    held_out = {frozenset((row["a"], row["b"])) for row in gcd.held_out_rows()}
    trained = {frozenset((row["a"], row["b"])) for row in gcd.training_rows()}
    assert len(gcd.held_out_rows()) == len(held_out) == 512
    assert not held_out & trained
    assert len(held_out | trained) == 60 * 59 // 2
    assert gcd.held_out_rows()[:2] == [gcd.row(59, 28), gcd.row(42, 55)]
