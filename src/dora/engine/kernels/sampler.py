"""The sampler on the host: a request gets the same tokens in any batch, on any engine, after any migration.

The random number of a token depends only on the request's seed and the token's position. It comes from a
counter-based generator (finaliser of splitmix64: Steele, Lea and Flood, OOPSLA 2014) and selects a token by
the inverse of the cumulative distribution. No sum runs over several rows and ties are ranked by token id, so
a row's sample has the same bits in any batch. It is NumPy because a step samples few numbers and torch's
dispatch would take three times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.engine.request import SamplingParams

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
SamplingMetadata = NDArray[np.void]  # [N] of SAMPLING_DTYPE: how each row is sampled

SAMPLING_DTYPE = np.dtype(
    [
        ("stream", np.uint64),
        ("temperature", np.float32),  # 1 for greedy rows
        ("is_greedy", np.bool_),
        ("is_modified", np.bool_),  # not sampled from the distribution of the model
        ("is_filtered", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
    ]
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _12 = (np.uint64(num_bits) for num_bits in (30, 27, 31, 12))
_ID_BITS, _ID_MASK, _NO_KEY = np.uint64(32), np.uint64(2**32 - 1), np.uint64(2**64 - 1)
_CACHED_LOGITS = 2**17  # that a core's cache holds over several passes
_BLOCKS_PER_K = 8  # of the vocabulary, to bound the k-th largest weight


class SamplerOutput(NamedTuple):
    """Tokens [N] and three log-probs of each; see `Completion`."""

    tokens: Int64s
    logprobs: Float32s
    unfiltered_logprobs: Float32s
    raw_logprobs: Float32s


def sampling_metadata(seed: int, sampling: SamplingParams) -> tuple[float, ...]:
    """The fields of SAMPLING_DTYPE for one row."""
    top_k, top_p, min_p, is_greedy = sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature == 0
    is_filtered = not is_greedy and (top_k > 0 or top_p < 1 or min_p > 0)
    temperature = 1.0 if is_greedy else sampling.temperature
    is_modified = is_filtered or temperature != 1
    return (rng_stream(seed), temperature, is_greedy, is_modified, is_filtered, top_k, top_p, min_p)


def rng_stream(seed: int) -> int:
    """The id of a request's stream of random numbers, from the low 64 bits of `seed`."""
    return int(_mixed(np.array([seed % 2**64], np.uint64))[0])


def uniform(streams: UInt64s, positions: Int64s) -> Float64s:
    """Random numbers in [0, 1): one for each stream and position, and a function of these alone."""
    z = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (z >> _12).astype(np.float64) * 2.0**-52


def sample(logits: Float32s, positions: Int64s, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample a token for each row of logits [N, vocab], for the positions [N] that the tokens will have.

    Greedy rows select the first largest logit, ignore filters, and report log-probs at temperature 1.
    """
    num_rows, width = len(logits), max(1, _CACHED_LOGITS // logits.shape[1])
    if num_rows <= width:
        return _sample(logits, positions, metadata)
    parts = [slice(start, start + width) for start in range(0, num_rows, width)]
    sampled = [_sample(logits[part], positions[part], metadata[part]) for part in parts]
    return SamplerOutput(*(np.concatenate(field) for field in zip(*sampled, strict=True)))


def logprobs_of(logits: Float32s, tokens: Int64s, temperatures: Float32s) -> Float32s:
    """Unfiltered log-probs [N] of tokens [N], from logits [N, vocab] and temperatures [N or 1].

    They have the same bits as those that `sample` reports.
    """
    largest = logits.max(1)
    chosen = logits[np.arange(len(tokens)), tokens] - largest
    weights = np.exp((logits - largest[:, None]) / temperatures[:, None])
    totals = weights.cumsum(1, dtype=np.float64)[:, -1]
    found: Float32s = (chosen / temperatures - np.log(totals)).astype(np.float32)
    return found


def _mixed(z: UInt64s) -> UInt64s:
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


def _sample(logits: Float32s, positions: Int64s, metadata: SamplingMetadata) -> SamplerOutput:
    largest = logits.max(1)
    weights = logits - largest[:, None]
    temperatures = metadata["temperature"]
    modified, greedy = metadata["is_modified"].nonzero()[0], metadata["is_greedy"].nonzero()[0]
    if modified.size:
        weights /= temperatures[:, None]
    np.exp(weights, out=weights)
    filtered = _filter(weights, metadata)
    cumulative = weights.cumsum(1, dtype=np.float64)
    totals = cumulative[:, -1]
    tokens = (cumulative > (uniform(metadata["stream"], positions) * totals)[:, None]).argmax(1)
    if greedy.size:
        tokens[greedy] = logits[greedy].argmax(1)
    chosen = logits[np.arange(len(tokens)), tokens] - largest
    raw_logprobs = unfiltered = logprobs = (chosen / metadata["temperature"] - np.log(totals)).astype(
        np.float32
    )
    if filtered.size:
        unfiltered = logprobs.copy()
        unfiltered[filtered] = logprobs_of(
            logits[filtered], tokens[filtered], metadata["temperature"][filtered]
        )
    if modified.size:
        raw_logprobs = logprobs.copy()
        raw_logprobs[modified] = logprobs_of(logits[modified], tokens[modified], np.ones(1, np.float32))
    return SamplerOutput(tokens, logprobs, unfiltered, raw_logprobs)


def _filter(weights: Float32s, metadata: SamplingMetadata) -> Int64s:
    """Set the weights [N, vocab] of excluded tokens to 0 in rows with filters; see `SamplingParams`.

    The largest weight of each row is 1. Returns the indices of the rows with filters.
    """
    rows = metadata["is_filtered"].nonzero()[0]
    if not rows.size:
        return rows
    filtered, vocab = weights[rows], weights.shape[1]
    top_ks, top_ps, min_ps = (metadata[name][rows] for name in ("top_k", "top_p", "min_p"))
    limits = np.where(top_ks > 0, np.minimum(top_ks, vocab), vocab)
    totals = filtered.sum(1)
    ids, ranked, counts = _ranked(filtered, _cutoffs(filtered, totals, limits, top_ps, min_ps))
    cumulative = ranked.cumsum(1, dtype=np.float64)
    ends = np.minimum(limits, counts)
    in_top_k = cumulative[np.arange(len(rows)), ends - 1]
    reach = np.where(top_ps < 1, top_ps * np.where(limits < vocab, in_top_k, totals), np.inf)
    kept = (np.arange(ids.shape[1]) < ends[:, None]) & (ranked >= min_ps[:, None])
    kept &= cumulative - ranked < reach[:, None]
    at, ranks = kept.nonzero()
    weights[rows] = 0
    weights[rows[at], ids[at, ranks]] = ranked[at, ranks]
    return rows


def _cutoffs(
    weights: Float32s, totals: Float32s, limits: Int64s, top_ps: Float64s, min_ps: Float64s
) -> Float32s:
    """Lower bounds [N] of the weights that the filters keep, so that only a few tokens need to be sorted.

    The tokens whose weight is below (1 - top_p) / vocab of the total have less than 1 - top_p together. For
    any partition of the tokens into blocks, the k-th largest maximum is at most the k-th largest weight.
    """
    vocab = weights.shape[1]
    cutoffs: Float32s = np.maximum(min_ps, (1 - top_ps) * totals / vocab).astype(np.float32)
    for limit in np.unique(limits[limits < vocab]):
        rows = np.flatnonzero(limits == limit)
        size = max(1, vocab // (_BLOCKS_PER_K * limit))
        num_blocks = vocab // size
        blocks = weights[rows, : num_blocks * size].reshape(len(rows), num_blocks, size)
        largest = blocks.max(2) if size > 1 else blocks[:, :, 0]
        cutoffs[rows] = np.partition(largest, num_blocks - limit, axis=1)[:, num_blocks - limit]
    return cutoffs


def _ranked(weights: Float32s, cutoffs: Float32s) -> tuple[Int64s, Float32s, Int64s]:
    """Ids and weights [N, M] of the tokens that reach the cutoff of their row, and their number [N].

    Sorted by descending weight, then by id: a sort key is the inverted bits of the weight, then the id.
    """
    found = np.flatnonzero(weights >= cutoffs[:, None])
    rows, ids = np.divmod(found, weights.shape[1])
    counts = np.bincount(rows, minlength=len(weights))
    columns = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    keys = np.full((len(weights), counts.max(initial=1)), _NO_KEY)
    bits = ~weights.ravel()[found].view(np.uint32)
    keys[rows, columns] = bits.astype(np.uint64) << _ID_BITS | ids.astype(np.uint64)
    keys.sort(1)
    ranked = (~(keys >> _ID_BITS).astype(np.uint32)).view(np.float32)
    return (keys & _ID_MASK).astype(np.int64), ranked, counts
