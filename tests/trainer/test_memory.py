"""What the formulas say a micro-batch keeps is what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from tests.model.families import CONFIGS, drawn_weights
from tests.trainer.test_policy import drawn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.head import token_logprobs
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


def peak_bytes(work: Callable[[], object]) -> int:
    """Most that torch's allocator has handed out at a time meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    changes: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ]
    return max(accumulate(num for _, num in sorted(changes, key=lambda change: change[0])))


@pytest.mark.parametrize("num_rows", [20, 150], ids=["a large head", "large chunks"])
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("learns_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_logits_is_what_the_formula_says(
    dtype: str, learns_head: bool, with_entropies: bool, num_rows: int
) -> None:
    config = replace(CONFIGS["qwen3"], vocab_size=40_000, hidden_size=64)
    hidden = torch.randn(2 * num_rows, 64).to(getattr(torch, dtype)).requires_grad_()
    head = (0.02 * torch.randn(40_000, 64)).requires_grad_(learns_head)
    head.grad = torch.zeros_like(head) if learns_head else None
    targets = torch.arange(2 * num_rows)

    def work() -> None:
        logprobs, entropies = token_logprobs(hidden, head, targets, 1.0, num_rows)
        torch.autograd.backward((logprobs + entropies if with_entropies else logprobs).sum())

    expected = logits_bytes(config, num_rows, 4 if dtype == "float32" else 2, learns_head)
    assert peak_bytes(work) == pytest.approx(expected, rel=0.1)
