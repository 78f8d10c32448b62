"""Training of every model family."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.model.families import CONFIGS, random_weights

from dora.model.weights import WeightLayout
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.sft import train_sft

EXAMPLES = [([1, 2, 3], [4, 5, 6, 7]), ([2, 1], [4, 5]), ([9], [8, 7, 6])]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_on_a_fixed_batch_lowers_its_loss(name: str) -> None:
    flat = random_weights(CONFIGS[name])
    steps = train_sft(CONFIGS[name], flat, itertools.repeat(EXAMPLES), num_steps=4, lr=1e-3, warmup_steps=0)
    losses = list(steps)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_that_contributed_has_a_gradient(name: str) -> None:
    config = CONFIGS[name]
    weights = {
        k: view.requires_grad_() for k, view in WeightLayout(config).views(random_weights(config)).items()
    }
    batch = pack([prompt for prompt, _ in EXAMPLES], [answer for _, answer in EXAMPLES], torch.device("cpu"))
    torch.autograd.backward(Policy(config, weights).logprobs(batch)[0].sum())
    unused = [
        k for k, x in weights.items() if (x.grad is None or not x.grad.any()) and "k_proj.bias" not in k
    ]
    assert all(".experts." in name for name in unused)
    assert len(unused) < 3 * config.num_experts * len(config.moe_layers) / 2 or not unused
