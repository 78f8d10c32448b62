"""Log-probs of whole groups from another worker: equal to the trainer's, and independent of other groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.model.families import CONFIGS, random_weights
from tests.trainer.batches import SETTINGS, TINY, initial, samples
from tests.trainer.test_policy import random_groups

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.packing import TokenIds, pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import Correction
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.trainer import Trainer

COOL = replace(SETTINGS, temperature=0.7, micro_batch_tokens=40)


def group_of(config: ModelConfig) -> list[Sample]:
    return [Sample(p, r, [-1.0] * len(r), 0.0) for p, r in random_groups(num_groups=1)]


def make_logprobs(config: ModelConfig, settings: TrainerSettings, flat: torch.Tensor) -> GroupLogprobs:
    logprobs = GroupLogprobs(config, settings, "cpu")
    logprobs.load_weights(flat)
    return logprobs


@pytest.mark.parametrize("name", CONFIGS)
def test_the_log_probs_of_a_group_are_those_of_each_response_alone(name: str) -> None:
    config = CONFIGS[name]
    flat, group = random_weights(config), group_of(config)
    got = make_logprobs(config, COOL, flat)(group)
    policy = Policy(config, WeightLayout(config).views(flat), temperature=0.7)
    for sample, logprobs in zip(group, got, strict=True):
        alone, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        torch.testing.assert_close(logprobs, alone, rtol=0, atol=2e-5)


def test_an_empty_response_has_no_log_probs() -> None:
    compute = make_logprobs(TINY, SETTINGS, initial())
    results = compute([Sample([1], [], [], 0.0), Sample([1], [2, 3], [-1.0] * 2, 0.0)])
    assert [len(logprobs) for logprobs in results] == [0, 2]
    assert [len(logprobs) for logprobs in compute([Sample([1], [], [], 0.0)])] == [0]


def test_log_probs_follow_the_weights_that_were_loaded_last() -> None:
    compute, group = make_logprobs(TINY, SETTINGS, initial()), samples()
    first = torch.cat(compute(group))
    compute.load_weights(initial() * 1.1)
    assert not torch.equal(torch.cat(compute(group)), first)
    compute.load_weights(initial())
    assert torch.equal(torch.cat(compute(group)), first)


def test_exact_mode_computes_with_the_function_of_the_engine() -> None:
    calls = []

    def exact_logprobs(
        flat: torch.Tensor, prompts: Sequence[TokenIds], answers: Sequence[TokenIds]
    ) -> torch.Tensor:
        calls.append(flat)
        return torch.arange(sum(map(len, answers)), dtype=torch.float32)

    compute, flat = GroupLogprobs(TINY, SETTINGS, "cpu", exact_logprobs), initial()
    compute.load_weights(flat)
    group = [Sample([1], answer, [-1.0] * len(answer), 0.0) for answer in ([2], [], [2, 3])]
    results = compute(group)
    assert [logprobs.tolist() for logprobs in results] == [[0.0], [], [1.0, 2.0]]
    assert calls[0] is flat


def with_reference(batch: list[Sample], flat: torch.Tensor) -> list[Sample]:
    logprobs = make_logprobs(TINY, SETTINGS, flat)(batch)
    return [replace(s, reference_logprobs=x.tolist()) for s, x in zip(batch, logprobs, strict=True)]


def test_reference_log_probs_in_samples_give_the_step_of_a_trainer_that_computes_them() -> None:
    settings = replace(SETTINGS, kl_loss_coef=0.5)
    own = Trainer(TINY, initial() * 1.1, settings, reference=initial())
    given = Trainer(TINY, initial() * 1.1, replace(settings, samples_have_reference=True))
    metrics = own.step(samples()), given.step(with_reference(samples(), initial()))
    torch.testing.assert_close(given.flat, own.flat, rtol=0, atol=1e-5)
    assert metrics[1]["actor/kl_loss"] == pytest.approx(metrics[0]["actor/kl_loss"], rel=1e-4)
    assert metrics[0]["actor/kl_loss"] > 0.0


def test_a_pair_loss_uses_the_reference_log_probs_in_samples() -> None:
    settings = replace(SETTINGS, policy_loss="online_dpo", loss_agg_mode="seq-mean-token-sum")
    pair = [replace(s, advantage=a) for s, a in zip(samples(2), (1.0, -1.0), strict=True)]
    own = Trainer(TINY, initial() * 1.1, settings, reference=initial())
    given = Trainer(TINY, initial() * 1.1, replace(settings, samples_have_reference=True))
    own.step(pair)
    given.step(with_reference(pair, initial()))
    torch.testing.assert_close(given.flat, own.flat, rtol=0, atol=1e-5)


def test_proximal_log_probs_in_samples_are_not_computed_again() -> None:
    """Three updates, of which the later ones use the policy before the first one."""
    correction = Correction("recomputed", "tis")
    total = sum(len(s.token_ids) for s in samples())
    settings = replace(SETTINGS, correction=correction, mini_batch_tokens=total // 3)
    logprobs = make_logprobs(TINY, SETTINGS, initial())(samples())
    batch = [replace(s, proximal_logprobs=x.tolist()) for s, x in zip(samples(), logprobs, strict=True)]
    own, given = (Trainer(TINY, initial(), settings) for _ in range(2))
    own.step(samples())
    metrics = given.step(batch)
    torch.testing.assert_close(given.flat, own.flat, rtol=0, atol=1e-4)
    assert metrics["actor/num_updates"] == 3
    shifted = [replace(s, proximal_logprobs=[x - 1.0 for x in s.proximal_logprobs or ()]) for s in batch]
    other = Trainer(TINY, initial(), settings)
    other.step(shifted)
    assert not torch.allclose(other.flat, own.flat, atol=1e-3)
