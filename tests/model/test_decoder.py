from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dora.model.config import ModelConfig
from dora.model.decoder import causal_attend, forward, logits, rope_tables
from dora.model.folder import load_folder, save_folder
from dora.model.weights import Layout, initial_weights

TINY = ModelConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=20_000.0,
)


def our_logits(config: ModelConfig, flat: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    batch, length = tokens.shape
    weights = Layout(config).views(flat)
    cos, sin = (table.repeat(batch, 1) for table in rope_tables(config, length))
    hidden = forward(weights, config, tokens.flatten(), cos, sin, causal_attend(batch, length))
    return logits(weights, hidden).view(batch, length, -1)


def drawn_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_a_transformers_model(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=31,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 20_000.0},
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    config, flat = load_folder(tmp_path)
    assert config == replace(TINY, tie_word_embeddings=tied)
    tokens = drawn_tokens(3, 40)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(our_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_a_folder_of_ours(tied: bool, tmp_path: Path) -> None:
    config = replace(TINY, tie_word_embeddings=tied)
    flat = initial_weights(config, seed=1, std=0.3)
    save_folder(tmp_path, config, flat)
    again, loaded = load_folder(tmp_path)
    assert again == config
    assert torch.equal(loaded, flat)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = drawn_tokens(2, 30)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(our_logits(config, flat, tokens), expected, atol=1e-5, rtol=0)


def test_padding_on_the_right_changes_no_real_token() -> None:
    flat = initial_weights(TINY, seed=0, std=0.3)
    tokens = drawn_tokens(2, 20)
    padded = torch.cat((tokens, torch.zeros(2, 9, dtype=torch.int64)), dim=1)
    whole = our_logits(TINY, flat, padded)[:, :20]
    torch.testing.assert_close(whole, our_logits(TINY, flat, tokens), atol=1e-5, rtol=0)
