"""FLOPs and memory estimates against what torch counts, the step timer, and peaks of known GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.model.families import CONFIGS, random_weights
from tests.trainer.batches import CPU, SETTINGS
from tests.trainer.test_policy import random_groups
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.optimizer import Bf16Weights, FlatAdamW
from dora.trainer.packing import PackedBatch, pack
from dora.trainer.perf import StepTimer, activation_bytes, forward_flops, logits_bytes, peak_tflops
from dora.trainer.policy import Policy, token_logprobs
from dora.trainer.recipe import Correction
from dora.trainer.trainer import Sample, Trainer

SEQUENCES = random_groups(num_groups=8, group_size=1, longest=30)


@pytest.mark.parametrize("name", ["llama-untied", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-mixed"])
def test_the_flops_of_a_forward_pass_are_those_that_torch_counts(name: str) -> None:
    config = CONFIGS[name]
    policy = Policy(config, WeightLayout(config).views(initial_weights(config, seed=0)))
    batch = pack([[1, 2, 3], [1, 2, 3], [4, 5]], [[6, 7, 8, 9], [5, 4], [3]], CPU)  # siblings first
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        policy.logprobs(batch)
    counts = counted.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    lengths = [6, 4, 2]
    pairs = sum(length * (length + 1) // 2 for length in lengths)  # of a query and a key that it attends to
    scores = 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    assert forward_flops(config, batch) == products + scores


@pytest.mark.parametrize(
    "passes",
    [
        {},
        {"kl_loss_coef": 0.1},
        {"mini_batch_tokens": 36, "correction": Correction(proximal="recomputed", token="tis")},
    ],
    ids=["plain", "reference", "proximal"],
)
def test_the_flops_of_a_step_count_shared_prompts_once_and_every_pass(
    passes: dict[str, Any],
) -> None:
    """Torch counts only matrix products on a CPU; attention scores are few beside them here."""
    config = replace(CONFIGS["llama"], hidden_size=128, intermediate_size=256, vocab_size=40)
    prompt = [i % 40 for i in range(40)]
    responses = [([(7 * i + k) % 40 for k in range(9)], 1.0 if i % 2 else -1.0) for i in range(8)]
    batch = [Sample(prompt, ids, [-3.7] * 9, advantage, staleness=1) for ids, advantage in responses]
    settings = replace(SETTINGS, micro_batch_tokens=1000, **passes)
    trainer = Trainer(config, initial_weights(config, seed=0), settings)
    with FlopCounterMode(display=False) as counted:
        metrics = trainer.step(batch)
    assert metrics["actor/tflop"] * 1e12 == pytest.approx(counted.get_total_flops(), rel=0.1)


def test_the_timer_divides_flops_by_the_time_and_the_peak_of_all_ranks() -> None:
    timer = StepTimer(CPU, "float32", peak=0.5, num_ranks=2)
    with timer.measure():
        sum(range(10_000))
    metrics = timer.end_step(tflop=1e-3)
    assert metrics["perf/tflops/actor"] == 1e-3 / metrics["timing_s/update_actor"]
    assert metrics["perf/mfu/actor"] == metrics["perf/tflops/actor"]
    assert metrics["perf/peak_memory_gb"] > 0.01
    assert timer.end_step(tflop=0.0)["timing_s/update_actor"] == 0.0


def test_the_timer_counts_time_of_work_that_fails() -> None:
    timer = StepTimer(CPU, "float32")
    with pytest.raises(ValueError, match="no gradient"), timer.measure():
        raise ValueError("no gradient")
    metrics = timer.end_step(tflop=1.0)
    assert metrics["timing_s/update_actor"] > 0.0
    assert "perf/mfu/actor" not in metrics


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100 80GB PCIe", "bfloat16", 312.0),
        ("NVIDIA GH200 480GB", "bfloat16", 989.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A10G", "bfloat16", 70.0),
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L40", "bfloat16", 181.0),
        ("NVIDIA L4", "float32", 30.3),
        ("Quartz 7", "bfloat16", None),
        ("NVIDIA RTX A1000", "bfloat16", None),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
    ],
)
def test_the_peak_of_a_gpu_is_looked_up_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda:0"), dtype) == tflops


def test_the_peak_of_a_cpu_is_unknown() -> None:
    assert peak_tflops(CPU, "float32") is None


def packed_batch() -> PackedBatch:
    return pack(
        [prompt for prompt, _ in SEQUENCES], [response for _, response in SEQUENCES], torch.device("cpu")
    )


def wide(name: str) -> ModelConfig:
    """So wide that tensors of the size of a head or a number are negligible."""
    return replace(
        CONFIGS[name],
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_attention_heads=4,
        head_dim=32,
    )


def saved_bytes(
    config: ModelConfig, batch: PackedBatch, dtype: str, activation_checkpointing: bool = False
) -> int:
    """Bytes that a forward pass saves for its backward pass, without the weights."""
    flat, layout = random_weights(config), WeightLayout(config)
    optimizer = FlatAdamW(layout, flat, 0.0, (0.9, 0.99))
    source = optimizer if dtype == "float32" else Bf16Weights(layout, flat, optimizer.weights)
    weights = {tensor.untyped_storage().data_ptr() for tensor in source.weights.values()}
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    policy = Policy(config, source.weights, activation_checkpointing=activation_checkpointing)
    with saved_tensors_hooks(record, lambda tensor: tensor):
        policy.logprobs(batch)
    return sum(num for pointer, num in saved.items() if pointer not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_saved_activations_match_the_estimate(name: str, dtype: str) -> None:
    config = wide(name)
    batch = packed_batch()
    num_bytes = 4 if dtype == "float32" else 2
    expected = activation_bytes(config, len(batch.input_ids), num_bytes, activation_checkpointing=False)
    assert saved_bytes(config, batch, dtype) == pytest.approx(expected, rel=0.1)


def test_saved_activations_with_checkpointing_are_the_layers_inputs() -> None:
    config = replace(wide("qwen3"), num_hidden_layers=6)
    batch = packed_batch()
    one_layer, num = replace(config, num_hidden_layers=1), len(batch.input_ids)
    recomputed = (
        activation_bytes(one_layer, num, 4, activation_checkpointing=False) - 12 * num * config.hidden_size
    )
    expected = activation_bytes(config, num, 4, activation_checkpointing=True) - recomputed
    assert saved_bytes(config, batch, "float32", activation_checkpointing=True) == pytest.approx(
        expected, rel=0.1
    )


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak of the memory that torch allocates during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ]
    return max(accumulate(num for _, num in sorted(changes, key=lambda change: change[0])))


@pytest.mark.parametrize("num_rows", [20, 150], ids=["a large head", "large chunks"])
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("learns_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_memory_of_logits_matches_the_estimate(
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
