"""Log-probs of whole groups by somebody else than the trainer: as its own, and the same in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.model.families import CONFIGS, drawn_weights
from tests.trainer.test_policy import drawn
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.packing import Tokens, pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import Correction
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.trainer import Trainer

COOL = replace(SETTINGS, temperature=0.7, micro_batch_tokens=40)


def group_of(config: ModelConfig) -> list[Sample]:
    return [Sample(p, r, [-1.0] * len(r), 0.0) for p, r in drawn(num_groups=1)]


def onlooker(config: ModelConfig, settings: TrainerSettings, flat: torch.Tensor) -> GroupLogprobs:
    made = GroupLogprobs(config, settings, "cpu")
    made.use(flat)
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_a_groups_log_probs_are_those_of_each_answer_alone(name: str) -> None:
    config = CONFIGS[name]
    flat, group = drawn_weights(config), group_of(config)
    found = onlooker(config, COOL, flat)(group)
    policy = Policy(config, Layout(config).views(flat), temperature=0.7)
    for sample, logprobs in zip(group, found, strict=True):
        alone, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        torch.testing.assert_close(logprobs, alone, rtol=0, atol=2e-5)


def test_an_empty_answer_has_none() -> None:
    one = onlooker(TINY, SETTINGS, initial())
    found = one([Sample([1], [], [], 0.0), Sample([1], [2, 3], [-1.0] * 2, 0.0)])
    assert [len(own) for own in found] == [0, 2]
    assert [len(own) for own in one([Sample([1], [], [], 0.0)])] == [0]


def test_other_weights_give_other_log_probs_and_the_old_ones_come_back() -> None:
    one, group = onlooker(TINY, SETTINGS, initial()), samples()
    first = torch.cat(one(group))
    one.use(initial() * 1.1)
    assert not torch.equal(torch.cat(one(group)), first)
    one.use(initial())
    assert torch.equal(torch.cat(one(group)), first)


def test_in_exact_mode_the_engines_own_steps_are_asked() -> None:
    asked = []

    def score(flat: torch.Tensor, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> torch.Tensor:
        asked.append(flat)
        return torch.arange(sum(map(len, answers)), dtype=torch.float32)

    one, flat = GroupLogprobs(TINY, SETTINGS, "cpu", score), initial()
    one.use(flat)
    group = [Sample([1], answer, [-1.0] * len(answer), 0.0) for answer in ([2], [], [2, 3])]
    found = one(group)
    assert [own.tolist() for own in found] == [[0.0], [], [1.0, 2.0]]
    assert asked[0] is flat


def told_reference(batch: list[Sample], flat: torch.Tensor) -> list[Sample]:
    found = onlooker(TINY, SETTINGS, flat)(batch)
    return [replace(s, reference=own.tolist()) for s, own in zip(batch, found, strict=True)]


def test_a_trainer_that_is_told_the_reference_steps_as_one_that_computes_it() -> None:
    settings = replace(SETTINGS, kl_loss_coef=0.5)
    own = Trainer(TINY, initial() * 1.1, settings, reference=initial())
    told = Trainer(TINY, initial() * 1.1, replace(settings, is_told_reference=True))
    metrics = own.step(samples()), told.step(told_reference(samples(), initial()))
    torch.testing.assert_close(told.flat, own.flat, rtol=0, atol=1e-5)
    assert metrics[1]["actor/kl_loss"] == pytest.approx(metrics[0]["actor/kl_loss"], rel=1e-4)
    assert metrics[0]["actor/kl_loss"] > 0.0


def test_pairs_are_compared_with_the_reference_that_was_told() -> None:
    settings = replace(SETTINGS, policy_loss="online_dpo", loss_agg_mode="seq-mean-token-sum")
    pair = [replace(s, advantage=a) for s, a in zip(samples(2), (1.0, -1.0), strict=True)]
    own = Trainer(TINY, initial() * 1.1, settings, reference=initial())
    told = Trainer(TINY, initial() * 1.1, replace(settings, is_told_reference=True))
    own.step(pair)
    told.step(told_reference(pair, initial()))
    torch.testing.assert_close(told.flat, own.flat, rtol=0, atol=1e-5)


def test_log_probs_before_a_step_that_were_told_are_not_computed_again() -> None:
    """Three updates: the later ones compare with the policy before the first one."""
    correction = Correction("recomputed", "tis")
    total = sum(len(s.token_ids) for s in samples())
    settings = replace(SETTINGS, correction=correction, batch_tokens=total // 3)
    found = onlooker(TINY, SETTINGS, initial())(samples())
    batch = [replace(s, proximal=own.tolist()) for s, own in zip(samples(), found, strict=True)]
    own, told = (Trainer(TINY, initial(), settings) for _ in range(2))
    own.step(samples())
    metrics = told.step(batch)
    torch.testing.assert_close(told.flat, own.flat, rtol=0, atol=1e-4)
    assert metrics["actor/num_updates"] == 3
    shifted = [replace(s, proximal=[x - 1.0 for x in s.proximal or ()]) for s in batch]
    other = Trainer(TINY, initial(), settings)
    other.step(shifted)
    assert not torch.allclose(other.flat, own.flat, atol=1e-3)
