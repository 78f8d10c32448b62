"""Sequences that share a micro-batch, and even their prompt, are computed as if each were alone."""

from __future__ import annotations

import random

import pytest
import torch
from tests.model.families import CONFIGS, SHAPE, drawn_weights
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.routes import Counted, replay

CPU = torch.device("cpu")
Sequences = list[tuple[list[int], list[int]]]


def drawn(num_groups: int, group_size: int = 3, longest: int = 30) -> Sequences:
    """Siblings of some prompts, of 1 to `longest` tokens."""
    source = random.Random(0)

    def ids(num: int) -> list[int]:
        return [source.randrange(SHAPE["vocab_size"]) for _ in range(num)]

    prompts = [ids(source.randint(1, 9)) for _ in range(num_groups)]
    return [(prompt, ids(source.randint(1, longest))) for prompt in prompts for _ in range(group_size)]


def computed(
    config: ModelConfig,
    parts: list[Sequences],
    dtype: torch.dtype = torch.float64,
    keeps_activations: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of all responses, and the gradient of their weighted sum, part by part."""
    flat = drawn_weights(config).to(dtype).requires_grad_()
    policy = Policy(
        config,
        Layout(config).views(flat),
        temperature=0.9,
        logits_chunk_tokens=7,
        keeps_activations=keeps_activations,
    )
    found = []
    for part in parts:
        logprobs, entropies = policy.logprobs(pack([p for p, _ in part], [r for _, r in part], CPU))
        torch.autograd.backward((logprobs.sin() + 0.1 * entropies).sum())
        found.append(logprobs.detach())
    assert flat.grad is not None
    return torch.cat(found), flat.grad


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_siblings_have_the_log_probs_and_gradients_that_each_has_alone(name: str) -> None:
    sequences = drawn(num_groups=3)
    packed, gradient = computed(CONFIGS[name], [sequences])
    alone, expected = computed(CONFIGS[name], [[one] for one in sequences])
    tolerance = 1e-7 if CONFIGS[name].mixture_layers else 1e-12  # routers weigh experts in fp32
    torch.testing.assert_close(packed, alone, rtol=tolerance, atol=tolerance)
    assert float((gradient - expected).norm() / expected.norm()) < tolerance


def test_a_sequence_does_not_see_its_neighbours() -> None:
    config = CONFIGS["qwen3"]
    (first, *others), (_, *changed) = drawn(3), drawn(3, longest=20)
    num = len(first[1])
    found, _ = computed(config, [[first, *others]], torch.float32)
    again, _ = computed(config, [[first, *changed]], torch.float32)
    torch.testing.assert_close(found[:num], again[:num], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe-mixed"])
def test_layers_that_run_again_give_the_same_gradient(name: str) -> None:
    config, sequences = CONFIGS[name], drawn(2)
    kept = computed(config, [sequences], torch.float32)
    again = computed(config, [sequences], torch.float32, keeps_activations=False)
    assert torch.equal(kept[0], again[0])
    assert torch.equal(kept[1], again[1])


def num_saved(config: ModelConfig, sequences: Sequences, keeps_activations: bool = True) -> int:
    """Bytes that a forward pass keeps for its backward pass, beside the weights."""
    flat = drawn_weights(config).requires_grad_()
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    policy = Policy(config, Layout(config).views(flat), keeps_activations=keeps_activations)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs, _ = policy.logprobs(pack([p for p, _ in sequences], [r for _, r in sequences], CPU))
    assert logprobs.requires_grad
    saved.pop(flat.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def test_layers_that_run_again_keep_little_in_between() -> None:
    config, sequences = CONFIGS["llama"], drawn(8)
    assert num_saved(config, sequences, keeps_activations=False) < 0.4 * num_saved(config, sequences)


def test_tokens_of_a_layer_that_runs_again_count_once() -> None:
    config, sequences = CONFIGS["qwen3_moe-mixed"], drawn(2)
    batch = pack([p for p, _ in sequences], [r for _, r in sequences], CPU)
    views = {
        name: view.requires_grad_() for name, view in Layout(config).views(drawn_weights(config)).items()
    }
    route = Counted(config, replay(config, batch, [None] * len(sequences)), batch.rows)
    logprobs, _ = Policy(config, views, keeps_activations=False).logprobs(batch, route)
    torch.autograd.backward(logprobs.sum())
    assert route.num_tokens.sum(1).tolist() == [len(batch.rows) * config.num_experts_per_tok] * 2
