"""The sampler on the device that holds the logits, with the same draws as `sample`.

A step draws for many rows of a large vocabulary there, so the logits are not copied to the host. Nothing
here waits for the device or depends on the numbers, so it can be part of a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dora.engine.sampler import Int64s, Rules

_GOLDEN, _MIX_1, _MIX_2 = (z - 2**64 for z in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_PART = 128  # tokens of the vocabulary that are added up before they are looked at one by one


class DeviceRules(NamedTuple):
    """RULE as tensors; rows without filters have those that keep all tokens."""

    ints: Tensor  # int64 [3, N]: stream (its bits), is_greedy, top_k
    floats: Tensor  # fp64 [3, N]: divisor, top_p, min_p


class DeviceDrawn(NamedTuple):
    """See `Drawn`: int64 tokens [N] and fp32 log-probs [3, N]."""

    tokens: Tensor
    logprobs: Tensor


def rules_for(rules: Rules, places: Int64s, num_rows: int, vocab: int) -> DeviceRules:
    """Rules [N] at these places [N] of `num_rows`, on the host; all other rows are greedy."""
    top_k, is_filtered = rules["top_k"], rules["is_filtered"]
    ints, floats = np.ones((3, num_rows), np.int64), np.ones((3, num_rows))
    ints[0, places], ints[1, places] = rules["stream"].copy().view(np.int64), rules["is_greedy"]
    ints[2, places] = np.where(is_filtered & (top_k > 0), np.minimum(top_k, vocab), vocab)
    floats[0, places] = rules["divisor"]
    floats[1, places] = np.where(is_filtered, rules["top_p"], 1)
    floats[2, places] = np.where(is_filtered, rules["min_p"], 0)
    return DeviceRules(torch.from_numpy(ints), torch.from_numpy(floats))


def uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), fp64; see `sampler.uniform`. Products of int64 wrap around as those of uint64 do."""
    z = _mixed(streams + (positions + 1) * _GOLDEN)
    return _shifted(z, 12).double() * 2.0**-52


def draw(
    logits: Tensor, positions: Tensor, rules: DeviceRules, *, is_changed: bool, has_filters: bool
) -> DeviceDrawn:
    """Draw a token for each row of logits [N, vocab] fp32, for the positions [N] they will have.

    `is_changed` says that some row is not at temperature 1, or filtered; `has_filters` that some row is
    filtered: then all rows are sorted, which takes many times as long.
    """
    (stream, is_greedy, top_k), (divisor, top_p, min_p) = rules
    largest, likeliest = logits.max(1)
    weights = (logits - largest[:, None]).exp_()
    raw_totals = unfiltered_totals = weights.sum(1, dtype=torch.float64)
    if is_changed:
        weights = (logits - largest[:, None]).div_(divisor.float()[:, None]).exp_()
        unfiltered_totals = weights.sum(1, dtype=torch.float64)
    if has_filters:
        weights = _filtered(weights, unfiltered_totals, top_k, top_p, min_p)
    drawn, totals = _inverse(weights, uniform(stream, positions))
    tokens = torch.where(is_greedy > 0, likeliest, drawn)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - largest).double()
    tempered = chosen / divisor
    parts = (tempered - totals.log(), tempered - unfiltered_totals.log(), chosen - raw_totals.log())
    return DeviceDrawn(tokens, torch.stack(parts).float())


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """z >> num_bits of the uint64 that has the bits of z."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _inverse(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first token [N] at which the sum of weights [N, vocab] exceeds u times their total, and that."""
    num_lacking = -weights.shape[1] % _PART
    parts = (F.pad(weights, (0, num_lacking)) if num_lacking else weights).unflatten(1, (-1, _PART))
    sums = parts.sum(2, dtype=torch.float64).cumsum(1)
    totals = sums[:, -1]
    reach = u * totals
    part = (sums <= reach[:, None]).sum(1).clamp_(max=sums.shape[1] - 1)[:, None]
    before = F.pad(sums, (1, 0)).gather(1, part)
    own = parts.gather(1, part[:, :, None].expand(-1, 1, _PART))[:, 0]
    inside = (before + own.cumsum(1, dtype=torch.float64) <= reach[:, None]).sum(1)
    last = _PART - 1 - (own > 0).flip(1).byte().argmax(1)  # rounding may lead past it, to an excluded token
    inside = torch.minimum(inside, last)
    return (part[:, 0] * _PART + inside).clamp_(max=weights.shape[1] - 1), totals


def _filtered(weights: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights [N, vocab] with those of excluded tokens at 0; see `Sampling`. The largest of a row is 1."""
    ranked, ids = weights.sort(dim=1, descending=True, stable=True)
    cumulative = ranked.cumsum(1, dtype=torch.float64)
    in_top_k = cumulative.gather(1, top_k[:, None] - 1)[:, 0]
    is_cut = top_k < weights.shape[1]
    reach = top_p * torch.where(is_cut, in_top_k, totals)
    reach.masked_fill_(top_p >= 1, torch.inf)
    place = torch.arange(weights.shape[1], device=weights.device)
    kept = (place < top_k[:, None]) & (ranked >= min_p[:, None])
    kept &= cumulative - ranked < reach[:, None]
    return torch.zeros_like(weights).scatter_(1, ids, ranked * kept)
