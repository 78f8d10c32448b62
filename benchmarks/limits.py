"""What one thread of this machine can do, and the least time that a decode step could take on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from dora.model.config import ModelConfig
from dora.model.weights import Layout

_LARGE = 2**27  # floats: 512 MiB, more than any cache holds
_SIDE = 1536  # of square matrices


class Limits(NamedTuple):
    """Memory bandwidth in bytes/s and fp32 matrix products in FLOP/s, the best of several tries."""

    bandwidth: float
    flops: float


def measure_limits() -> Limits:
    """Read and copy large memory, multiply large matrices; the faster way of moving bytes counts."""
    large, other = torch.ones(_LARGE), torch.zeros(_LARGE)
    square, product = torch.rand(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
    reading = large.nbytes / _least_s(large.sum)
    copying = 2 * large.nbytes / _least_s(lambda: other.copy_(large))
    flops = 2 * _SIDE**3 / _least_s(lambda: torch.mm(square, square, out=product))
    return Limits(max(reading, copying), flops)


def roofline_s(config: ModelConfig, lengths: list[int], limits: Limits) -> float:
    """Least time of a step whose rows have contexts of these lengths, in tokens.

    max((weights + KV) / bandwidth, 2 * parameters * rows / FLOPS), without what the host does in between.
    """
    numel = Layout(config).numel
    num_bytes = 4 * numel + config.kv_bytes_per_token * sum(lengths)
    return max(num_bytes / limits.bandwidth, 2 * numel * len(lengths) / limits.flops)


def _least_s(run: Callable[[], object]) -> float:
    """CPU time of the fastest of five runs; the first one is not counted."""
    run()
    found = []
    for _ in range(5):
        began_s = time.process_time()
        run()
        found.append(time.process_time() - began_s)
    return min(found)
