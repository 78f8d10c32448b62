"""How fast a trainer computes, beside what its device could do.

Model FLOPs: 2 for each multiplication in a forward pass, three times that with the backward pass;
what is computed again to save memory does not count (PaLM's MFU, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dora.model.config import ModelConfig
from dora.trainer.packing import Packed

# (bf16, fp32) TFLOP/s without sparsity, by makers' data sheets. A name with a word more is another product.
_PEAKS = {
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
_SAYS_NOTHING = re.compile(r"NVIDIA|GEFORCE|SXM\d?|HBM\d\w?|\d+GB?")  # maker, socket and memory


def forward_flops(config: ModelConfig, batch: Packed) -> float:
    """One pass over a batch, whose shared prompts are computed once; three times that with the way back."""
    head_dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    hidden, mixtures = config.hidden_size, len(config.mixture_layers)
    layers = config.num_hidden_layers
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 3 * hidden * config.intermediate_size
    chosen = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    mixture = chosen + hidden * config.num_experts
    per_token = layers * attention + (layers - mixtures) * dense + mixtures * mixture
    lengths = map(len, batch.members)  # attention reads a shared prompt for each of them
    scores = layers * heads * head_dim * sum(length * (length + 1) for length in lengths)
    return 2.0 * (per_token * len(batch.inputs) + scores + len(batch.targets) * hidden * config.vocab_size)


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """What a device can do at most, where that is known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    found = _PEAKS.get(" ".join(word for word in words if not _SAYS_NOTHING.fullmatch(word)))
    return None if found is None else found[dtype == "float32"]


class Speed:
    """Time that a trainer process has worked on a step, and what it did in it."""

    def __init__(
        self, device: torch.device, dtype: str, peak: float | None = None, num_ranks: int = 1
    ) -> None:
        """`peak` in TFLOP/s; without, that of the device if it is known. Each rank has a device like it."""
        self._device, self._peak = device, (peak or peak_tflops(device, dtype) or 0.0) * num_ranks
        self._busy_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside is work."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - began_s

    def end_step(self, tflop: float) -> dict[str, float]:
        """Metrics of a step with so many TFLOP; the next one begins."""
        busy_s, self._busy_s = self._busy_s, 0.0
        rate = tflop / max(1e-9, busy_s)
        metrics = {
            "timing_s/update_actor": busy_s,
            "perf/tflops/actor": rate,
            "perf/peak_memory_gb": self._peak_memory_bytes() / 1e9,
        }
        return metrics | ({"perf/mfu/actor": rate / self._peak} if self._peak else {})

    def _peak_memory_bytes(self) -> int:
        """Of this process: on its GPU if it has one, else resident."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest
