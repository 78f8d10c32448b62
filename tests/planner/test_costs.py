"""The roofline: closed forms agree with sums, and each term follows the physics."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tests.model.transformers_families import save_tiny

from dora.cli.main import app
from dora.cli.simulate import model_shape
from dora.errors import InputError
from dora.planner.costs import EngineCost, StepTime, TrainerCost
from dora.planner.hardware import DEVICES, MODELS, Efficiency, get_device, get_model

EXACT = Efficiency(memory=1.0, flops=1.0, link=1.0, decode_step_s=0.0, collective_s=0.0)
SMALL, LARGE, MOE = MODELS["qwen2.5-0.5b"], MODELS["qwen2.5-32b"], MODELS["longcat-flash"]
STEP_TIMES = [
    StepTime(2.0, 1.0, 0.01),
    StepTime(0.5, 1.0, 0.01),
    StepTime(2.0, 1.0, 0.0),
    StepTime(0.5, 1.0, 0.0),
]


@pytest.mark.parametrize("step_time", STEP_TIMES)
def test_many_steps_take_the_sum_of_each(step_time: StepTime) -> None:
    each = [max(step_time.floor_s, step_time.first_s + (k + 0.5) * step_time.slope_s) for k in range(300)]
    for num, seconds in enumerate(accumulate(each), 1):
        assert step_time.seconds(num) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("step_time", STEP_TIMES)
def test_steps_are_the_inverse_of_seconds(step_time: StepTime) -> None:
    for num in (0.0, 0.25, 1.0, 99.0, 100.0, 101.0, 30_000.0):
        assert step_time.steps(step_time.seconds(num)) == pytest.approx(num, rel=1e-9, abs=1e-9)


def test_one_row_reads_all_weights_and_many_rows_are_bound_by_compute() -> None:
    cost = EngineCost(SMALL, DEVICES["H200"], EXACT)
    assert cost.terms(1, 1).step_time(0).seconds(1) == pytest.approx(SMALL.weight_bytes / 4.8e12, rel=1e-3)
    floor_s = cost.terms(4096, 4096).step_time(0).floor_s
    assert floor_s == pytest.approx(4096 * 2 * SMALL.num_parameters / 989e12)


def test_a_step_with_context_takes_as_long_as_measured_on_a_gpu() -> None:
    """The roofline of 64 rows of 8,000 tokens, 4.3 TB/s: 1.73 ms."""
    cost = EngineCost(SMALL, DEVICES["H200"], Efficiency(memory=4.3 / 4.8, flops=0.8, decode_step_s=0.0))
    assert cost.terms(64, 64).step_time(64 * 8000).seconds(1) == pytest.approx(1.73e-3, rel=0.05)


def test_a_step_reads_the_weights_of_each_version() -> None:
    cost = EngineCost(LARGE, DEVICES["H800"], EXACT, tp_size=4)
    one, two = (cost.terms(2, 2).step_time(0, versions).seconds(1) for versions in (1, 2))
    assert two == pytest.approx(2 * one, rel=1e-2)


def test_the_busiest_rank_of_experts_stalls_all_and_more_rows_even_it_out() -> None:
    def cost(ep_size: int) -> EngineCost:
        return EngineCost(MOE, DEVICES["H800"], EXACT, 1, ep_size, expert_skew=0.0)

    imbalances = [cost(ep_size).expert_imbalance(8 * ep_size) for ep_size in (64, 128, 256)]
    assert 1 < imbalances[0] < imbalances[1] < imbalances[2]
    assert cost(256).expert_imbalance(256 * 64) < imbalances[2]
    terms = cost(64).terms(64 * 8, 8)
    even, uneven = (terms.step_time(context).seconds(1) for context in (8 * 4000, 8 * 16000))
    assert uneven > even


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"weights take 145\.4 GB of each of 1 .* H800 has 72\.0 GB; raise"):
        EngineCost(MODELS["qwen2.5-72b"], DEVICES["H800"], EXACT)
    with pytest.raises(InputError, match=r"takes 525 GB, and 4 x H800 have 288 GB"):
        TrainerCost(LARGE, DEVICES["H800"], 4, EXACT)
    with pytest.raises(InputError, match=r"EP = 64 must be at most .* qwen2.5-32b has 0"):
        EngineCost(LARGE, DEVICES["H800"], EXACT, 1, 64)
    with pytest.raises(InputError, match=r"train = 1\.5 must be above 0 and at most 1"):
        Efficiency(train=1.5)
    with pytest.raises(InputError, match="unknown device 'H900'; presets: H800, H100"):
        get_device("H900")
    with pytest.raises(InputError, match="unknown model 'gpt'; presets: qwen"):
        get_model("gpt")


# From the published config.json.
QWEN25_72B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(("raw", "preset"), [(QWEN25_72B, "qwen2.5-72b"), (QWEN3_30B_A3B, "qwen3-30b-a3b")])
def test_the_sizes_of_a_published_config_are_those_of_the_preset(
    tmp_path: Path, raw: dict[str, object], preset: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = asdict(model_shape(str(tmp_path))), asdict(MODELS[preset])
    del found["name"], expected["name"]
    added = {"head_size": 128, "max_context": raw["max_position_embeddings"]}
    assert found == pytest.approx(expected | added, rel=0.02)


@pytest.mark.parametrize(
    ("family", "kv_values", "num_kv_heads", "head_size"),
    [("deepseek_v3", 8 + 4, 1, 8), ("qwen3_next", 2 * 2 * 8 // 2, 2, 8)],  # half of its layers have KV
)
def test_latent_caches_and_linear_attention_have_less_kv(
    tmp_path: Path, family: str, kv_values: int, num_kv_heads: int, head_size: int
) -> None:
    save_tiny(family, tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    shape = model_shape(str(tmp_path))
    assert (shape.kv_values, shape.num_kv_heads, shape.num_experts) == (kv_values, num_kv_heads, 4)
    assert shape.head_size == head_size
    experts = shape.num_expert_parameters
    assert shape.num_parameters - shape.active_parameters == experts / 2 > 0


GEMMA3_27B = {  # as published, without the vision tower
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize(("raw", "num_windowed", "window"), [(GEMMA3_27B, 52, 1024), (GPT_OSS_120B, 18, 128)])
def test_layers_with_a_sliding_window_keep_and_read_no_more_than_it(
    tmp_path: Path, raw: dict[str, Any], num_windowed: int, window: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = model_shape(str(tmp_path))
    num_full = model.num_layers - num_windowed
    for length in (100, 1000, 20_000):
        bytes_of_layer = 2 * raw["num_key_value_heads"] * raw["head_dim"] * 2
        values = num_full * length + num_windowed * min(length, window)
        assert model.kv_tokens(length) * model.kv_bytes == pytest.approx(values * bytes_of_layer)
        attended = sum(num_full * (n + 0.5) + num_windowed * min(n + 0.5, window) for n in range(length))
        attention = model.forward_flops(length, length) - length * 2 * model.active_parameters
        heads = raw["num_attention_heads"] * raw["head_dim"]
        assert attention == pytest.approx(4 * heads * attended, rel=1e-3)
    cost, full = (EngineCost(one, DEVICES["H200"], EXACT, 4) for one in (model, replace(model, windowed=0.0)))
    assert cost.terms(8, 8).slope_s == pytest.approx(full.terms(8, 8).slope_s * num_full / model.num_layers)
    assert cost.swap_s(20_000) < full.swap_s(20_000)
    assert model.forward_flops(10, 20_000) < replace(model, windowed=0.0).forward_flops(10, 20_000)


def test_devices_beyond_the_kv_heads_hold_copies_of_the_kv() -> None:
    """Qwen2.5-72B has 8 KV heads: with TP 16, two devices hold each of them, as in vLLM and SGLang."""
    model = MODELS["qwen2.5-72b"]
    costs = [EngineCost(model, DEVICES["H200"], EXACT, tp_size) for tp_size in (4, 8, 16)]
    assert [cost.device_kv_bytes for cost in costs] == [model.kv_bytes / heads for heads in (4, 8, 8)]
    free = DEVICES["H200"].memory_bytes * 0.9 - model.weight_bytes / 16
    assert costs[2].kv_capacity == int(free * 8 / model.kv_bytes)
    read_s = [cost.terms(1, 1).kv_s for cost in costs]
    assert read_s[0] == pytest.approx(2 * read_s[1])
    assert read_s[2] == read_s[1]


def test_a_tensor_parallel_size_divides_the_attention_heads() -> None:
    with pytest.raises(InputError, match=r"TP = 8 must divide the 28 attention heads of qwen2\.5-7b"):
        EngineCost(MODELS["qwen2.5-7b"], DEVICES["H800"], EXACT, 8)


@pytest.mark.parametrize(("name", "size"), [("qwen2.5-7b", 28 * 128), ("qwen3-30b-a3b", 32 * 128)])
def test_attention_takes_the_flops_of_all_heads(name: str, size: int) -> None:
    """Of Qwen3-30B-A3B they are twice as wide as the hidden state."""
    model, tokens = MODELS[name], 1000
    attention = model.forward_flops(tokens, tokens) - tokens * 2 * model.active_parameters
    assert attention == pytest.approx(4 * model.num_layers * size * tokens**2 / 2, rel=1e-6)


def test_a_training_step_takes_its_flops() -> None:
    cost = TrainerCost(LARGE, DEVICES["H800"], 64, Efficiency(train=0.4))
    seconds = cost.sequence_s(2400)
    assert seconds == pytest.approx(8 * LARGE.num_parameters * 2400 / (64 * 989e12 * 0.4), rel=0.03)
    assert cost.sequence_s(30_000) > 12.5 * seconds  # attention


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "65536"), r"--context 65536: config.json of .* has max_position_embeddings = 40960"),
        (("--context", "40960", "--limit", "40900"), r"exceed the context of 40960; lower the limit"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate run"])
def test_lengths_beyond_the_context_of_a_config_are_refused(
    tmp_path: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    with pytest.raises(InputError, match=message):
        app([*command.split(), "--model", str(tmp_path), *options], standalone_mode=False)
