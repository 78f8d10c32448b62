"""A batch that comes piece by piece gives the gradient of the whole, for every loss and every average."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples

from dora.errors import RunError
from dora.trainer.corrections import KL_BY_AGE
from dora.trainer.loss import KLEstimator, LossAggMode
from dora.trainer.objective import OBJECTIVES
from dora.trainer.recipe import Correction, PolicyLoss
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

GROUP_SIZE = 3
BUDGET = 60  # tokens; several micro-batches
LOSSES = [loss for loss in OBJECTIVES if loss != "online_dpo"]
WITH_TERMS = replace(
    SETTINGS,
    micro_batch_tokens=BUDGET,
    loss_scale_factor=20,
    kl_loss_coef=0.1,
    entropy_coeff=0.01,
    correction=Correction(proximal="interpolated", token="icepop", sequence="mis", age_decay=0.8),
)


def stale(batch: list[Sample]) -> list[Sample]:
    """Samples of the policies before, so that ratios are not all 1."""
    shifts = [0.3, -0.2, 0.0, 0.1]
    return [
        replace(s, logprobs=[x + shifts[(i + k) % 4] for k, x in enumerate(s.logprobs)], staleness=i % 3)
        for i, s in enumerate(batch)
    ]


def moment(trainer: Trainer) -> torch.Tensor:
    """Adam's first moment after one step: the gradient, scaled."""
    found: torch.Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return found


def make(settings: TrainerSettings) -> Trainer:
    """In double precision, so that what is equal is seen to be."""
    return Trainer(TINY, initial().double() + 0.01, settings, reference=initial().double())


def streamed(settings: TrainerSettings, batch: list[Sample], num_worked: int) -> Trainer:
    """Put group by group, and worked on up to so many micro-batches before the batch is complete."""
    trainer = make(settings)
    for i in range(0, len(batch), GROUP_SIZE):
        trainer.put(batch[i : i + GROUP_SIZE])
        while trainer.can_work and num_worked:
            trainer.work()
            num_worked -= 1
    trainer.finish()
    return trainer


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_streamed_gradient_is_that_of_the_whole_batch(loss: PolicyLoss, mode: LossAggMode) -> None:
    settings = replace(WITH_TERMS, policy_loss=loss, loss_agg_mode=mode)
    batch = stale(samples(24))
    whole = make(replace(settings, micro_batch_tokens=10_000))
    whole.step(batch)
    got = moment(streamed(settings, batch, num_worked=-1))
    assert float((got - moment(whole)).norm() / moment(whole).norm()) < 1e-12


def test_how_much_was_early_does_not_change_a_single_bit() -> None:
    batch = stale(samples(24))
    late = streamed(WITH_TERMS, batch, num_worked=0)
    for num_worked in (1, 3, -1):
        early = streamed(WITH_TERMS, batch, num_worked)
        assert torch.equal(early.flat, late.flat)


def test_metrics_of_a_streamed_step_are_those_of_the_whole() -> None:
    batch = stale(samples(24))
    expected = make(replace(WITH_TERMS, micro_batch_tokens=10_000)).step(batch)
    trainer = make(WITH_TERMS)
    for i in range(0, 24, GROUP_SIZE):
        trainer.put(batch[i : i + GROUP_SIZE])
    while trainer.can_work:
        trainer.work()
    assert 0 < trainer.num_accumulated < expected["actor/num_tokens"]
    assert trainer.finish() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_what_was_put_can_be_forgotten() -> None:
    batch = stale(samples(24))
    trainer = make(WITH_TERMS)
    trainer.put(batch)
    trainer.work()
    trainer.forget()
    assert trainer.num_accumulated == 0
    trainer.step(batch)
    fresh = make(WITH_TERMS)
    fresh.step(batch)
    assert torch.equal(trainer.flat, fresh.flat)


def test_a_step_after_one_that_failed_is_as_if_nothing_had_been() -> None:
    trainer, fresh = make(SETTINGS), make(SETTINGS)
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step([replace(s, advantage=float("nan")) for s in samples()])
    trainer.step(samples())
    fresh.step(samples())
    assert torch.equal(trainer.flat, fresh.flat)


def test_an_entropy_bonus_makes_answers_less_certain() -> None:
    trainer = make(replace(SETTINGS, entropy_coeff=1.0))
    batch = [replace(s, advantage=0.0) for s in samples()]
    before = trainer.step(batch)["actor/entropy"]
    for _ in range(2):
        after = trainer.step(batch)["actor/entropy"]
    assert after > before


@pytest.mark.parametrize("estimator", [kind for kind in get_args(KLEstimator) if kind != "k1"])
def test_every_estimate_of_the_kl_but_k1_pulls_back_to_the_reference(estimator: KLEstimator) -> None:
    settings = replace(SETTINGS, lr=1e-3, kl_loss_coef=1.0, kl_loss_type=estimator)
    trainer = Trainer(TINY, initial() + 0.05 * initial().sign(), settings, reference=initial())
    batch = [replace(s, advantage=0.0) for s in samples()]
    distances = [trainer.step(batch)["actor/ppo_kl"] for _ in range(3)]  # from the reference, by its samples
    assert abs(distances[-1]) < abs(distances[0])


def test_metrics_tell_how_far_the_policy_is_from_the_one_that_sampled() -> None:
    fresh = Trainer(TINY, initial(), SETTINGS)
    near = fresh.step(samples())
    assert near["off_policy/ess"] == pytest.approx(1.0, abs=1e-4)
    assert near["off_policy/frac_masked"] == near["off_policy/frac_truncated"] == 0.0
    masks = Correction(token="icepop", icepop_low=0.9, icepop_high=1.1)
    far = Trainer(TINY, initial(), replace(SETTINGS, correction=masks)).step(stale(samples()))
    assert far["off_policy/ess"] < 0.99
    assert far["off_policy/kl_k3"] > 1e-3
    assert 0.0 < far["off_policy/frac_masked"] < 1.0


def test_metrics_tell_the_same_of_the_samples_of_each_age() -> None:
    batch = [*samples()[:2], *(replace(s, staleness=2) for s in stale(samples())[2:])]
    told = Trainer(TINY, initial(), SETTINGS).step(batch)
    by_age = {key: kl for key, kl in told.items() if key.startswith(KL_BY_AGE)}
    assert by_age.keys() == {f"{KL_BY_AGE}0", f"{KL_BY_AGE}2"}
    assert by_age[f"{KL_BY_AGE}0"] < 1e-6
    assert by_age[f"{KL_BY_AGE}2"] > told["off_policy/kl_k3"] > 1e-3


def paired(num_groups: int) -> list[Sample]:
    """Groups of three with a pair each, the worst answer first in every other; one of four has none."""
    advantages = [(1.0, 0.0, -1.0), (-1.0, 1.0, 0.0), (0.0, 1.0, -1.0), (0.0, 0.0, 0.0)]
    batch = stale(samples(3 * num_groups))
    return [replace(s, advantage=advantages[i // 3 % 4][i % 3]) for i, s in enumerate(batch)]


PAIRS = replace(SETTINGS, policy_loss="online_dpo", loss_agg_mode="seq-mean-token-sum", dpo_beta=0.5)


def test_a_streamed_gradient_of_pairs_is_that_of_the_whole_batch() -> None:
    batch = paired(8)
    whole = make(PAIRS)
    metrics = whole.step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in batch if s.advantage)
    got = moment(streamed(replace(PAIRS, micro_batch_tokens=BUDGET), batch, num_worked=-1))
    assert float((got - moment(whole)).norm() / moment(whole).norm()) < 1e-12


def test_pairs_are_averaged_over_pairs_and_begin_undecided() -> None:
    """At the reference every margin is 0, and -log sigmoid(0) = log 2, however many groups there are."""
    for num_groups in (1, 4, 8):
        metrics = Trainer(TINY, initial(), PAIRS).step(paired(num_groups))
        assert metrics["actor/pg_loss"] == pytest.approx(0.6931472, rel=1e-5)


def test_a_pair_with_an_empty_answer_teaches_nothing_and_mixes_no_groups() -> None:
    best_is_empty = [Sample([1], [], [], 1.0), Sample([1], [3, 4], [-1.0] * 2, -1.0)]
    worst_is_empty = [Sample([2], [5], [-1.0], 1.0), Sample([2], [], [], -1.0)]
    pair = [Sample([3], [5, 6], [-1.0] * 2, 1.0), Sample([3], [7], [-1.0], -1.0)]
    metrics = make(PAIRS).step(best_is_empty + worst_is_empty)
    assert metrics["actor/num_tokens"] == metrics["actor/grad_norm"] == 0.0
    expected, got = make(PAIRS), make(PAIRS)
    expected.step(pair)
    got.step(best_is_empty + pair + worst_is_empty)
    assert torch.equal(moment(got), moment(expected))


def test_pairs_are_put_into_their_order() -> None:
    trainer, batch = Trainer(TINY, initial(), replace(PAIRS, lr=1e-3)), paired(8)
    losses = [trainer.step(batch)["actor/pg_loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
