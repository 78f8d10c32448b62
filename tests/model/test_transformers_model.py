"""Models that transformers computes: which are accepted, and log-probs of engine and trainer."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.test_pretrained import change_config
from tests.model.transformers_families import FAMILIES, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from dora.core.types import GroupId, RequestId
from dora.engine.backends.transformers_engine import Transformers
from dora.engine.request import Request, SamplingParams
from dora.errors import ModelError
from dora.model.config import ModelConfig, TransformersConfig
from dora.model.pretrained import check_pretrained, has_published_names, load_config, load_pretrained
from dora.model.transformers_model import TransformersModel
from dora.model.weights import WeightLayout
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

TEMPERATURE = 0.8


BAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}


@pytest.mark.parametrize("kind", [*FAMILIES, "bamba"])
def test_log_probs_of_engine_and_trainer_agree(kind: str, tmp_path: Path) -> None:
    config, flat = load_pretrained(save_tiny(kind, tmp_path, **BAMBA if kind == "bamba" else {}))
    engine = Transformers(
        model=str(tmp_path), max_rows=4, max_context=64, version_slots=1, device="cpu", dtype="float32"
    )
    engine.load(0, flat)
    source = random.Random(0)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=24)
    prompts = [tuple(source.randrange(40) for _ in range(3 + i)) for i in range(4)]
    engine.submit([request(i, prompt, sampling) for i, prompt in enumerate(prompts)])
    outputs = [completion for _ in range(24) for completion in engine.step()]
    samples = [Sample(c.prompt_ids.tolist(), c.token_ids.tolist(), c.logprobs.tolist(), 0.0) for c in outputs]
    trainer = GroupLogprobs(config, TrainerSettings(lr=0.0, num_steps=1, temperature=TEMPERATURE), "cpu")
    trainer.load_weights(flat)
    assert len(samples) == 4
    for sample, logprobs in zip(samples, trainer(samples), strict=True):
        assert torch.allclose(torch.tensor(sample.logprobs), logprobs, rtol=0.0, atol=1e-4)


def request(number: int, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
    return Request(RequestId(0, 0, number), GroupId(0, 0), prompt, 0, number, sampling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such"}, "'no_such' is no causal language model of transformers"),
        ({"model_type": "t5"}, "'t5' is no causal language model of transformers"),
        ({"model_type": "bert"}, "'bert' attends to later tokens"),
        ({"model_type": "roformer"}, "'roformer' attends to later tokens"),
        ({"model_type": "openai-gpt"}, "'openai-gpt' takes no cache of transformers"),
        (
            {"vision_config": {"hidden_size": 8}},
            "has a vision_config, and only qwen2_vl, .*more than text",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "is not supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type = 'dynamic' is not supported: keys would depend on the sequence length",
        ),
        ({"head_dim": 7}, "an invalid value: .* even"),
    ],
)
def test_a_model_that_cannot_be_computed_is_rejected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    change_config(save_tiny("mistral", tmp_path), **changes)
    with pytest.raises(ModelError, match=message) as raised:
        load_config(tmp_path)
    assert "\n" not in str(raised.value)


class Allocations(TorchDispatchMode):
    """The most values of a tensor that was made outside the meta device."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.largest = max(self.largest, made.numel())
        return made


def test_reading_a_config_allocates_no_weight(tmp_path: Path) -> None:
    """The stacked experts of one layer of DeepSeek-V3 would take 30 GB."""
    change_config(save_tiny("deepseek_v3", tmp_path), n_routed_experts=1024, vocab_size=40_000)
    with Allocations() as allocated:  # type: ignore[no-untyped-call]
        config = load_config(tmp_path)
    assert isinstance(config, TransformersConfig)
    assert max(math.prod(shape) for _, shape in config.shapes) == 40_000 * 32
    assert 0 < allocated.largest <= 1024 * 32  # the router's zeros, freed at once; RoPE's frequencies


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    change_config(save_tiny("mistral", tmp_path), num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"does not fit config.json: .*model.layers.2"):
        load_pretrained(tmp_path)


def test_weights_of_other_shapes_are_named_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_config(save_tiny("mistral", tmp_path), intermediate_size=56)
    with pytest.raises(ModelError, match=r"does not fit config.json: .*down_proj.*; save the model again"):
        load_pretrained(tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_vocabulary_larger_than_the_head_is_refused_before_weights_are_read(
    kind: str, tmp_path: Path
) -> None:
    change_config(save_tiny(kind, tmp_path), vocab_size=50)
    with pytest.raises(ModelError, match=r"embed_tokens.weight has shape \(40, 32\), .* \(50, 32\)"):
        check_pretrained(tmp_path)


def test_servers_find_the_weights_of_versions_unless_transformers_stacks_experts(tmp_path: Path) -> None:
    found = {}
    for kind in FAMILIES:
        folder = save_tiny(kind, tmp_path / kind)
        found[kind] = has_published_names(folder, load_config(folder))
    assert [kind for kind, is_found in found.items() if not is_found] == ["deepseek_v3", "qwen3_next"]


def test_a_head_reads_an_attribute_of_its_layers_and_a_config_an_infinite_number(tmp_path: Path) -> None:
    """As in Falcon-H1: transformers writes its time_step_limit as an object."""
    mamba = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    }
    config, flat = load_pretrained(save_tiny("falcon_h1", tmp_path, **mamba, lm_head_multiplier=0.5))
    assert "__float__" in (tmp_path / "config.json").read_text()
    model = TransformersModel(config, WeightLayout(config).views(flat), torch.device("cpu"), torch.float32)
    tokens = torch.arange(1, 13)[None]
    with torch.no_grad():
        logits = model.logits(model.hidden_states(tokens)[0])
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits[0]
    torch.testing.assert_close(logits, expected)


def test_a_family_of_the_own_decoder_stays_with_it(tmp_path: Path) -> None:
    save_tiny("mistral", tmp_path)
    assert isinstance(load_config(tmp_path), TransformersConfig)
    change_config(tmp_path, sliding_window=None)
    assert type(load_config(tmp_path)) is ModelConfig


def test_adapters_are_for_linear_layers_without_head_and_routers(tmp_path: Path) -> None:
    found = {kind: load_config(save_tiny(kind, tmp_path / kind)).linear_names for kind in FAMILIES}
    llama = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert found["gemma3_text"] == found["llama4_text"] == llama
    assert found["phi"] == ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
    assert {*found["phi3"]} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert found["gpt_oss"] == llama[:4]
