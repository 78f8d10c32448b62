"""The gap between engine and trainer, and which samples it is measured on."""

import math

import pytest
import torch

from dora.trainer.mismatch import Mismatch, spot_check


def test_gaps_add_up_to_mean_maximum_and_divergence() -> None:
    mismatch = Mismatch()
    mismatch.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    mismatch.add(torch.tensor([-3.0]), torch.tensor([-2.75]))
    mismatch.add(torch.tensor([]), torch.tensor([]))
    assert mismatch.metrics() == {
        "mismatch/num_tokens": 3.0,
        "mismatch/logprob_abs_diff_mean": 0.25,
        "mismatch/logprob_abs_diff_max": 0.5,
        "mismatch/kl": pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3),
    }


def test_without_tokens_there_is_nothing_to_report() -> None:
    assert Mismatch().metrics() == {}
    assert spot_check([], 100, step=3) == []


def test_a_small_share_is_checked_and_every_sample_has_its_turn() -> None:
    lengths = [5 + i * 7 % 30 for i in range(64)]
    checked = [spot_check(lengths, sum(lengths), step) for step in range(60)]
    assert all(sum(lengths[i] for i in picked) <= sum(lengths) / 16 for picked in checked)
    assert {i for picked in checked for i in picked} == set(range(64))


def test_at_least_one_sample_is_checked() -> None:
    assert len(spot_check([50, 50], num_trained=0, step=1)) == 1
