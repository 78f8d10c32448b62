"""A fixed token budget per update: a batch is used up in several updates, or the step has not been."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.trainer.test_streaming import stale
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples

from dora.errors import RunError
from dora.model.weights import Layout
from dora.trainer.learner import Alone
from dora.trainer.loss import clipped_loss
from dora.trainer.optimizer import FlatAdamW
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import Correction
from dora.trainer.tally import Tally
from dora.trainer.trainer import Sample, Trainer
from dora.trainer.updates import undone_if_failed, updates


def num_tokens(batch: list[Sample]) -> list[int]:
    return [len(s.token_ids) for s in batch]


def assert_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Changed alike; Adam makes much of the last bit where a gradient is almost 0."""
    assert float((got - expected).norm() / (expected - initial()).norm()) < 1e-3


BATCH = stale(samples(12))
BUDGET = sum(num_tokens(BATCH)) // 3
DIVIDED = replace(SETTINGS, batch_tokens=BUDGET)


def test_a_batch_is_divided_into_updates_of_nearly_as_many_tokens() -> None:
    lengths = [10, 1, 7, 4, 8]
    parts = updates(lengths, budget=10)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [9, 10, 11]
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lengths", "budget", "num"),
    [([6] * 5, 20, 2), ([6] * 5, 21, 1), ([6] * 5, 12, 3), ([6] * 5, 90, 1), ([30], 10, 1), ([], 10, 1)],
)
def test_there_are_as_many_updates_as_the_tokens_come_nearest_to(
    lengths: list[int], budget: int, num: int
) -> None:
    parts = updates(lengths, budget)
    assert len(parts) == num
    assert sorted(i for part in parts for i in part) == [*range(len(lengths))]


def test_without_a_budget_there_is_one_update() -> None:
    assert updates([3, 9], None) == [[0, 1]]


def test_every_token_of_every_update_weighs_one_over_the_budget() -> None:
    """Against updates by hand: the ratio is to the policy that sampled, in the later ones too."""
    flat = initial()
    optimizer = FlatAdamW(Layout(TINY), flat, 0.0, SETTINGS.betas)
    policy = Policy(TINY, optimizer.weights)
    parts = updates(num_tokens(BATCH), BUDGET)
    assert len(parts) == 3
    for part in parts:
        for sample in (BATCH[i] for i in part):
            logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
            advantages = torch.tensor(sample.advantages)
            losses, _ = clipped_loss(logprobs, torch.tensor(sample.logprobs), advantages, 0.2, 0.2)
            torch.autograd.backward(losses.sum() / BUDGET)
        optimizer.step(1e-2, 1e9)
    trained = Trainer(TINY, initial(), DIVIDED)
    metrics = trained.step(BATCH)
    assert_alike(trained.flat, flat)
    assert metrics["actor/num_updates"] == 3


def test_the_learning_rate_counts_versions_and_not_updates() -> None:
    trainer = Trainer(TINY, initial(), replace(DIVIDED, warmup_steps=3))
    assert [trainer.step(BATCH)["actor/lr"] for _ in range(3)] == pytest.approx([2.5e-3, 5e-3, 7.5e-3])


def test_only_the_first_update_has_the_weights_that_engines_had() -> None:
    fresh = samples(12)
    metrics = Trainer(TINY, initial(), DIVIDED).step(fresh)
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    first = [fresh[i] for i in updates(num_tokens(fresh), BUDGET)[0]]
    assert metrics["mismatch/num_tokens"] == sum(num_tokens([s for s in first if s.advantage]))
    assert metrics["off_policy/kl_k3"] < 1e-6  # what is due to age, not to the updates before
    assert abs(metrics["actor/ppo_kl"]) > 1e-3


def test_the_proximal_policy_is_the_one_before_the_first_update() -> None:
    """So the weight of tis does not move during the step, and the clip range bounds what does."""
    correction = Correction(proximal="recomputed", token="tis", tis_cap=1e9)
    narrow = replace(DIVIDED, correction=correction, clip_ratio_low=1e-4, clip_ratio_high=1e-4)
    one_update = Trainer(TINY, initial(), replace(narrow, batch_tokens=None)).step(BATCH)
    assert one_update["actor/pg_clipfrac"] == 0.0
    assert Trainer(TINY, initial(), narrow).step(BATCH)["actor/pg_clipfrac"] > 0.2
    # Whatever the proximal policy is, weight * ratio = current / behaviour.
    plain = Trainer(TINY, initial(), replace(DIVIDED, policy_loss="reinforce"))
    plain.step(BATCH)
    decoupled = Trainer(TINY, initial(), replace(DIVIDED, policy_loss="reinforce", correction=correction))
    decoupled.step(BATCH)
    assert_alike(decoupled.flat, plain.flat)


def test_an_update_that_fails_takes_back_those_before_it() -> None:
    first = updates(num_tokens(BATCH), BUDGET)[0]
    broken = [s if i in first else replace(s, advantage=float("nan")) for i, s in enumerate(BATCH)]
    trainer = Trainer(TINY, initial(), DIVIDED)
    trainer.step(BATCH)
    before = trainer.flat.clone()
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step(broken)
    assert torch.equal(trainer.flat, before)
    trainer.step(BATCH)
    unharmed = Trainer(TINY, initial(), DIVIDED)
    unharmed.step(BATCH)
    unharmed.step(BATCH)
    assert torch.equal(trainer.flat, unharmed.flat)


def test_nothing_is_taken_back_where_nothing_fails() -> None:
    alone = Alone(TINY, initial(), SETTINGS, None, None)
    with undone_if_failed(alone):
        alone.add([BATCH], Tally())
        alone.step(1.0, 1e-2, 1e9)
    assert not torch.equal(alone.flat, initial())
