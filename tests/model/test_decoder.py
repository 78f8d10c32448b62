from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families import CONFIGS, STRETCHED, drawn_tokens, drawn_weights, our_logits, theirs
from transformers import AutoModelForCausalLM

from dora.model.config import ModelConfig
from dora.model.folder import load_folder, save_folder

TINY = CONFIGS["qwen3"]
STRETCHES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_a_transformers_model(name: str, tmp_path: Path) -> None:
    model, tokens = theirs(name), drawn_tokens(3, 40)
    model.save_pretrained(tmp_path)
    config, flat = load_folder(tmp_path)
    assert config == CONFIGS[name]
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(our_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", STRETCHES)
@pytest.mark.parametrize("name", ["llama-untied", "qwen2", "qwen3", "qwen3_moe"])
def test_stretched_positions_give_the_logits_of_a_transformers_model(
    name: str, kind: str, tmp_path: Path
) -> None:
    model, tokens = theirs(name, rope_type=kind, rope_theta=50.0, **STRETCHES[kind]), drawn_tokens(2, 64)
    model.save_pretrained(tmp_path)
    config, flat = load_folder(tmp_path)
    assert config.rope_scaling is not None
    with torch.no_grad():
        expected, plain = model(tokens).logits, our_logits(CONFIGS[name], flat, tokens)
    torch.testing.assert_close(our_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)
    assert float((plain - expected).abs().max()) > 0.01


@pytest.mark.parametrize("config", [*CONFIGS.values(), STRETCHED], ids=[*CONFIGS, "stretched"])
def test_transformers_reads_a_folder_of_ours(config: ModelConfig, tmp_path: Path) -> None:
    flat, tokens = drawn_weights(config), drawn_tokens(2, 60)
    save_folder(tmp_path, config, flat)
    again, loaded = load_folder(tmp_path)
    assert again == config
    assert torch.equal(loaded, flat)
    loaded_by_theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = loaded_by_theirs
    assert not any(report.values())
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(our_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_padding_on_the_right_changes_no_real_token(name: str) -> None:
    config = CONFIGS[name]
    flat, tokens = drawn_weights(config), drawn_tokens(2, 20)
    padded = torch.cat((tokens, torch.zeros(2, 9, dtype=torch.int64)), dim=1)
    whole = our_logits(config, flat, padded)[:, :20]
    torch.testing.assert_close(whole, our_logits(config, flat, tokens), atol=1e-5, rtol=0)
