"""Adapters: their gradients are autograd's, what is computed with is merged, and PEFT can read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples
from torch import Tensor

from dora.errors import RunError
from dora.model.weights import Layout
from dora.trainer.lora import Lora, adapter_files
from dora.trainer.trainer import Trainer

LORA = Lora(rank=2, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
WITH_LORA = replace(SETTINGS, lora=LORA)
LAYOUT = Layout(TINY)
FACTORS = LORA.factors(LAYOUT)
BETA = SETTINGS.betas[0]


def adapters(trainer: Trainer) -> Tensor:
    """A and B of every adapted matrix, in one buffer."""
    found: Tensor = trainer.state_dict()["optimizer"]["adapters"]
    return found.clone()


def moment(trainer: Trainer) -> Tensor:
    """Adam's first moment, of whatever is trained."""
    found: Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return found.clone()


def merged(base: Tensor, factors: Tensor) -> Tensor:
    """The flat weights that adapters make of a base, computed in the plain way."""
    views, of = LAYOUT.views(base), FACTORS.views(factors)
    parts = []
    for name, view in views.items():
        if name in LORA.adapted(LAYOUT):
            module = name.removesuffix(".weight")
            view = view + 3.0 * of[f"{module}.lora_B"] @ of[f"{module}.lora_A"]
        parts.append(view.flatten())
    return torch.cat(parts)


def test_it_begins_with_the_weights_as_they_are() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    assert torch.equal(trainer.flat, initial())
    assert len(FACTORS.shapes) == 2 * 3 * TINY.num_hidden_layers
    for name, view in FACTORS.views(adapters(trainer)).items():
        assert bool(view.any()) == name.endswith("lora_A")


def test_the_gradient_of_adapters_is_that_of_autograd_through_the_merged_weights() -> None:
    trainer = Trainer(TINY, initial().double(), WITH_LORA)
    trainer.step(samples())  # from here on B is not zero
    before, flat, factors = moment(trainer), trainer.flat.clone(), adapters(trainer)
    trainer.step(samples())
    found = (moment(trainer) - BETA * before) / (1.0 - BETA)
    whole = Trainer(TINY, flat, SETTINGS)
    whole.step(samples())
    of_merged = moment(whole) / (1.0 - BETA)
    factors.requires_grad_()
    torch.autograd.backward((merged(initial().double(), factors) * of_merged).sum())
    assert factors.grad is not None
    torch.testing.assert_close(found, factors.grad, rtol=1e-9, atol=1e-12)


def test_what_has_no_adapter_stays_and_the_rest_is_merged() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    for _ in range(3):
        trainer.step(samples())
    torch.testing.assert_close(trainer.flat, merged(initial(), adapters(trainer)))
    before, after = LAYOUT.views(initial()), LAYOUT.views(trainer.flat)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == LORA.adapted(LAYOUT).keys()


def test_bf16_computes_with_the_merged_weights_rounded() -> None:
    exact, rounded = (Trainer(TINY, initial(), replace(WITH_LORA, dtype=d)) for d in ("float32", "bfloat16"))
    first, second = exact.step(samples()), rounded.step(samples())
    assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=0.05)


def test_a_trainer_that_goes_on_gives_the_same_bits() -> None:
    through, stopped = (Trainer(TINY, initial(), WITH_LORA) for _ in range(2))
    for _ in range(2):
        through.step(samples())
    stopped.step(samples())
    resumed = Trainer(TINY, initial(), WITH_LORA)
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(resumed.flat, stopped.flat)
    resumed.step(samples())
    assert torch.equal(resumed.flat, through.flat)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    broken = [replace(sample, advantage=float("nan")) for sample in samples()]
    with pytest.raises(RunError, match="grad_norm = nan"):
        trainer.step(broken)
    assert torch.equal(trainer.flat, initial())
    trainer.step(samples())
    other = Trainer(TINY, initial(), WITH_LORA)
    other.step(samples())
    assert torch.equal(trainer.flat, other.flat)


def test_the_files_are_those_that_peft_reads(tmp_path: Path) -> None:
    trainer = Trainer(TINY, initial(), WITH_LORA)
    trainer.step(samples())
    files = adapter_files(TINY, LORA, adapters(trainer), "start")
    described, tensors = files["adapter/adapter_config.json"], files["adapter/adapter_model.safetensors"]
    assert isinstance(described, str)
    assert isinstance(tensors, bytes)
    config = json.loads(described)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    found = load(tensors)
    names = {f"base_model.model.{name.removesuffix('.weight')}" for name in LORA.adapted(LAYOUT)}
    assert found.keys() == {f"{name}.{factor}.weight" for name in names for factor in ("lora_A", "lora_B")}
    a = found["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert a.shape == (2, TINY.intermediate_size)
