"""Forward and backward in bf16; weights, gradients and moments in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.trainer.batches import SETTINGS, TINY, first_moment, initial, samples
from torch.nn.functional import cosine_similarity

from dora.trainer.trainer import Trainer

BF16 = replace(SETTINGS, dtype="bfloat16")


def test_a_gradient_in_bf16_has_the_direction_of_that_in_fp32() -> None:
    settings = [replace(s, policy_loss="reinforce", clip_ratio_low=1.0) for s in (SETTINGS, BF16)]
    trainers = [Trainer(TINY, initial() / 4, own) for own in settings]
    batch = [replace(s, logprobs=[-2.4] * len(s.token_ids)) for s in samples()]
    metrics = [trainer.step(batch) for trainer in trainers]
    assert float(cosine_similarity(first_moment(trainers[0]), first_moment(trainers[1]), dim=0)) > 0.999
    assert metrics[0]["actor/grad_norm"] == pytest.approx(metrics[1]["actor/grad_norm"], rel=0.02)
    assert metrics[0]["actor/ppo_kl"] != metrics[1]["actor/ppo_kl"]


def test_gradients_of_many_micro_batches_are_summed_in_fp32() -> None:
    """In bf16 a sum stops growing at 256 times the addend."""
    one = replace(samples()[1], advantage=1.0)
    settings = replace(BF16, loss_agg_mode="seq-mean-token-sum", micro_batch_tokens=1)
    single, many = Trainer(TINY, initial() / 4, settings), Trainer(TINY, initial() / 4, settings)
    single.step([one])
    many.step([one] * 400)
    torch.testing.assert_close(first_moment(many), first_moment(single), rtol=1e-4, atol=1e-9)


def test_updates_too_small_for_bf16_add_up() -> None:
    flat = initial()
    trainer = Trainer(TINY, flat, replace(BF16, lr=1e-6, lr_decay="constant"))
    trainer.step(samples())
    assert flat.dtype == torch.float32
    assert not torch.equal(flat, initial())
    assert float((flat - initial()).abs().max()) < 2e-6


def test_the_next_step_computes_with_the_updated_weights() -> None:
    batch = samples()
    trainer = Trainer(TINY, initial(), replace(BF16, lr=1e-3))
    trainer.step(batch)
    resumed = Trainer(TINY, trainer.flat.clone(), replace(BF16, lr=1e-3))
    resumed.load_state_dict(trainer.state_dict())
    assert trainer.step(batch) == resumed.step(batch)
