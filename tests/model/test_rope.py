from typing import Any

import pytest
import torch
from tests.model.families import SHAPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.decoder import rope_frequencies, rope_tables

LENGTHS = {"head_dim": 64, "max_position_embeddings": 256}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without factor": {"factor": None, "original_max_position_embeddings": 32},
    "yarn with every key": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with attention factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}


def parameters(kind: str) -> dict[str, Any]:
    return {"rope_type": kind.split()[0], **KINDS[kind]}


def make_config(**rope: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": "llama", **SHAPE, **LENGTHS, **rope})


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_tables_equal_those_of_transformers(kind: str) -> None:
    rope = {**parameters(kind), "rope_theta": 5_000.0}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SHAPE | LENGTHS, rope_parameters=dict(rope)))
    config = make_config(rope_parameters=rope)
    found = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(found, theirs.inv_freq, rtol=1e-6, atol=0)
    factor = config.rope_scaling.cos_sin_factor if config.rope_scaling else 1.0
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    expected = theirs(torch.zeros(1), torch.arange(256)[None])
    for table, other in zip(rope_tables(config, 256), expected, strict=True):
        torch.testing.assert_close(table, other[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_older_transformers_are_read(kind: str) -> None:
    new = make_config(rope_parameters={**parameters(kind), "rope_theta": 5_000.0})
    old = parameters(kind)
    old["type"] = old.pop("rope_type")
    assert make_config(rope_theta=5_000.0, rope_scaling=old if kind != "default" else None) == new
    assert ModelConfig.from_dict(new.to_dict()) == new


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"rope_type = 'dynamic' .*keys would depend on the sequence length.*yarn",
        ),
        ({"rope_type": "longrope"}, "rope_type = 'longrope' .*keys would depend on the sequence length"),
        ({"type": "mrope"}, "rope_type = 'mrope' .*unknown"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ],
)
def test_unsupported_kinds_of_rope_are_rejected_with_the_reason(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_config(rope_parameters=rope)
    with pytest.raises(KeyError, match="factor"):
        make_config(rope_parameters={"rope_type": "linear"})
