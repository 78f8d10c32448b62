"""Model FLOPs are those that torch counts, and what a device could do is known of some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.model.families import CONFIGS
from tests.trainer.test_trainer import SETTINGS
from torch.utils.flop_counter import FlopCounterMode

from dora.model.weights import Layout, initial_weights
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import Correction
from dora.trainer.speed import Speed, forward_flops, peak_tflops
from dora.trainer.trainer import Sample, Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama-untied", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-mixed"])
def test_the_products_of_a_forward_pass_are_those_that_torch_counts(name: str) -> None:
    config = CONFIGS[name]
    policy = Policy(config, Layout(config).views(initial_weights(config, seed=0)))
    batch = pack([[1, 2, 3], [1, 2, 3], [4, 5]], [[6, 7, 8, 9], [5, 4], [3]], CPU)  # siblings first
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        policy.logprobs(batch)
    found = counted.get_flop_counts()["Global"]
    products = found[torch.ops.aten.mm] + found.get(torch.ops.aten.addmm, 0)
    lengths = [6, 4, 2]
    pairs = sum(length * (length + 1) // 2 for length in lengths)  # of a query and a key that it sees
    scores = 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    assert forward_flops(config, batch) == products + scores


@pytest.mark.parametrize(
    "passes",
    [
        {},
        {"kl_loss_coef": 0.1},
        {"batch_tokens": 36, "correction": Correction(proximal="recomputed", token="tis")},
    ],
    ids=["plain", "reference", "proximal"],
)
def test_a_step_counts_shared_prompts_once_and_every_pass_that_is_timed(
    passes: dict[str, Any],
) -> None:
    """Against what torch counts: on a CPU products alone, beside which scores of attention are few here."""
    config = replace(CONFIGS["llama"], hidden_size=128, intermediate_size=256, vocab_size=40)
    prompt = [i % 40 for i in range(40)]
    told = [([(7 * i + k) % 40 for k in range(9)], 1.0 if i % 2 else -1.0) for i in range(8)]
    batch = [Sample(prompt, ids, [-3.7] * 9, advantage, staleness=1) for ids, advantage in told]
    settings = replace(SETTINGS, micro_batch_tokens=1000, **passes)
    trainer = Trainer(config, initial_weights(config, seed=0), settings)
    with FlopCounterMode(display=False) as counted:
        metrics = trainer.step(batch)
    assert metrics["actor/tflop"] * 1e12 == pytest.approx(counted.get_total_flops(), rel=0.1)


def test_work_is_divided_by_the_time_and_the_peak_of_all_ranks() -> None:
    speed = Speed(CPU, "float32", peak=0.5, num_ranks=2)
    with speed.measured():
        sum(range(10_000))
    metrics = speed.end_step(tflop=1e-3)
    assert metrics["perf/tflops/actor"] == 1e-3 / metrics["timing_s/update_actor"]
    assert metrics["perf/mfu/actor"] == metrics["perf/tflops/actor"]
    assert metrics["perf/peak_memory_gb"] > 0.01
    assert speed.end_step(tflop=0.0)["timing_s/update_actor"] == 0.0


def test_time_of_work_that_fails_counts() -> None:
    speed = Speed(CPU, "float32")
    with pytest.raises(ValueError, match="no gradient"), speed.measured():
        raise ValueError("no gradient")
    metrics = speed.end_step(tflop=1.0)
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
def test_the_peak_of_a_gpu_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda:0"), dtype) == tflops


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_tflops(CPU, "float32") is None
