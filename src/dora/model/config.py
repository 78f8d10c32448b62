"""The shape of a decoder, as a Hugging Face `config.json` states it.

DORA-RL's own decoder supports four families: Llama (also Mistral without a sliding window), Qwen2 (and
2.5), Qwen3 and Qwen3-MoE. `ModelConfig.from_dict` rejects models that it would compute wrongly.
`TransformersConfig` is the shape of any other causal language model, which transformers computes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dora.errors import ModelError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_MOE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
_SCALED = ("factor", "original_max_position_embeddings")
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": (*_SCALED, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_SCALED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_MISTRAL_WINDOW = 4096  # transformers' default
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
VISION_TOWER = "model.visual."  # the prefix of the tensors that images go through


class UnsupportedModelError(ModelError):
    """The model is valid, and the own decoder would compute it wrongly."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; fields are named as in `config.json`. Dense models have `num_experts` = 0."""

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
        """Whether each head of queries and keys has an RMS norm."""
        return self.model_type.startswith("qwen3")

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts (MoE)."""
        if not self.num_experts:
            return ()
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in dense)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The last parts of the names of the linear layers, without the head and the experts of a mixture.

        Experts have the names of a dense MLP; the name of the parent distinguishes them.
        """
        attention, dense = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        if len(self.moe_layers) == self.num_hidden_layers:
            return attention
        return (*attention, *(f"mlp.{name}" if self.moe_layers else name for name in dense))

    @property
    def num_kv_layers(self) -> int:
        """Layers of a KV pool: those of the decoder, and extra ones for the experts of each token (int16)."""
        num_bytes = 2 * len(self.moe_layers) * self.num_experts_per_tok
        return self.num_hidden_layers + -(-num_bytes // (8 * self.num_key_value_heads * self.head_dim))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in the KV pool, in fp32: 2 * layers * kv heads * head_dim * 4."""
        return 2 * self.num_kv_layers * self.num_key_value_heads * self.head_dim * 4

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json` of transformers 5 or older.

        Raises UnsupportedModelError for models that the own decoder would compute wrongly, ModelError for
        values that do not fit each other, KeyError for missing keys.
        """
        raw = _mistral_as_llama(raw)
        _check_supported(raw)
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
            **(_moe_fields(raw) if kind == "qwen3_moe" else {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads as the same model."""
        shape = {k: v for k, v in asdict(self).items() if self.num_experts or k not in _MOE_KEYS}
        scaling = {} if self.rope_scaling is None else self.rope_scaling.to_dict()
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            **shape,
            "rope_scaling": scaling or None,  # transformers 4 does not read rope_parameters
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "use_sliding_window": False,
            "dtype": "float32",
        }

    def without_head(self) -> ModelConfig:
        """The shape without the tensors of the vocabulary's head, except for a tied embedding."""
        return replace(self, tie_word_embeddings=True)

    def digest(self) -> str:
        """Digest (32 hex digits) of the shape, which models must share to use each other's KV."""
        content = json.dumps(self.to_dict(), sort_keys=True).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class VisionConfig:
    """How a model of the Qwen-VL families reads an image, from `config.json` and `preprocessor_config.json`.

    The image is resized to `min_pixels` to `max_pixels` and cut into patches of `patch_size` pixels a side.
    `merge_size` times `merge_size` patches become a token, between `start_token_id` and `end_token_id`. A
    still image is `temporal_patch_size` equal frames. `mean` and `std` normalise each channel.
    """

    image_token_id: int
    start_token_id: int
    end_token_id: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def token_side(self) -> int:
        """Pixels of a token's side; the sides of a resized image are multiples."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """The shape of a causal language model that transformers computes.

    `source` is the text of its `config.json`, `shapes` are its tensors by transformers' name, in the order of
    the flat buffer. The router of a mixture of experts is its own, so `moe_layers` is empty. `linears` are
    the last parts of the names of its linear layers, without the head. `shares_layers`: several layers have
    the same weights. The tensors of the `backbone` have this prefix, the others are the head. `vision` is
    that of a model that reads images.
    """

    source: str = "{}"
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    linears: tuple[str, ...] = ()
    shares_layers: bool = False
    backbone: str = "model"
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        """transformers validates the values."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def linear_names(self) -> tuple[str, ...]:
        return self.linears

    @property
    def num_kv_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def active_parameters(self) -> float:
        """Elements of the layers' matrices that one token is multiplied with, without those of images."""
        share = self.num_experts_per_tok / self.num_experts if self.num_experts else 1.0
        shapes = [(name, shape) for name, shape in self.shapes if not name.startswith(VISION_TOWER)]
        sizes = {name: math.prod(shape) for name, shape in shapes if len(shape) > 1}
        ends = [name for name in sizes if "embed" in name or name.startswith("lm_head")]
        return sum(size * (share if ".experts." in name else 1.0) for name, size in sizes.items()) - sum(
            sizes[name] for name in ends
        )

    def without_head(self) -> ModelConfig:
        shapes = ((name, shape) for name, shape in self.shapes if name.startswith(f"{self.backbone}."))
        return replace(self, shapes=tuple(shapes))

    def to_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.source)
        return content


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is scaled to longer contexts; fields are named as in `config.json`."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # this and the following: yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_dict(cls, rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
        """Read `rope_parameters` or `rope_scaling`; None for unscaled RoPE.

        Raises ModelError for unsupported kinds, KeyError for missing keys.
        """
        kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor")
        if factor not in (None, 1.0):
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor = {factor} is not supported: RoPE must rotate "
                "whole heads; use a model with partial_rotary_factor = 1"
            )
        if kind == "default":
            return None
        if kind not in _ROPE_KEYS:
            is_length_dependent = kind in LENGTH_DEPENDENT_ROPE
            reason = "keys would depend on the sequence length" if is_length_dependent else "unknown"
            raise ModelError(
                f"config.json: rope_type = {kind!r} is not supported ({reason}); set 'yarn', or 'default' if "
                f"the original context is enough; supported: default, {', '.join(_ROPE_KEYS)}"
            )
        values = {key: rope[key] for key in _ROPE_KEYS[kind] if rope.get(key) is not None}
        original = int(values.get("original_max_position_embeddings", max_positions))
        if kind == "yarn":
            values.setdefault("factor", max_positions / original)
        values |= {"factor": float(values["factor"]), "original_max_position_embeddings": original}
        return cls(kind, **values)

    def to_dict(self) -> dict[str, Any]:
        """The keys that `from_dict` reads for this kind of scaling."""
        values = {key: getattr(self, key) for key in _ROPE_KEYS[self.rope_type]}
        return {"rope_type": self.rope_type} | {k: v for k, v in values.items() if v is not None}

    @property
    def cos_sin_factor(self) -> float:
        """The factor of cos and sin: YaRN's (arXiv 2309.00071, section 3.4), else 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def _mistral_as_llama(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A Mistral whose layers attend to the whole context is a Llama. Raises ModelError for any other."""
    if raw.get("model_type") != "mistral":
        return raw
    window = raw.get("sliding_window", _MISTRAL_WINDOW)
    if window is not None:
        raise UnsupportedModelError(
            f"config.json: model_type = 'mistral' with sliding_window = {window} is not supported: every "
            "layer must attend to the whole context; use a Mistral whose sliding_window is null"
        )
    return {**raw, "model_type": "llama"}


def _check_supported(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model that this decoder would compute wrongly."""
    attends_to_all = "every layer must attend to the whole context"
    layer_types = set(raw.get("layer_types") or ())
    rules = {
        "quantization_config": (not raw.get("quantization_config"), "use the bf16, fp16 or fp32 checkpoint"),
        "model_type": (
            raw.get("model_type") in _ARCHITECTURES,
            f"DORA-RL's decoder computes {', '.join(_ARCHITECTURES)}",
        ),
        "hidden_act": (raw.get("hidden_act", "silu") == "silu", "the activation must be 'silu'"),
        "use_sliding_window": (not raw.get("use_sliding_window"), attends_to_all),
        "layer_types": (layer_types <= {"full_attention"}, attends_to_all),
    }
    for key, (is_supported, rule) in rules.items():
        if not is_supported:
            raise UnsupportedModelError(f"config.json: {key} = {raw.get(key)!r} is not supported: {rule}")


def _moe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": int(raw.get("num_local_experts") or raw["num_experts"]),
        "num_experts_per_tok": int(raw["num_experts_per_tok"]),
        "moe_intermediate_size": int(raw["moe_intermediate_size"]),
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        "decoder_sparse_step": int(raw.get("decoder_sparse_step", 1)),
        "mlp_only_layers": tuple(raw.get("mlp_only_layers") or ()),
    }
