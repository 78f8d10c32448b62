"""The sampler on the device that holds the logits; it samples the tokens that `sampler.sample` does.

The logits of many rows and a large vocabulary are not copied to the host. No operation waits for the device
or depends on values, so sampling can be part of a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dora.engine.kernels.sampler import Int64s, SamplingMetadata

_GOLDEN, _MIX_1, _MIX_2 = (z - 2**64 for z in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_PART_TOKENS = 128  # of the vocabulary that are summed before the search inside a part


class DeviceSamplingMetadata(NamedTuple):
    """SAMPLING_DTYPE as tensors; rows without filters have values that keep all tokens."""

    ints: Tensor  # int64 [3, N]: stream (its bits), is_greedy, top_k
    floats: Tensor  # fp64 [3, N]: temperature, top_p, min_p


class DeviceSamplerOutput(NamedTuple):
    """See `SamplerOutput`: int64 tokens [N] and fp32 log-probs [3, N]."""

    tokens: Tensor
    logprobs: Tensor


def device_metadata(
    metadata: SamplingMetadata, indices: Int64s, num_rows: int, vocab: int
) -> DeviceSamplingMetadata:
    """Tensors on the host for `num_rows` rows: `metadata` [N] at `indices` [N]; all other rows are greedy."""
    top_k, is_filtered = metadata["top_k"], metadata["is_filtered"]
    ints, floats = np.ones((3, num_rows), np.int64), np.ones((3, num_rows))
    ints[0, indices], ints[1, indices] = metadata["stream"].copy().view(np.int64), metadata["is_greedy"]
    ints[2, indices] = np.where(is_filtered & (top_k > 0), np.minimum(top_k, vocab), vocab)
    floats[0, indices] = metadata["temperature"]
    floats[1, indices] = np.where(is_filtered, metadata["top_p"], 1)
    floats[2, indices] = np.where(is_filtered, metadata["min_p"], 0)
    return DeviceSamplingMetadata(torch.from_numpy(ints), torch.from_numpy(floats))


def sample_on_device(
    logits: Tensor,
    positions: Tensor,
    metadata: DeviceSamplingMetadata,
    *,
    is_modified: bool,
    has_filters: bool,
) -> DeviceSamplerOutput:
    """Sample a token for each row of logits [N, vocab] fp32, for the positions [N] that the tokens will have.

    Set `is_modified` if any row has another temperature than 1 or filters, and `has_filters` if any row has
    filters: all rows are then sorted, which takes many times as long.
    """
    (stream, is_greedy, top_k), (temperature, top_p, min_p) = metadata
    largest, most_probable = logits.max(1)
    weights = (logits - largest[:, None]).exp_()
    raw_totals = unfiltered_totals = weights.sum(1, dtype=torch.float64)
    if is_modified:
        weights = (logits - largest[:, None]).div_(temperature.float()[:, None]).exp_()
        unfiltered_totals = weights.sum(1, dtype=torch.float64)
    if has_filters:
        weights = _filtered(weights, unfiltered_totals, top_k, top_p, min_p)
    sampled, totals = _inverse_cdf(weights, device_uniform(stream, positions))
    tokens = torch.where(is_greedy > 0, most_probable, sampled)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - largest).double()
    tempered = chosen / temperature
    parts = (tempered - totals.log(), tempered - unfiltered_totals.log(), chosen - raw_totals.log())
    return DeviceSamplerOutput(tokens, torch.stack(parts).float())


def device_uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """See `sampler.uniform`; fp64. Products of int64 wrap around like those of uint64."""
    z = _mixed(streams + (positions + 1) * _GOLDEN)
    return _shifted(z, 12).double() * 2.0**-52


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """z >> num_bits, for the uint64 with the bits of z."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first token [N] at which the sum of weights [N, vocab] exceeds u [N] times their total, and the
    total.
    """
    num_padding = -weights.shape[1] % _PART_TOKENS
    parts = (F.pad(weights, (0, num_padding)) if num_padding else weights).unflatten(1, (-1, _PART_TOKENS))
    sums = parts.sum(2, dtype=torch.float64).cumsum(1)
    totals = sums[:, -1]
    target = u * totals
    part = (sums <= target[:, None]).sum(1).clamp_(max=sums.shape[1] - 1)[:, None]
    before = F.pad(sums, (1, 0)).gather(1, part)
    within = parts.gather(1, part[:, :, None].expand(-1, 1, _PART_TOKENS))[:, 0]
    offset = (before + within.cumsum(1, dtype=torch.float64) <= target[:, None]).sum(1)
    # Rounding may lead past the last token with a weight, to an excluded one.
    last = _PART_TOKENS - 1 - (within > 0).flip(1).byte().argmax(1)
    offset = torch.minimum(offset, last)
    return (part[:, 0] * _PART_TOKENS + offset).clamp_(max=weights.shape[1] - 1), totals


def _filtered(weights: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights [N, vocab] with those of excluded tokens at 0; see `SamplingParams`. A row's largest is 1."""
    ranked, ids = weights.sort(dim=1, descending=True, stable=True)
    cumulative = ranked.cumsum(1, dtype=torch.float64)
    in_top_k = cumulative.gather(1, top_k[:, None] - 1)[:, 0]
    has_top_k = top_k < weights.shape[1]
    limit = top_p * torch.where(has_top_k, in_top_k, totals)
    limit.masked_fill_(top_p >= 1, torch.inf)
    rank = torch.arange(weights.shape[1], device=weights.device)
    kept = (rank < top_k[:, None]) & (ranked >= min_p[:, None])
    kept &= cumulative - ranked < limit[:, None]
    return torch.zeros_like(weights).scatter_(1, ids, ranked * kept)
