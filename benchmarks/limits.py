"""The memory bandwidth and FLOPS of one thread of this machine, and the roofline of a decode step on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout

_LARGE = 2**27  # floats: 512 MiB, more than any cache holds
_SIDE = 1536  # of square matrices


class Limits(NamedTuple):
    """Memory bandwidth in bytes/s and fp32 matrix products in FLOP/s, the best of several tries."""

    bandwidth: float
    flops: float


def measure_limits() -> Limits:
    """Multiply large matrices, and read and copy large tensors; the faster of these is the bandwidth."""
    large, other = torch.ones(_LARGE), torch.zeros(_LARGE)
    square, product = torch.rand(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
    reading = large.nbytes / _min_s(large.sum)
    copying = 2 * large.nbytes / _min_s(lambda: other.copy_(large))
    flops = 2 * _SIDE**3 / _min_s(lambda: torch.mm(square, square, out=product))
    return Limits(max(reading, copying), flops)


def roofline_s(config: ModelConfig, lengths: list[int], limits: Limits) -> float:
    """The minimum time of a step whose rows have contexts of these lengths, in tokens.

    max((weights + KV) / bandwidth, 2 * parameters * rows / FLOPS), without overhead of the host.
    """
    numel = WeightLayout(config).numel
    num_bytes = 4 * numel + config.kv_bytes_per_token * sum(lengths)
    return max(num_bytes / limits.bandwidth, 2 * numel * len(lengths) / limits.flops)


def _min_s(run: Callable[[], object]) -> float:
    """CPU time of the fastest of five runs after a warm-up."""
    run()
    found = []
    for _ in range(5):
        began_s = time.process_time()
        run()
        found.append(time.process_time() - began_s)
    return min(found)
