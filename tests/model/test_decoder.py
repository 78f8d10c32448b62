from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families import (
    CONFIGS,
    SCALED_ROPE,
    compute_logits,
    random_tokens,
    random_weights,
    transformers_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained

TINY = CONFIGS["qwen3"]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def check_logits(model: Any, config: ModelConfig, flat: Tensor, tokens: Tensor) -> Tensor:
    """The weights have the logits of a transformers model. Returns these."""
    with torch.no_grad():
        expected: Tensor = model(tokens).logits
    torch.testing.assert_close(compute_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)
    return expected


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_a_transformers_model(name: str, tmp_path: Path) -> None:
    model = transformers_model(name)
    model.save_pretrained(tmp_path)
    config, flat = load_pretrained(tmp_path)
    assert config == CONFIGS[name]
    check_logits(model, config, flat, random_tokens(3, 40))


def test_a_mistral_without_a_sliding_window_is_a_llama(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "sliding_window": None}
    model = transformers_model("llama", mistral)
    assert model.config.model_type == "mistral"
    model.save_pretrained(tmp_path)
    config, flat = load_pretrained(tmp_path)
    assert config == CONFIGS["llama"]
    check_logits(model, config, flat, random_tokens(3, 40))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", ["llama-untied", "qwen2", "qwen3", "qwen3_moe"])
def test_logits_with_scaled_rope_equal_those_of_a_transformers_model(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = transformers_model(name, rope_type=kind, rope_theta=50.0, **SCALINGS[kind])
    tokens = random_tokens(2, 64)
    model.save_pretrained(tmp_path)
    config, flat = load_pretrained(tmp_path)
    assert config.rope_scaling is not None
    expected = check_logits(model, config, flat, tokens)
    assert float((compute_logits(CONFIGS[name], flat, tokens) - expected).abs().max()) > 0.01


@pytest.mark.parametrize("config", [*CONFIGS.values(), SCALED_ROPE], ids=[*CONFIGS, "scaled RoPE"])
def test_transformers_loads_a_saved_folder(config: ModelConfig, tmp_path: Path) -> None:
    flat = random_weights(config)
    save_pretrained(tmp_path, config, flat)
    reloaded, loaded = load_pretrained(tmp_path)
    assert reloaded == config
    assert torch.equal(loaded, flat)
    loaded_model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = loaded_model
    assert not any(report.values())
    check_logits(model, config, flat, random_tokens(2, 60))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_right_padding_changes_no_logits(name: str) -> None:
    config = CONFIGS[name]
    flat, tokens = random_weights(config), random_tokens(2, 20)
    padded = torch.cat((tokens, torch.zeros(2, 9, dtype=torch.int64)), dim=1)
    whole = compute_logits(config, flat, padded)[:, :20]
    torch.testing.assert_close(whole, compute_logits(config, flat, tokens), atol=1e-5, rtol=0)
