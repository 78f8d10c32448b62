"""Sequences that share a micro-batch, and their prompt, have the log-probs that each has alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.model.families import CONFIGS, SHAPE, random_weights
from tests.model.varlen_twin import traceable_attention, varlen_attn
from torch import Tensor

import dora.model.device as device_module
import dora.trainer.policy as policy_module
from dora.model.attention import VarlenLayout, torch_varlen
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.routing_replay import CountingRouter, replay_routes

CPU = torch.device("cpu")
Sequences = list[tuple[list[int], list[int]]]


def random_groups(num_groups: int, group_size: int = 3, longest: int = 30) -> Sequences:
    """Prompts with sibling responses of 1 to `longest` tokens."""
    source = random.Random(0)

    def ids(num: int) -> list[int]:
        return [source.randrange(SHAPE["vocab_size"]) for _ in range(num)]

    prompts = [ids(source.randint(1, 9)) for _ in range(num_groups)]
    return [(prompt, ids(source.randint(1, longest))) for prompt in prompts for _ in range(group_size)]


def logprobs_and_gradient(
    config: ModelConfig,
    parts: list[Sequences],
    dtype: torch.dtype = torch.float64,
    activation_checkpointing: bool = False,
    torch_compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of all responses, part by part, and the gradient of a function of them."""
    flat = random_weights(config).to(dtype).requires_grad_()
    policy = Policy(
        config,
        WeightLayout(config).views(flat),
        temperature=0.9,
        logits_chunk_tokens=7,
        activation_checkpointing=activation_checkpointing,
        torch_compile=torch_compile,
    )
    results = []
    for part in parts:
        logprobs, entropies = policy.logprobs(pack([p for p, _ in part], [r for _, r in part], CPU))
        torch.autograd.backward((logprobs.sin() + 0.1 * entropies).sum())
        results.append(logprobs.detach())
    assert flat.grad is not None
    return torch.cat(results), flat.grad


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_siblings_have_the_log_probs_and_gradients_that_each_has_alone(name: str) -> None:
    sequences = random_groups(num_groups=3)
    packed, gradient = logprobs_and_gradient(CONFIGS[name], [sequences])
    alone, expected = logprobs_and_gradient(CONFIGS[name], [[one] for one in sequences])
    tolerance = 1e-7 if CONFIGS[name].moe_layers else 1e-12  # router probabilities are fp32
    torch.testing.assert_close(packed, alone, rtol=tolerance, atol=tolerance)
    assert float((gradient - expected).norm() / expected.norm()) < tolerance


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.filterwarnings("ignore:.* should not be instantiated")  # and makes an autograd.Function
@pytest.mark.parametrize(("name", "saves"), [("qwen3", True), ("qwen3_moe-mixed", False)])
def test_a_compiled_model_has_the_same_gradient(
    name: str, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are traced once for all layers, without a graph break; no code is generated here."""
    from torch._dynamo import lookup_backend  # takes seconds

    graphs = list[torch.fx.GraphModule]()

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        run: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count_graphs))
    monkeypatch.setattr(device_module, "compiled", cache(device_module.compiled.__wrapped__))
    monkeypatch.setattr(policy_module, "compiled", device_module.compiled)
    monkeypatch.setattr(policy_module, "varlen_attention", lambda query: traceable_attention)
    config = CONFIGS[name]
    parts = [random_groups(num_groups=num) for num in (2, 3, 4)]
    found = logprobs_and_gradient(config, parts, activation_checkpointing=saves, torch_compile=True)
    assert len(graphs) <= 8, "some for each new kind of batch, none for each layer or batch"
    for one, other in zip(found, logprobs_and_gradient(config, parts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.fixture
def varlen_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The policy attends by a kernel for variable lengths; a list that grows by the shape of each call."""
    kernel, shapes = torch_varlen(varlen_attn), list[tuple[int, ...]]()

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
        shapes.append((*q.shape, *k.shape))
        return kernel(q, k, v, layout)

    monkeypatch.setattr(policy_module, "varlen_attention", lambda query: attend)
    return shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_a_kernel_for_variable_lengths_gives_the_same_gradient(
    name: str, varlen_shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some responses have one token: with a shared prompt these have no inputs of their own."""
    sequences = random_groups(num_groups=4, longest=9)
    sequences.insert(2, (sequences[0][0], [1]))
    found = logprobs_and_gradient(CONFIGS[name], [sequences])
    assert varlen_shapes
    monkeypatch.setattr(policy_module, "varlen_attention", lambda query: None)
    expected = logprobs_and_gradient(CONFIGS[name], [sequences])
    tolerance = 1e-7 if CONFIGS[name].moe_layers else 1e-12
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_micro_batch_has_one_shape_of_attention_whatever_its_lengths(
    varlen_shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, in_blocks = random_groups(num_groups=12, longest=50), list[tuple[int, ...]]()
    halves = [sequences[:18], sequences[18:]]
    config = CONFIGS["qwen3"]
    logprobs_and_gradient(config, halves)
    assert len(set(varlen_shapes)) == len(halves)
    assert len(varlen_shapes) == len(halves) * config.num_hidden_layers

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        in_blocks.append(tuple(q.shape))
        return block_attention(q, k, v)

    block_attention = policy_module._block_attention
    monkeypatch.setattr(policy_module, "varlen_attention", lambda query: None)
    monkeypatch.setattr(policy_module, "_block_attention", attend)
    logprobs_and_gradient(config, halves)
    assert len(set(in_blocks)) >= 5 * len(halves)


def test_a_sequence_does_not_attend_to_its_neighbours() -> None:
    config = CONFIGS["qwen3"]
    (first, *others), (_, *changed) = random_groups(3), random_groups(3, longest=20)
    num = len(first[1])
    before, _ = logprobs_and_gradient(config, [[first, *others]], torch.float32)
    after, _ = logprobs_and_gradient(config, [[first, *changed]], torch.float32)
    torch.testing.assert_close(before[:num], after[:num], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe-mixed"])
def test_activation_checkpointing_gives_the_same_gradient(name: str) -> None:
    config, sequences = CONFIGS[name], random_groups(2)
    saved = logprobs_and_gradient(config, [sequences], torch.float32)
    recomputed = logprobs_and_gradient(config, [sequences], torch.float32, activation_checkpointing=True)
    assert torch.equal(saved[0], recomputed[0])
    assert torch.equal(saved[1], recomputed[1])


def test_activation_checkpointing_counts_tokens_of_experts_once() -> None:
    config, sequences = CONFIGS["qwen3_moe-mixed"], random_groups(2)
    batch = pack([p for p, _ in sequences], [r for _, r in sequences], CPU)
    views = {
        name: view.requires_grad_()
        for name, view in WeightLayout(config).views(random_weights(config)).items()
    }
    router = CountingRouter(
        config, replay_routes(config, batch, [None] * len(sequences)), batch.logits_indices
    )
    logprobs, _ = Policy(config, views, activation_checkpointing=True).logprobs(batch, router)
    torch.autograd.backward(logprobs.sum())
    assert router.num_tokens.sum(1).tolist() == [len(batch.logits_indices) * config.num_experts_per_tok] * 2
