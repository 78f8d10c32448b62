"""FLOPs, speed and memory of training.

Model FLOPs count 2 per multiply-add of a forward pass, and three times that with the backward pass. Work that
activation checkpointing repeats does not count (PaLM's MFU, arXiv 2204.02311, appendix B). docs/trainer.md
has the formulas of the memory estimates.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dora.model.config import ModelConfig, TransformersConfig
from dora.model.weights import layer_of, parameter_shapes
from dora.trainer.packing import PackedBatch

# (bf16, fp32) TFLOP/s without sparsity, from data sheets. A name with an extra word is another product.
_PEAK_TFLOPS = {
    "B200": (2250.0, 75.0),
    "H100 PCIE": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "GH200": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A100 PCIE": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A800 PCIE": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
}
_IGNORED_WORDS = re.compile(r"NVIDIA|GEFORCE|SXM\d?|HBM\d\w?|\d+GB?")  # maker, socket and memory

_FP32_BYTES = 4
_LOGITS_BUFFERS = 2  # logits and log-probs, or log-probs and probabilities


class StepTimer:
    """Time that a trainer process works on a step, and the FLOP/s and MFU from it."""

    def __init__(
        self, device: torch.device, dtype: str, peak: float | None = None, num_ranks: int = 1
    ) -> None:
        """`peak` in TFLOP/s of one rank's device; None: the device's, if it is known."""
        self._device, self._peak = device, (peak or peak_tflops(device, dtype) or 0.0) * num_ranks
        self._working_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of the block, also if it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._working_s += time.perf_counter() - start_s

    def end_step(self, tflop: float) -> dict[str, float]:
        """Metrics of a step that computed `tflop` TFLOP; restarts the timer."""
        working_s, self._working_s = self._working_s, 0.0
        rate = tflop / max(1e-9, working_s)
        metrics = {
            "timing_s/update_actor": working_s,
            "perf/tflops/actor": rate,
            "perf/peak_memory_gb": self._peak_memory_bytes() / 1e9,
        }
        return metrics | ({"perf/mfu/actor": rate / self._peak} if self._peak else {})

    def _peak_memory_bytes(self) -> int:
        """GPU memory that this process allocated at most; without a GPU, its resident memory."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """Peak TFLOP/s of a device, if it is known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    peaks = _PEAK_TFLOPS.get(" ".join(word for word in words if not _IGNORED_WORDS.fullmatch(word)))
    return None if peaks is None else peaks[dtype == "float32"]


def forward_flops(config: ModelConfig, batch: PackedBatch) -> float:
    """FLOPs of one forward pass over a batch, with shared prompts once; the backward pass is twice that."""
    head_dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    hidden, num_moe_layers = config.hidden_size, len(config.moe_layers)
    layers = config.num_hidden_layers
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 3 * hidden * config.intermediate_size
    experts = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    mixture = experts + hidden * config.num_experts
    per_token: float = layers * attention + (layers - num_moe_layers) * dense + num_moe_layers * mixture
    if isinstance(config, TransformersConfig):
        per_token = config.active_parameters
    lengths = map(len, batch.sequence_indices)  # attention reads a shared prompt for each sibling
    scores = layers * heads * head_dim * sum(length * (length + 1) for length in lengths)
    return 2.0 * (per_token * len(batch.input_ids) + scores + len(batch.targets) * hidden * config.vocab_size)


def activation_bytes(
    config: ModelConfig, num_tokens: int, num_bytes: int, activation_checkpointing: bool
) -> int:
    """Peak memory of the activations that the layers save for the backward pass of `num_tokens`.

    `num_bytes` is the size of a number in the compute dtype; norms save theirs in fp32. With
    `activation_checkpointing` each layer saves its input, and the layer that is recomputed saves everything.
    """
    saved, recomputed = _activations(config, num_bytes, activation_checkpointing)
    return num_tokens * (saved + recomputed)


def _activations(config: ModelConfig, num_bytes: int, activation_checkpointing: bool) -> tuple[int, int]:
    """Bytes per token that the forward pass saves, and that a recomputed layer adds in the backward pass."""
    layers = [_layer_bytes(config, i, num_bytes) for i in range(config.num_hidden_layers)]
    ends = (2 * _FP32_BYTES + num_bytes) * config.hidden_size  # the last norm, and the head's input
    if not activation_checkpointing:
        return ends + sum(layers), 0
    return ends + num_bytes * config.hidden_size * len(layers), max(layers)


def logits_bytes(config: ModelConfig, chunk_tokens: int, num_bytes: int, learns_head: bool = True) -> int:
    """Peak memory of the head: a chunk of logits, the head's gradient, and the head in the compute dtype."""
    copy = 0 if num_bytes == _FP32_BYTES else num_bytes
    head = (learns_head * _FP32_BYTES + copy) * config.hidden_size
    return config.vocab_size * ((_LOGITS_BUFFERS * _FP32_BYTES) * chunk_tokens + head)


def sharded_micro_batch_bytes(
    config: ModelConfig,
    num_tokens: int,
    chunk_tokens: int,
    num_bytes: int,
    activation_checkpointing: bool,
    has_reference: bool,
) -> int:
    """Peak memory of a micro-batch on one of several ranks, in addition to its shards.

    FSDP keeps embedding and head gathered in fp32 during a micro-batch, and gathers two layers at a time. The
    peak is in one of four moments: the gathering of a reference policy's embedding and head, which takes them
    twice, and the backward pass of the head, of a layer, or of the embedding.
    """
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    by_layer: Counter[str] = Counter()
    for name, num in sizes.items():
        by_layer[layer_of(name)] += num
    root = _FP32_BYTES * by_layer.pop("")
    layer = max(by_layer.values())
    saved, recomputed = _activations(config, num_bytes, activation_checkpointing)
    table = _FP32_BYTES * config.vocab_size * config.hidden_size  # the gradient of embedding or head
    gathered = 2 * num_bytes * layer
    reduced = (num_bytes + 2 * _FP32_BYTES) * layer  # gradient, copy to reduce, and the layer before's
    return root + max(
        num_tokens * saved + gathered + 2 * root * has_reference,
        num_tokens * saved + logits_bytes(config, chunk_tokens, num_bytes),
        num_tokens * (saved + recomputed) + table + gathered + reduced,
        3 * table + _FP32_BYTES * layer,  # of head and embedding, and a copy to reduce
    )


def _layer_bytes(config: ModelConfig, layer: int, num_bytes: int) -> int:
    """Bytes per token. A norm saves its input and output; every other operation saves its inputs."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    normed = 2 * hidden + (queries + keys if config.has_qk_norm else 0)
    computed = 2 * hidden + 3 * queries + 2 * keys
    if layer in config.moe_layers:
        computed += config.num_experts_per_tok * (4 * config.moe_intermediate_size + 3 * hidden)
    else:
        computed += 4 * config.intermediate_size
    return 2 * _FP32_BYTES * normed + num_bytes * computed
