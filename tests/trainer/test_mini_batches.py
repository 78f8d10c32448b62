"""Several updates per step, with a token budget each; a failure rolls the whole step back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.trainer.batches import SETTINGS, TINY, initial, samples, stale

from dora.errors import RunError
from dora.model.weights import WeightLayout
from dora.trainer.learner import LocalLearner
from dora.trainer.loss import LossInputs, LossSettings, clipped_loss
from dora.trainer.metrics import StepMetrics
from dora.trainer.optimizer import FlatAdamW, rollback_on_error
from dora.trainer.packing import pack, split_mini_batches
from dora.trainer.policy import Policy
from dora.trainer.recipe import Correction
from dora.trainer.trainer import Sample, Trainer


def num_tokens(batch: list[Sample]) -> list[int]:
    return [len(s.token_ids) for s in batch]


def assert_similar_change(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The changes agree; Adam amplifies rounding of gradients near 0."""
    assert float((got - expected).norm() / (expected - initial()).norm()) < 1e-3


BATCH = stale(samples(12))
BUDGET = sum(num_tokens(BATCH)) // 3
SEVERAL_UPDATES = replace(SETTINGS, mini_batch_tokens=BUDGET)


def test_a_batch_is_split_into_mini_batches_of_nearly_equal_tokens() -> None:
    lengths = [10, 1, 7, 4, 8]
    parts = split_mini_batches(lengths, token_budget=10)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [9, 10, 11]
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lengths", "budget", "num"),
    [([6] * 5, 20, 2), ([6] * 5, 21, 1), ([6] * 5, 12, 3), ([6] * 5, 90, 1), ([30], 10, 1), ([], 10, 1)],
)
def test_the_number_of_mini_batches_is_the_nearest_to_tokens_over_budget(
    lengths: list[int], budget: int, num: int
) -> None:
    parts = split_mini_batches(lengths, budget)
    assert len(parts) == num
    assert sorted(i for part in parts for i in part) == [*range(len(lengths))]


def test_without_a_budget_there_is_one_update() -> None:
    assert split_mini_batches([3, 9], None) == [[0, 1]]


def test_every_token_of_every_update_has_weight_one_over_the_budget() -> None:
    """Compared with updates by hand, whose ratios are to the behaviour policy throughout."""
    flat = initial()
    optimizer = FlatAdamW(WeightLayout(TINY), flat, 0.0, SETTINGS.betas)
    policy = Policy(TINY, optimizer.weights)
    parts = split_mini_batches(num_tokens(BATCH), BUDGET)
    assert len(parts) == 3
    for part in parts:
        for sample in (BATCH[i] for i in part):
            logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
            advantages = torch.tensor(sample.advantages)
            old = torch.tensor(sample.logprobs)
            losses, _ = clipped_loss(LossInputs(logprobs, old, advantages, [len(old)]), LossSettings())
            torch.autograd.backward(losses.sum() / BUDGET)
        optimizer.step(1e-2, 1e9)
    trained = Trainer(TINY, initial(), SEVERAL_UPDATES)
    metrics = trained.step(BATCH)
    assert_similar_change(trained.flat, flat)
    assert metrics["actor/num_updates"] == 3


def test_a_batch_without_samples_is_one_update_without_gradient() -> None:
    flat = initial()
    metrics = Trainer(TINY, flat, SEVERAL_UPDATES).step([])
    assert (metrics["actor/num_updates"], metrics["actor/grad_norm"]) == (1, 0)
    assert torch.equal(flat, initial())


def test_the_learning_rate_depends_on_steps_and_not_on_updates() -> None:
    trainer = Trainer(TINY, initial(), replace(SEVERAL_UPDATES, warmup_steps=3))
    assert [trainer.step(BATCH)["actor/lr"] for _ in range(3)] == pytest.approx([2.5e-3, 5e-3, 7.5e-3])


def test_mismatch_and_staleness_metrics_cover_the_first_update_alone() -> None:
    fresh = samples(12)
    metrics = Trainer(TINY, initial(), SEVERAL_UPDATES).step(fresh)
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    first = [fresh[i] for i in split_mini_batches(num_tokens(fresh), BUDGET)[0]]
    assert metrics["mismatch/num_tokens"] == sum(num_tokens([s for s in first if s.advantage]))
    assert metrics["off_policy/kl_k3"] < 1e-6  # the distance by staleness, not by earlier updates
    assert abs(metrics["actor/ppo_kl"]) > 1e-3


def test_the_proximal_policy_is_the_one_before_the_first_update() -> None:
    """So the weight of tis is fixed during the step, and the clip range bounds the rest of the ratio."""
    correction = Correction(proximal="recomputed", token="tis", tis_cap=1e9)
    narrow = replace(SEVERAL_UPDATES, correction=correction, clip_ratio_low=1e-4, clip_ratio_high=1e-4)
    one_update = Trainer(TINY, initial(), replace(narrow, mini_batch_tokens=None)).step(BATCH)
    assert one_update["actor/pg_clipfrac"] == 0.0
    assert Trainer(TINY, initial(), narrow).step(BATCH)["actor/pg_clipfrac"] > 0.2
    # For any proximal policy, weight * ratio = current / behaviour.
    plain = Trainer(TINY, initial(), replace(SEVERAL_UPDATES, policy_loss="reinforce"))
    plain.step(BATCH)
    decoupled = Trainer(
        TINY, initial(), replace(SEVERAL_UPDATES, policy_loss="reinforce", correction=correction)
    )
    decoupled.step(BATCH)
    assert_similar_change(decoupled.flat, plain.flat)


def test_a_failed_update_rolls_back_the_earlier_ones() -> None:
    first = split_mini_batches(num_tokens(BATCH), BUDGET)[0]
    broken = [s if i in first else replace(s, advantage=float("nan")) for i, s in enumerate(BATCH)]
    trainer = Trainer(TINY, initial(), SEVERAL_UPDATES)
    trainer.step(BATCH)
    before = trainer.flat.clone()
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step(broken)
    assert torch.equal(trainer.flat, before)
    trainer.step(BATCH)
    reference = Trainer(TINY, initial(), SEVERAL_UPDATES)
    reference.step(BATCH)
    reference.step(BATCH)
    assert torch.equal(trainer.flat, reference.flat)


def test_nothing_is_rolled_back_without_a_failure() -> None:
    learner = LocalLearner(TINY, initial(), SETTINGS, None, None)
    with rollback_on_error(learner.snapshot):
        learner.accumulate([BATCH], StepMetrics())
        learner.step(1.0, 1e-2, 1e9)
    assert not torch.equal(learner.flat, initial())
