"""One training step: gradient, metrics, mismatch, KL term and failures."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.trainer.batches import (
    CPU,
    SETTINGS,
    TINY,
    gradient,
    initial,
    relative_gap,
    samples,
    without_gradient,
)

from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.metrics import ages_to_check
from dora.trainer.packing import TokenIds, pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import LossAggMode
from dora.trainer.trainer import Sample, Trainer


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_accumulate_to_the_whole_batch_gradient(mode: LossAggMode) -> None:
    whole = replace(SETTINGS, loss_agg_mode=mode, micro_batch_tokens=10_000)
    expected = gradient(samples(), whole)
    got = gradient(samples(), replace(whole, micro_batch_tokens=30))
    assert relative_gap(got, expected) < 1e-12


def test_the_gradient_of_a_batch_is_the_textbook_policy_gradient() -> None:
    batch = samples()
    flat = initial().requires_grad_()
    policy = Policy(TINY, WeightLayout(TINY).views(flat))
    total = torch.zeros(())
    for sample in batch:
        logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        total = total - (torch.tensor(sample.advantages) * logprobs).sum()
    torch.autograd.backward(total / sum(len(s.token_ids) for s in batch))
    assert flat.grad is not None
    torch.testing.assert_close(gradient(batch, SETTINGS).float(), flat.grad, rtol=1e-4, atol=1e-6)


def with_environment_tokens(sample: Sample) -> Sample:
    """The same response with three tokens of an environment in its middle."""
    at, inserted = len(sample.token_ids) // 2, [1, 2, 3]
    token_ids = [*sample.token_ids[:at], *inserted, *sample.token_ids[at:]]
    mask = [1] * at + [0] * len(inserted) + [1] * (len(sample.token_ids) - at)
    return replace(sample, token_ids=token_ids, loss_mask=mask)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_environment_tokens_are_context_and_neither_trained_on_nor_counted(mode: LossAggMode) -> None:
    batch = [with_environment_tokens(sample) for sample in samples()]
    flat = initial().requires_grad_()
    policy, total = Policy(TINY, WeightLayout(TINY).views(flat)), torch.zeros(())
    for sample in batch:
        mask = torch.tensor(sample.loss_mask) > 0
        logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        old, num_loss_tokens = torch.tensor(sample.logprobs), int(mask.sum())
        ratio = (logprobs[mask] - old).exp().clamp(0.8, 1.2)
        losses = torch.maximum(
            -sample.advantages[0] * (logprobs[mask] - old).exp(), -sample.advantages[0] * ratio
        )
        weight = {
            "token-mean": 1 / sum(s.num_loss_tokens for s in batch),
            "seq-mean-token-sum": 1 / len(batch),
        }
        total = total + losses.sum() * weight.get(mode, 1 / len(batch) / num_loss_tokens)
    torch.autograd.backward(total)
    settings = replace(SETTINGS, loss_agg_mode=mode, clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert flat.grad is not None
    torch.testing.assert_close(gradient(batch, settings).float(), flat.grad, rtol=1e-4, atol=1e-6)
    metrics = Trainer(TINY, initial(), settings).step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in samples() if s.has_advantage)


def test_a_sample_of_advantage_zero_counts_in_the_denominators_alone() -> None:
    batch = samples()
    kept = [s for s in batch if s.has_advantage]
    fraction = sum(len(s.token_ids) for s in kept) / sum(len(s.token_ids) for s in batch)
    torch.testing.assert_close(gradient(batch, SETTINGS), gradient(kept, SETTINGS) * fraction)
    metrics = Trainer(TINY, initial(), SETTINGS).step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in kept)


def test_a_step_updates_the_given_flat_buffer() -> None:
    flat = initial()
    trainer = Trainer(TINY, flat, SETTINGS)
    trainer.step(samples())
    assert trainer.flat is flat
    assert not torch.equal(flat, initial())


def test_on_policy_log_probs_equal_the_behaviours() -> None:
    metrics = Trainer(TINY, initial(), SETTINGS).step(samples())
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_stale_samples_are_compared_under_the_weights_that_sampled_them() -> None:
    versions = {-1: initial()}
    trainer = Trainer(TINY, initial() * 1.5, SETTINGS, find_version=versions.get)
    metrics = trainer.step([replace(s, staleness=1) for s in samples()])
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert abs(metrics["mismatch/kl"]) < 1e-6
    assert abs(metrics["actor/ppo_kl"]) > 1e-3


def test_stale_samples_of_unavailable_versions_are_not_compared() -> None:
    metrics = Trainer(TINY, initial(), SETTINGS).step([replace(s, staleness=1) for s in samples()])
    assert "mismatch/logprob_abs_diff_max" not in metrics


def test_stale_samples_of_a_version_are_compared_together() -> None:
    old, requested, computed = {-1: initial(), -2: initial()}, list[int](), list[int]()
    batch = [replace(s, staleness=1 + i // 66) for i, s in enumerate(samples(132))]

    def find_version(version: int) -> torch.Tensor:
        requested.append(version)
        return old[version]

    def exact_logprobs(
        flat: torch.Tensor, prompts: Sequence[TokenIds], responses: Sequence[TokenIds]
    ) -> torch.Tensor:
        if any(flat is one for one in old.values()):
            computed.append(len(prompts))
        return torch.zeros(sum(map(len, responses)))

    trainer = Trainer(TINY, initial(), SETTINGS, exact_logprobs=exact_logprobs, find_version=find_version)
    metrics = trainer.step(batch)
    assert len(requested) == len({*requested}) == len(computed)
    assert sum(computed) >= 4
    assert 0 < metrics["mismatch/num_tokens"] <= metrics["actor/num_tokens"] / 16


def test_a_failed_comparison_does_not_fail_the_step_and_warns_once() -> None:
    def find_version(version: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    batch = [replace(s, staleness=1) for s in samples()]
    trainer, other = (
        Trainer(TINY, initial(), SETTINGS, find_version=find) for find in (find_version, lambda _: None)
    )
    with pytest.warns(
        RuntimeWarning, match=r"mismatch/\* leaves out stale samples: OutOfMemoryError: no room"
    ):
        assert trainer.step(batch) == other.step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(batch)
    other.step(batch)
    assert torch.equal(trainer.flat, other.flat)


def test_older_weights_are_compared_in_a_few_steps_on_a_gpu() -> None:
    steps = {
        device: {step: ages for step in range(20) if (ages := ages_to_check({2, 1}, step, device))}
        for device in ("cpu", "cuda")
    }
    assert steps == {"cpu": {step: [1, 2] for step in range(20)}, "cuda": {1: [2], 9: [2], 17: [2]}}
    assert ages_to_check(set(), 1, "cuda") == []


def test_a_batch_without_gradient_has_a_mismatch_too() -> None:
    trainer = Trainer(TINY, initial(), SETTINGS, find_version=lambda version: initial())
    metrics = trainer.step(without_gradient(samples()))
    assert metrics["actor/grad_norm"] == 0.0
    assert "actor/entropy" not in metrics
    assert metrics["mismatch/num_tokens"] >= 1
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5


def test_temperature_divides_the_logits() -> None:
    views = WeightLayout(TINY).views(initial())
    batch = pack([[1, 2]], [[3]], CPU)
    warm, _ = Policy(TINY, views, temperature=2.0).logprobs(batch)
    views = dict(views) | {"lm_head.weight": views["model.embed_tokens.weight"] / 2.0}
    halved, _ = Policy(TINY, views).logprobs(batch)
    torch.testing.assert_close(warm, halved)


def test_the_kl_term_pulls_the_policy_to_the_reference() -> None:
    flat = initial()
    settings = replace(SETTINGS, lr=1e-3, kl_loss_coef=1.0)
    noise = 0.05 * initial_weights(TINY, seed=1, std=1.0)
    trainer = Trainer(TINY, flat + noise, settings, reference=flat)
    batch = without_gradient(samples())
    before = trainer.step(batch)["actor/kl_loss"]
    for _ in range(3):
        after = trainer.step(batch)["actor/kl_loss"]
    assert 0.0 < after < before
