"""A tiny model of every family: DORA's config, a transformers model, and weights that use every feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from dora.model.config import ModelConfig, RopeScaling
from dora.model.decoder import forward, lm_head, rope_tables
from dora.model.moe import Router
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.policy import packed_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTURE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
FEATURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2", "head_dim": 6},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 10},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": False},
    "qwen3_moe": {"model_type": "qwen3_moe", **MIXTURE, "norm_topk_prob": True, "tie_word_embeddings": False},
    "qwen3_moe-mixed": {
        "model_type": "qwen3_moe",
        **MIXTURE,
        "mlp_only_layers": (1,),
        "attention_bias": True,
    },
    "qwen3_moe-sparse": {"model_type": "qwen3_moe", **MIXTURE, "decoder_sparse_step": 2},
}
CONFIGS = {name: ModelConfig(**SHAPE | features) for name, features in FEATURES.items()}
SCALED_ROPE = replace(
    CONFIGS["llama"],
    rope_scaling=RopeScaling("llama3", 8.0, 16),
    rope_theta=50.0,
    max_position_embeddings=128,
)


def transformers_model(name: str, changes: Mapping[str, Any] | None = None, **rope: Any) -> Any:
    """A transformers model of that name with random weights, changed config, and RoPE as given."""
    features = {"tie_word_embeddings": True, **SHAPE, **FEATURES[name], **(changes or {})}
    features["mlp_only_layers"] = list(features.get("mlp_only_layers", ()))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **features,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, **rope},
        initializer_range=0.3,
    )
    make: Any = AutoModelForCausalLM  # has no annotations
    model = make.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model.eval()


def random_weights(config: ModelConfig, seed: int = 0) -> Tensor:
    """Random weights [numel] whose norms and biases matter too."""
    flat = initial_weights(config, seed, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    for name, view in WeightLayout(config).views(flat).items():
        if name.endswith(".bias"):
            view.normal_(0, 0.3, generator=generator)
        elif name.endswith("norm.weight"):
            view.uniform_(0.5, 1.5, generator=generator)
    return flat


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def compute_logits(config: ModelConfig, flat: Tensor, tokens: Tensor, route: Router | None = None) -> Tensor:
    """[batch, length, vocab] of tokens [batch, length]."""
    batch, length = tokens.shape
    weights = WeightLayout(config).views(flat)
    cos, sin = (table.repeat(batch, 1) for table in rope_tables(config, length))
    attend = packed_attention([torch.arange(batch * length).view(batch, length)])
    hidden = forward(weights, config, tokens.flatten(), cos, sin, lambda layer: attend, route)
    return F.linear(hidden, lm_head(weights)).view(batch, length, -1)


def greedy_output(config: ModelConfig, flat: Tensor, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Naive decoding: a full forward pass per token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(compute_logits(config, flat, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt_ids) :]
