"""LoRA: gradients equal autograd's, computation uses merged weights, and PEFT reads the adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from tests.trainer.batches import SETTINGS, TINY, first_moment, initial, samples, with_nan
from torch import Tensor

from dora.errors import RunError
from dora.model.weights import WeightLayout
from dora.trainer.lora import LoraSettings, peft_files
from dora.trainer.trainer import Trainer

LORA = LoraSettings(rank=2, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
WITH_LORA = replace(SETTINGS, lora=LORA)
LAYOUT = WeightLayout(TINY)
FACTORS = LORA.adapter_layout(LAYOUT)
BETA = SETTINGS.betas[0]


def adapters(trainer: Trainer) -> Tensor:
    """A and B of every adapted matrix, in one buffer."""
    buffer: Tensor = trainer.state_dict()["optimizer"]["adapters"]
    return buffer.clone()


def merged(base: Tensor, factors: Tensor) -> Tensor:
    """Flat weights of a base with its adapters, matrix by matrix."""
    views, of = LAYOUT.views(base), FACTORS.views(factors)
    parts = []
    for name, view in views.items():
        if name in LORA.target_shapes(LAYOUT):
            module = name.removesuffix(".weight")
            view = view + 3.0 * of[f"{module}.lora_B"] @ of[f"{module}.lora_A"]
        parts.append(view.flatten())
    return torch.cat(parts)


def test_training_starts_from_the_base_weights() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    assert torch.equal(trainer.flat, initial())
    assert len(FACTORS.shapes) == 2 * 3 * TINY.num_hidden_layers
    for name, view in FACTORS.views(adapters(trainer)).items():
        assert bool(view.any()) == name.endswith("lora_A")


def test_the_gradient_of_adapters_equals_autograds_through_the_merged_weights() -> None:
    trainer = Trainer(TINY, initial().double(), WITH_LORA)
    trainer.step(samples())  # so that B is not zero
    before, flat, factors = first_moment(trainer), trainer.flat.clone(), adapters(trainer)
    trainer.step(samples())
    got = (first_moment(trainer) - BETA * before) / (1.0 - BETA)
    whole = Trainer(TINY, flat, SETTINGS)
    whole.step(samples())
    of_merged = first_moment(whole) / (1.0 - BETA)
    factors.requires_grad_()
    torch.autograd.backward((merged(initial().double(), factors) * of_merged).sum())
    assert factors.grad is not None
    torch.testing.assert_close(got, factors.grad, rtol=1e-9, atol=1e-12)


def test_weights_without_adapters_stay_and_the_others_are_merged() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    for _ in range(3):
        trainer.step(samples())
    torch.testing.assert_close(trainer.flat, merged(initial(), adapters(trainer)))
    before, after = LAYOUT.views(initial()), LAYOUT.views(trainer.flat)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == LORA.target_shapes(LAYOUT).keys()


def test_bf16_computes_with_the_rounded_merged_weights() -> None:
    exact, rounded = (Trainer(TINY, initial(), replace(WITH_LORA, dtype=d)) for d in ("float32", "bfloat16"))
    first, second = exact.step(samples()), rounded.step(samples())
    assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=0.05)


def test_a_resumed_trainer_gives_the_same_bits() -> None:
    through, stopped = (Trainer(TINY, initial(), WITH_LORA) for _ in range(2))
    for _ in range(2):
        through.step(samples())
    stopped.step(samples())
    resumed = Trainer(TINY, initial(), WITH_LORA)
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(resumed.flat, stopped.flat)
    resumed.step(samples())
    assert torch.equal(resumed.flat, through.flat)


def test_a_step_that_fails_restores_weights_that_were_merged_with_other_rounding() -> None:
    trainer = Trainer(TINY, initial(), replace(WITH_LORA, mini_batch_tokens=50))
    trainer.step(samples())
    merged_elsewhere = trainer.flat * (1.0 + 1e-6)
    trainer.replace_weights(merged_elsewhere)
    with pytest.raises(RunError, match="grad_norm = nan"):
        trainer.step(with_nan(samples()))
    assert torch.equal(trainer.flat, merged_elsewhere)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    with pytest.raises(RunError, match="grad_norm = nan"):
        trainer.step(with_nan(samples()))
    assert torch.equal(trainer.flat, initial())
    trainer.step(samples())
    other = Trainer(TINY, initial(), WITH_LORA)
    other.step(samples())
    assert torch.equal(trainer.flat, other.flat)


def test_the_files_are_in_the_format_of_peft(tmp_path: Path) -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    trainer.step(samples())
    files = peft_files(TINY, LORA, adapters(trainer), "start")
    config_text, tensors = files["adapter/adapter_config.json"], files["adapter/adapter_model.safetensors"]
    assert isinstance(config_text, str)
    assert isinstance(tensors, bytes)
    config = json.loads(config_text)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    got = load(tensors)
    names = {f"base_model.model.{name.removesuffix('.weight')}" for name in LORA.target_shapes(LAYOUT)}
    assert got.keys() == {f"{name}.{factor}.weight" for name in names for factor in ("lora_A", "lora_B")}
    a = got["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert a.shape == (2, TINY.intermediate_size)
