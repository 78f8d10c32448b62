"""Tiny random models of families that the own decoder does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOW: dict[str, Any] = {"sliding_window": 4}  # shorter than the sequences of the tests
_MIXED_LAYERS = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_MIXED_LAYERS, "tie_word_embeddings": True, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **_MIXED_LAYERS,
        "tie_word_embeddings": True,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 40,
        "hidden_size_per_layer_input": 8,
    },
    "gemma2": {**_MIXED_LAYERS, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "mistral": _WINDOW,
    "phi": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.1},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {**_MIXED_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_bigcode": {"n_inner": 48},  # as GPT-2, with linear layers in place of convolutions
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "llama4_text": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
    },
}


def save_tiny(kind: str, folder: Path, **changes: Any) -> Path:
    """A folder with a random model of this model_type. `changes` are those of its `config.json`."""
    torch.manual_seed(0)
    shape = {**SHAPE, **FAMILIES.get(kind, {}), **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.float().save_pretrained(folder)
    return folder
