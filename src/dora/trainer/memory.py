"""What one micro-batch takes while it is computed.

docs/trainer.md has the formulas, and those of what lies beside it.
"""

from __future__ import annotations

from dora.model.config import ModelConfig

_FP32_BYTES = 4
_LOGITS_BUFFERS = 2  # logits and log-probs, or log-probs and probabilities


def activation_bytes(config: ModelConfig, num_tokens: int, num_bytes: int, keeps_activations: bool) -> int:
    """What the layers keep of `num_tokens` for the backward pass, at its largest.

    `num_bytes` are those of a number that is computed with; norms keep theirs in fp32. Without
    `keeps_activations` it is each layer's input, and all of the one layer that is running again.
    """
    layers = [_layer_bytes(config, i, num_bytes) for i in range(config.num_hidden_layers)]
    inputs = num_bytes * config.hidden_size * len(layers)
    ends = (2 * _FP32_BYTES + num_bytes) * config.hidden_size  # the last norm, and what the head reads
    return num_tokens * (ends + (sum(layers) if keeps_activations else inputs + max(layers)))


def logits_bytes(config: ModelConfig, chunk_tokens: int, num_bytes: int, learns_head: bool = True) -> int:
    """A chunk of the vocabulary's logits and the head's gradient; and what is converted, logits and head."""
    copy = 0 if num_bytes == _FP32_BYTES else num_bytes
    of_head = (learns_head * _FP32_BYTES + copy) * config.hidden_size
    return config.vocab_size * ((_LOGITS_BUFFERS * _FP32_BYTES) * chunk_tokens + of_head)


def _layer_bytes(config: ModelConfig, layer: int, num_bytes: int) -> int:
    """Per token: norms keep their input and the normed one; all else what it reads."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    normed = 2 * hidden + (queries + keys if config.has_qk_norm else 0)
    computed = 2 * hidden + 3 * queries + 2 * keys
    if layer in config.mixture_layers:
        computed += config.num_experts_per_tok * (4 * config.moe_intermediate_size + 3 * hidden)
    else:
        computed += 4 * config.intermediate_size
    return 2 * _FP32_BYTES * normed + num_bytes * computed
