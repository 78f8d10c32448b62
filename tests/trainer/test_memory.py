"""What the formulas say a micro-batch keeps is what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.model.families import CONFIGS, drawn_weights
from tests.trainer.test_policy import drawn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.memory import activation_bytes, logits_bytes
from dora.trainer.optimizer import FlatAdamW
from dora.trainer.packing import Packed, pack
from dora.trainer.policy import Policy
from dora.trainer.precision import Bf16Weights

SEQUENCES = drawn(num_groups=8, group_size=1, longest=30)


def packed() -> Packed:
    return pack(
        [prompt for prompt, _ in SEQUENCES], [response for _, response in SEQUENCES], torch.device("cpu")
    )


def large(name: str) -> ModelConfig:
    """So wide that what has the size of a head, or of one number, does not count."""
    return replace(
        CONFIGS[name],
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_attention_heads=4,
        head_dim=32,
    )


def saved_bytes(config: ModelConfig, batch: Packed, dtype: str, keeps_activations: bool = True) -> int:
    """What a forward pass keeps for its backward pass, beside weights."""
    flat, layout = drawn_weights(config), Layout(config)
    optimizer = FlatAdamW(layout, flat, 0.0, (0.9, 0.99))
    source = optimizer if dtype == "float32" else Bf16Weights(layout, flat, optimizer.weights)
    weights = {tensor.untyped_storage().data_ptr() for tensor in source.weights.values()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    policy = Policy(config, source.weights, keeps_activations=keeps_activations)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(batch)
    return sum(num for place, num in saved.items() if place not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_activations_are_what_the_formula_says(name: str, dtype: str) -> None:
    config = large(name)
    batch = packed()
    num_bytes = 4 if dtype == "float32" else 2
    expected = activation_bytes(config, len(batch.inputs), num_bytes, keeps_activations=True)
    assert saved_bytes(config, batch, dtype) == pytest.approx(expected, rel=0.1)


def test_with_checkpointing_layers_keep_their_inputs() -> None:
    config = replace(large("qwen3"), num_hidden_layers=6)
    batch = packed()
    one_layer, num = replace(config, num_hidden_layers=1), len(batch.inputs)
    running = activation_bytes(one_layer, num, 4, keeps_activations=True) - 12 * num * config.hidden_size
    expected = activation_bytes(config, num, 4, keeps_activations=False) - running
    assert saved_bytes(config, batch, "float32", keeps_activations=False) == pytest.approx(expected, rel=0.1)


def test_logits_are_those_of_a_chunk() -> None:
    config = replace(CONFIGS["qwen3"], vocab_size=1000, hidden_size=10)
    assert logits_bytes(config, chunk_tokens=50, num_bytes=4) == 4 * 50 * 1000 * 4
    assert logits_bytes(config, chunk_tokens=50, num_bytes=2) == 4 * 50 * 1000 * 4 + 1000 * 10 * 2
