"""The shape of a decoder, as a Hugging Face `config.json` states it.

What this decoder would compute wrongly is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dora.errors import ModelError

_SUPPORTED = ("qwen3",)


@dataclass(frozen=True)
class ModelConfig:
    """Qwen3's shape; every field has the name it has in `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; change one of them"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim} is odd; RoPE needs an even head_dim")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values one token keeps in fp32: 2 * layers * kv heads * head_dim * 4."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 4

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`. Raises ModelError for what this decoder does not compute."""
        kind = raw.get("model_type")
        if kind not in _SUPPORTED:
            raise ModelError(
                f"model_type = {kind!r} is not supported; supported: {', '.join(_SUPPORTED)}. "
                "Convert the checkpoint to one of these"
            )
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        refused = {
            "rope_type": rope_type if rope_type != "default" else None,
            "attention_bias": raw.get("attention_bias") or None,
            "use_sliding_window": raw.get("use_sliding_window") or None,
            "hidden_act": raw.get("hidden_act") if raw.get("hidden_act", "silu") != "silu" else None,
        }
        for key, value in refused.items():
            if value is not None:
                raise ModelError(f"config.json: {key} = {value!r} is not supported by this decoder")
        heads = int(raw["num_attention_heads"])
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads", heads)),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads as the same Qwen3 model."""
        shape = asdict(self)
        theta = shape.pop("rope_theta")
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **shape,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "dtype": "float32",
        }
