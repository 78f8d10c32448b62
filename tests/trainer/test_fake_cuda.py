"""The trainer's own code for GPUs, on a device without values: devices, dtypes, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fake_cuda import FakeCuda, HiddenSync, fake_cuda
from tests.trainer.batches import samples, stale
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer import learner
from dora.trainer.critic import Critic, CriticSettings, ValueLayout
from dora.trainer.lora import LoraSettings
from dora.trainer.loss import POLICY_LOSSES
from dora.trainer.recipe import Correction
from dora.trainer.trainer import Trainer, TrainerSettings

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=128,
)
SETTINGS = TrainerSettings(lr=1e-2, num_steps=4, warmup_steps=0, max_grad_norm=1.0, dtype="bfloat16")
BATCH = stale(samples())
RECIPES: dict[str, dict[str, Any]] = {
    "reference and entropy": {"kl_loss_coef": 0.1, "entropy_coeff": 0.01},
    "checkpointing": {"activation_checkpointing": True},
    "lora": {"lora": LoraSettings(4, 8.0, ("q_proj", "down_proj"))},
    "tis": {"correction": Correction("recomputed", "tis", "mis")},
    "icepop": {"correction": Correction(token="icepop", proximal="interpolated", staleness_decay=0.5)},
}
RECIPES |= {name: {"policy_loss": name} for name in POLICY_LOSSES}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


def make_trainer(**settings: Any) -> Trainer:
    flat = torch.zeros(WeightLayout(CONFIG).numel, device="cuda")
    return Trainer(CONFIG, flat, replace(SETTINGS, **settings))


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_never_make_the_host_wait(recipe: str, cuda: FakeCuda) -> None:
    trainer = make_trainer(micro_batch_tokens=64, **RECIPES[recipe])
    cuda.matmul_dtypes.clear()
    with cuda.forbid_syncs():
        trainer.add_samples(BATCH)
        assert trainer.can_accumulate
        while trainer.can_accumulate:
            trainer.accumulate()
    assert cuda.matmul_dtypes == {torch.bfloat16}
    trainer.finish_step()
    assert cuda.syncs[-2:] == ["item", "tolist"]  # the norm of the gradient, and all metrics at once
    assert not {"item", "tolist"} & {*cuda.syncs[:-2]}
    assert all(len(shape) <= 1 for shape in cuda.fp64_shapes), "fp64 is for sums of metrics"


def test_an_update_of_the_critic_waits_for_its_metrics_only(cuda: FakeCuda) -> None:
    flat = torch.zeros(ValueLayout(CONFIG).numel, device="cuda")
    critic = Critic(CONFIG, flat, CriticSettings(lr=1e-2, num_steps=4, dtype="bfloat16", micro_batch_tokens=64))
    critic.compute_advantages(BATCH, [1.0] * len(BATCH))
    cuda.syncs.clear()
    critic.update(0)
    assert cuda.syncs == ["item", "tolist"]


def test_a_float32_trainer_computes_in_float32(cuda: FakeCuda) -> None:
    trainer = make_trainer(dtype="float32")
    trainer.step(BATCH)
    assert cuda.matmul_dtypes == {torch.float32}
    assert trainer.flat.device.type == "cuda"


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda logprobs: logprobs * logprobs.detach().max().item(),
    "a mask": lambda logprobs: logprobs[logprobs < 0],
    "a tensor of the host": lambda logprobs: logprobs + torch.zeros(len(logprobs)),
    "a copy from the host": lambda logprobs: logprobs + torch.zeros(len(logprobs)).to(logprobs.device),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_micro_batch_is_found(
    fault: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_correction = learner.apply_correction

    def faulty(correction: Correction, logprobs: Tensor, *args: Any) -> Any:
        return apply_correction(correction, FAULTS[fault](logprobs), *args)

    monkeypatch.setattr(learner, "apply_correction", faulty)
    trainer = make_trainer(micro_batch_tokens=64)
    trainer.add_samples(BATCH)
    with (
        pytest.raises((HiddenSync, RuntimeError), match=r"makes the host wait|on the same device"),
        cuda.forbid_syncs(),
    ):
        trainer.accumulate()


def test_fp64_in_the_model_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    policy = trainer._learner._policy  # type: ignore[attr-defined]
    monkeypatch.setattr(policy, "_cos", policy._cos.double())
    monkeypatch.setattr(policy, "_sin", policy._sin.double())
    trainer.step(BATCH)
    assert any(len(shape) > 1 for shape in cuda.fp64_shapes)
