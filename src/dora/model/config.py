"""The shape of a decoder, as a Hugging Face `config.json` states it.

Four families are computed: Llama, Qwen2 (and 2.5), Qwen3 and Qwen3-MoE. What this decoder
would compute wrongly is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dora.errors import ModelError
from dora.model.rope import RopeScaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_REASONS = {  # by the beginning of a model_type
    "mistral": "where its sliding_window is null it is a Llama: set model_type to 'llama'",
    "mixtral": "its router and expert names differ; take a Qwen3-MoE",
    "qwen2_moe": "it has experts that all tokens share; take a Qwen3-MoE",
    "qwen3_next": "it has linear attention; take a Qwen3 or Qwen3-MoE",
    "deepseek": "it has latent attention; its distilled Llama and Qwen2 models are supported",
    "gemma": "it has other norms and a sliding window; take a Qwen3 or Llama of its size",
    "phi": "it has fused projections or rotates part of a head; take a Qwen3 or Llama of its size",
    "glm": "it rotates part of a head; take a Qwen3 or Qwen3-MoE of its size",
    "gpt2": "it has learned positions; take a Qwen3 or Llama of its size",
}
_MIXTURE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape; every field has the name it has in `config.json`.

    `num_experts` is 0 where no layer is a mixture of experts.
    """

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
    model_type: str = "qwen3"
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; change one of them"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim} is odd; RoPE needs an even head_dim")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must be from 1 to "
                f"num_experts = {self.num_experts}"
            )
        if self.decoder_sparse_step < 1:
            raise ModelError(f"decoder_sparse_step = {self.decoder_sparse_step} must be at least 1")

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return self.model_type.startswith("qwen3")

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts."""
        if not self.num_experts:
            return ()
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in dense)

    @property
    def num_kv_layers(self) -> int:
        """Layers of a KV pool: the decoder's, and room for the experts each token was sent to (int16)."""
        num_bytes = 2 * len(self.mixture_layers) * self.num_experts_per_tok
        return self.num_hidden_layers + -(-num_bytes // (8 * self.num_key_value_heads * self.head_dim))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token keeps in the KV pool, in fp32: 2 * layers * kv heads * head_dim * 4."""
        return 2 * self.num_kv_layers * self.num_key_value_heads * self.head_dim * 4

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`, of transformers 5 or older.

        Raises ModelError for what this decoder does not compute, KeyError for what is missing.
        """
        _refuse(raw)
        kind, hidden, heads = raw["model_type"], int(raw["hidden_size"]), int(raw["num_attention_heads"])
        max_positions = int(raw["max_position_embeddings"])
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        rope = {"partial_rotary_factor": raw.get("partial_rotary_factor"), **rope.get("full_attention", rope)}
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            model_type=kind,
            rope_scaling=RopeScaling.from_dict(rope, max_positions),
            attention_bias=kind != "qwen2" and bool(raw.get("attention_bias")),
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias")),
            **(_mixture(raw) if kind == "qwen3_moe" else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads as the same model."""
        shape = {k: v for k, v in asdict(self).items() if self.num_experts or k not in _MIXTURE_KEYS}
        scaling = {} if self.rope_scaling is None else self.rope_scaling.to_dict()
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            **shape,
            "rope_scaling": scaling or None,  # for transformers 4, which reads no rope_parameters
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "use_sliding_window": False,
            "dtype": "float32",
        }

    def digest(self) -> str:
        """Digest (32 hex digits) of the shape: equal for models that can use each other's KV."""
        content = json.dumps(self.to_dict(), sort_keys=True).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def _refuse(raw: Mapping[str, Any]) -> None:
    """Raises ModelError naming what this decoder would compute wrongly."""
    kind = raw.get("model_type")
    if kind not in _ARCHITECTURES:
        reasons = [text for start, text in _REASONS.items() if str(kind).startswith(start)]
        remedy = reasons[0] if reasons else "take a checkpoint of one of these"
        raise ModelError(
            f"config.json: model_type = {kind!r} is not supported; supported: {', '.join(_ARCHITECTURES)}; "
            f"{remedy}"
        )
    rules = {
        "hidden_act": (raw.get("hidden_act", "silu") == "silu", "the activation must be 'silu'"),
        "use_sliding_window": (not raw.get("use_sliding_window"), "every layer attends to the whole context"),
        "layer_types": (
            set(raw.get("layer_types") or ()) <= {"full_attention"},
            "every layer attends to the whole context",
        ),
        "quantization_config": (not raw.get("quantization_config"), "use the bf16, fp16 or fp32 checkpoint"),
    }
    for key, (holds, rule) in rules.items():
        if not holds:
            raise ModelError(f"config.json: {key} = {raw[key]!r} is not supported by this decoder: {rule}")


def _mixture(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": int(raw.get("num_local_experts") or raw["num_experts"]),
        "num_experts_per_tok": int(raw["num_experts_per_tok"]),
        "moe_intermediate_size": int(raw["moe_intermediate_size"]),
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        "decoder_sparse_step": int(raw.get("decoder_sparse_step", 1)),
        "mlp_only_layers": tuple(raw.get("mlp_only_layers") or ()),
    }
