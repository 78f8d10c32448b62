"""Mismatch between engine and trainer, distance to the behaviour policy, and the choice of spot checks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dora.trainer.corrections import CorrectedTokens
from dora.trainer.metrics import MismatchMetrics, OffPolicyMetrics, StepMetrics, choose_spot_checks


def log_ratios(*ratios: float) -> Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)


def test_mismatch_has_mean_maximum_and_divergence() -> None:
    mismatch = MismatchMetrics()
    mismatch.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    mismatch.add(torch.tensor([-3.0]), torch.tensor([-2.75]))
    mismatch.add(torch.tensor([]), torch.tensor([]))
    assert mismatch.metrics() == {
        "mismatch/num_tokens": 3.0,
        "mismatch/logprob_abs_diff_mean": 0.25,
        "mismatch/logprob_abs_diff_max": 0.5,
        "mismatch/kl": pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3),
    }


def test_without_tokens_there_are_no_metrics_and_no_spot_checks() -> None:
    assert MismatchMetrics().metrics() == {}
    assert choose_spot_checks([], 100, step=3) == []


def test_spot_checks_are_a_small_fraction_and_reach_every_sample() -> None:
    lengths = [5 + i * 7 % 30 for i in range(64)]
    chosen = [choose_spot_checks(lengths, sum(lengths), step) for step in range(60)]
    assert all(sum(lengths[i] for i in picks) <= sum(lengths) / 16 for picks in chosen)
    assert {i for picks in chosen for i in picks} == set(range(64))


def test_at_least_one_sample_is_checked() -> None:
    assert len(choose_spot_checks([50, 50], num_trained=0, step=1)) == 1


def test_effective_sample_size_and_divergence_of_a_hand_made_batch() -> None:
    metrics = OffPolicyMetrics()
    metrics.add(log_ratios(2.0, 0.5), torch.zeros(2, dtype=torch.float64))
    # sum r = 2.5, sum r**2 = 4.25; the log-ratios cancel.
    assert metrics.ess == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics.kl_k1 == pytest.approx(0.0)
    assert metrics.kl_k3 == pytest.approx(0.25)


def test_off_policy_metrics_of_micro_batches_add_up() -> None:
    ratios, zeros = (1.0, 4.0, 0.25, 1.5), torch.zeros(4, dtype=torch.float64)
    whole, parts = OffPolicyMetrics(), OffPolicyMetrics()
    whole.add(log_ratios(*ratios), zeros)
    parts.add(log_ratios(*ratios[:3]), zeros[:3])
    parts.add(log_ratios(*ratios[3:]), zeros[3:])
    assert parts.metrics() == pytest.approx(whole.metrics())


def test_the_metrics_of_ranks_merge_to_those_of_the_whole_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, entropies, weights = (-torch.rand(8, generator=generator) for _ in range(4))
    marks, ages = torch.arange(8) % 3 == 0, np.array([0, 0, 1, 2, 0, 1, 1, 3])
    parts = (slice(0, 8), slice(0, 5), slice(5, 8))
    whole, first, second = (StepMetrics(num_updates=0) for _ in parts)
    for metrics, part, kl_loss in zip((whole, first, second), parts, (1.0, None, 1.0), strict=True):
        corrected = CorrectedTokens(behaviour[part], weights[part], marks[part], ~marks[part])
        is_fresh = ages[part] == 0
        given = logprobs[part], behaviour[part], marks[part], entropies[part], is_fresh, ages[part], corrected
        metrics.add(*given)
        metrics.pg_loss, metrics.num_flops = float(logprobs[part].sum()), float(len(ages[part]))
        metrics.kl_loss, metrics.expert_load = kl_loss, torch.tensor([[part.stop - part.start, 1]])
        metrics.read()
    whole.expert_load = torch.tensor([[8, 2]])
    first.merge(second)
    assert first.metrics(8) == pytest.approx(whole.metrics(8))
    assert first.metrics(8)["actor/num_updates"] == 0.0


def test_on_policy_samples_are_all_effective_and_no_samples_have_no_metrics() -> None:
    same = OffPolicyMetrics()
    same.add(torch.tensor([-1.0, -3.0]), torch.tensor([-1.0, -3.0]))
    expected = {"off_policy/ess": 1.0, "off_policy/kl_k1": 0.0, "off_policy/kl_k3": 0.0}
    assert same.metrics() == expected
    assert OffPolicyMetrics().metrics() == {}
