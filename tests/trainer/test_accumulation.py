"""A batch that arrives in parts gives the gradient of the whole, for every loss and aggregation."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.trainer.batches import (
    SETTINGS,
    TINY,
    first_moment,
    initial,
    relative_gap,
    samples,
    stale,
    with_nan,
    without_gradient,
)

from dora.errors import RunError
from dora.trainer.loss import POLICY_LOSSES
from dora.trainer.metrics import KL_BY_STALENESS
from dora.trainer.recipe import Correction, KLEstimator, LossAggMode, PolicyLoss
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

GROUP_SIZE = 3
BUDGET = 60  # tokens; several micro-batches
LOSSES = [loss for loss in POLICY_LOSSES if loss != "online_dpo"]
WITH_TERMS = replace(
    SETTINGS,
    micro_batch_tokens=BUDGET,
    loss_scale_factor=20,
    kl_loss_coef=0.1,
    entropy_coeff=0.01,
    correction=Correction(proximal="interpolated", token="icepop", sequence="mis", staleness_decay=0.8),
)


def make_trainer(settings: TrainerSettings) -> Trainer:
    """In double precision, so that equal gradients differ by rounding alone."""
    return Trainer(TINY, initial().double() + 0.01, settings, reference=initial().double())


def streamed(settings: TrainerSettings, batch: list[Sample], num_early: int) -> Trainer:
    """Add group by group, and accumulate up to `num_early` times before the end; -1: whenever possible."""
    trainer = make_trainer(settings)
    for i in range(0, len(batch), GROUP_SIZE):
        trainer.add_samples(batch[i : i + GROUP_SIZE])
        while trainer.can_accumulate and num_early:
            trainer.accumulate()
            num_early -= 1
    trainer.finish_step()
    return trainer


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_streamed_gradient_is_that_of_the_whole_batch(loss: PolicyLoss, mode: LossAggMode) -> None:
    settings = replace(WITH_TERMS, policy_loss=loss, loss_agg_mode=mode)
    batch = stale(samples(24))
    whole = make_trainer(replace(settings, micro_batch_tokens=10_000))
    whole.step(batch)
    got = first_moment(streamed(settings, batch, num_early=-1))
    assert relative_gap(got, first_moment(whole)) < 1e-12


def test_early_accumulation_does_not_change_a_bit() -> None:
    batch = stale(samples(24))
    late = streamed(WITH_TERMS, batch, num_early=0)
    for num_early in (1, 3, -1):
        early = streamed(WITH_TERMS, batch, num_early)
        assert torch.equal(early.flat, late.flat)


def test_metrics_of_a_streamed_step_are_those_of_the_whole_batch() -> None:
    batch = stale(samples(24))
    expected = make_trainer(replace(WITH_TERMS, micro_batch_tokens=10_000)).step(batch)
    trainer = make_trainer(WITH_TERMS)
    for i in range(0, 24, GROUP_SIZE):
        trainer.add_samples(batch[i : i + GROUP_SIZE])
    while trainer.can_accumulate:
        trainer.accumulate()
    assert 0 < trainer.num_accumulated_tokens < expected["actor/num_tokens"]
    assert trainer.finish_step() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_failed_step_leaves_no_trace() -> None:
    trainer, fresh = make_trainer(SETTINGS), make_trainer(SETTINGS)
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step(with_nan(samples()))
    trainer.step(samples())
    fresh.step(samples())
    assert torch.equal(trainer.flat, fresh.flat)


def test_an_entropy_bonus_increases_the_entropy() -> None:
    trainer = make_trainer(replace(SETTINGS, entropy_coeff=1.0))
    batch = without_gradient(samples())
    before = trainer.step(batch)["actor/entropy"]
    for _ in range(2):
        after = trainer.step(batch)["actor/entropy"]
    assert after > before


@pytest.mark.parametrize("estimator", [kind for kind in get_args(KLEstimator) if kind != "k1"])
def test_every_kl_estimator_except_k1_pulls_the_policy_to_the_reference(estimator: KLEstimator) -> None:
    settings = replace(SETTINGS, lr=1e-3, kl_loss_coef=1.0, kl_loss_type=estimator)
    trainer = Trainer(TINY, initial() + 0.05 * initial().sign(), settings, reference=initial())
    batch = without_gradient(samples())
    distances = [trainer.step(batch)["actor/ppo_kl"] for _ in range(3)]  # from the reference, which sampled
    assert abs(distances[-1]) < abs(distances[0])


def test_metrics_report_the_distance_to_the_behaviour_policy() -> None:
    fresh = Trainer(TINY, initial(), SETTINGS)
    near = fresh.step(samples())
    assert near["off_policy/ess"] == pytest.approx(1.0, abs=1e-4)
    assert near["off_policy/frac_masked"] == near["off_policy/frac_truncated"] == 0.0
    masks = Correction(token="icepop", icepop_low=0.9, icepop_high=1.1)
    far = Trainer(TINY, initial(), replace(SETTINGS, correction=masks)).step(stale(samples()))
    assert far["off_policy/ess"] < 0.99
    assert far["off_policy/kl_k3"] > 1e-3
    assert 0.0 < far["off_policy/frac_masked"] < 1.0


def test_metrics_report_that_distance_by_staleness() -> None:
    batch = [*samples()[:2], *(replace(s, staleness=2) for s in stale(samples())[2:])]
    metrics = Trainer(TINY, initial(), SETTINGS).step(batch)
    by_staleness = {key: kl for key, kl in metrics.items() if key.startswith(KL_BY_STALENESS)}
    assert by_staleness.keys() == {f"{KL_BY_STALENESS}0", f"{KL_BY_STALENESS}2"}
    assert by_staleness[f"{KL_BY_STALENESS}0"] < 1e-6
    assert by_staleness[f"{KL_BY_STALENESS}2"] > metrics["off_policy/kl_k3"] > 1e-3


def paired(num_groups: int) -> list[Sample]:
    """Groups of three with a pair each, except for every fourth; in every second pair the worst is first."""
    advantages = [(1.0, 0.0, -1.0), (-1.0, 1.0, 0.0), (0.0, 1.0, -1.0), (0.0, 0.0, 0.0)]
    batch = stale(samples(3 * num_groups))
    return [replace(s, advantage=advantages[i // 3 % 4][i % 3]) for i, s in enumerate(batch)]


PAIRS = replace(SETTINGS, policy_loss="online_dpo", loss_agg_mode="seq-mean-token-sum", dpo_beta=0.5)


def test_a_streamed_gradient_of_pairs_is_that_of_the_whole_batch() -> None:
    batch = paired(8)
    whole = make_trainer(PAIRS)
    metrics = whole.step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in batch if s.advantage)
    got = first_moment(streamed(replace(PAIRS, micro_batch_tokens=BUDGET), batch, num_early=-1))
    assert relative_gap(got, first_moment(whole)) < 1e-12


def test_the_pair_loss_at_the_reference_is_log_2_for_any_number_of_pairs() -> None:
    """At the reference every margin is 0, and -log sigmoid(0) = log 2."""
    for num_groups in (1, 4, 8):
        metrics = Trainer(TINY, initial(), PAIRS).step(paired(num_groups))
        assert metrics["actor/pg_loss"] == pytest.approx(0.6931472, rel=1e-5)


@pytest.mark.parametrize("observations", [[], [8, 9]], ids=["no tokens", "observations alone"])
def test_a_pair_with_an_empty_response_is_ignored(observations: list[int]) -> None:
    empty = Sample([1], observations, [], 1.0, loss_mask=[0] * len(observations))
    best_is_empty = [empty, Sample([1], [3, 4], [-1.0] * 2, -1.0)]
    worst_is_empty = [Sample([2], [5], [-1.0], 1.0), Sample([2], [], [], -1.0)]
    pair = [Sample([3], [5, 6], [-1.0] * 2, 1.0), Sample([3], [7], [-1.0], -1.0)]
    metrics = make_trainer(PAIRS).step(best_is_empty + worst_is_empty)
    assert metrics["actor/num_tokens"] == metrics["actor/grad_norm"] == 0.0
    expected, got = make_trainer(PAIRS), make_trainer(PAIRS)
    expected.step(pair)
    got.step(best_is_empty + pair + worst_is_empty)
    assert torch.equal(first_moment(got), first_moment(expected))


def test_pair_steps_lower_the_loss() -> None:
    trainer, batch = Trainer(TINY, initial(), replace(PAIRS, lr=1e-3)), paired(8)
    losses = [trainer.step(batch)["actor/pg_loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
