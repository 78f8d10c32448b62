"""The models that benchmarks run, by size: the demo's, and larger ones of the same kind."""

from __future__ import annotations

from dataclasses import replace

from dora.model.config import ModelConfig

DEMO = ModelConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
)
TWO_MILLION = replace(
    DEMO, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6
)
TEN_MILLION = replace(
    DEMO, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, head_dim=64
)
THIRTY_MILLION = replace(
    DEMO,
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
SIXTY_MILLION = replace(THIRTY_MILLION, vocab_size=32_768, intermediate_size=1536, num_hidden_layers=14)
