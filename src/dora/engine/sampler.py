"""Draw tokens so that a request gets the same ones in any batch, on any engine, after any move.

The random number of a token depends only on the request's seed and the token's position: a
counter-based generator (splitmix64's finaliser, Steele, Lea and Flood, OOPSLA 2014), turned
into a token by the inverse of the cumulative distribution. No sum runs over several rows, and
equal probabilities are ranked by token id, so a row's draw is the same bits whoever is beside it.
NumPy, because a step draws few numbers and torch's dispatch would cost three times as much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.engine.sequence import Sampling

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Rules = NDArray[np.void]  # of RULE: how each row is drawn

RULE = np.dtype(
    [
        ("stream", np.uint64),
        ("divisor", np.float32),  # the temperature; 1 for greedy rows
        ("is_greedy", np.bool_),
        ("is_changed", np.bool_),  # drawn from another distribution than the model's
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
_CACHED = 2**17  # logits whose passes stay in a core's cache
_BLOCKS_PER_K = 8  # of the vocabulary, to find tokens that may be in a top-k


class Drawn(NamedTuple):
    """Tokens [N] and three log-probs of each; see `Completion`."""

    tokens: Int64s
    logprobs: Float32s
    unfiltered_logprobs: Float32s
    raw_logprobs: Float32s


def rule(seed: int, sampling: Sampling) -> tuple[float, ...]:
    """The fields of RULE for one row."""
    top_k, top_p, min_p, is_greedy = sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature == 0
    is_filtered = not is_greedy and (top_k > 0 or top_p < 1 or min_p > 0)
    divisor = 1.0 if is_greedy else sampling.temperature
    is_changed = is_filtered or divisor != 1
    return (stream_of(seed), divisor, is_greedy, is_changed, is_filtered, top_k, top_p, min_p)


def _mixed(z: UInt64s) -> UInt64s:
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


def stream_of(seed: int) -> int:
    """A request's stream of random numbers; the low 64 bits of `seed` count."""
    return int(_mixed(np.array([seed % 2**64], np.uint64))[0])


def uniform(streams: UInt64s, positions: Int64s) -> Float64s:
    """Numbers in [0, 1), one for each stream and position; equal inputs give equal numbers."""
    z = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (z >> _12).astype(np.float64) * 2.0**-52


def sample(logits: Float32s, positions: Int64s, rules: Rules) -> Drawn:
    """Draw a token for each row of logits [N, vocab], for the positions [N] they will have.

    Greedy rows (temperature 0) take the first largest logit, whatever their filters, and report
    log-probs at temperature 1.
    """
    num_rows, width = len(logits), max(1, _CACHED // logits.shape[1])
    if num_rows <= width:
        return _sample(logits, positions, rules)
    parts = [slice(start, start + width) for start in range(0, num_rows, width)]
    drawn = [_sample(logits[part], positions[part], rules[part]) for part in parts]
    return Drawn(*(np.concatenate(field) for field in zip(*drawn, strict=True)))


def logprobs_of(logits: Float32s, tokens: Int64s, divisors: Float32s) -> Float32s:
    """Log-probs [N] of tokens [N] where logits [N, vocab] are over divisors [N or 1], without filters.

    They are the same bits that `sample` reports.
    """
    largest = logits.max(1)
    chosen = logits[np.arange(len(tokens)), tokens] - largest
    weights = np.exp((logits - largest[:, None]) / divisors[:, None])
    totals = weights.cumsum(1, dtype=np.float64)[:, -1]
    found: Float32s = (chosen / divisors - np.log(totals)).astype(np.float32)
    return found


def _sample(logits: Float32s, positions: Int64s, rules: Rules) -> Drawn:
    largest = logits.max(1)
    weights = logits - largest[:, None]
    changed, greedy = rules["is_changed"].nonzero()[0], rules["is_greedy"].nonzero()[0]
    if changed.size:
        weights /= rules["divisor"][:, None]
    np.exp(weights, out=weights)
    filtered = _filter(weights, rules)
    cumulative = weights.cumsum(1, dtype=np.float64)
    totals = cumulative[:, -1]
    tokens = (cumulative > (uniform(rules["stream"], positions) * totals)[:, None]).argmax(1)
    if greedy.size:
        tokens[greedy] = logits[greedy].argmax(1)
    chosen = logits[np.arange(len(tokens)), tokens] - largest
    raw_logprobs = unfiltered = logprobs = (chosen / rules["divisor"] - np.log(totals)).astype(np.float32)
    if filtered.size:
        unfiltered = logprobs.copy()
        unfiltered[filtered] = logprobs_of(logits[filtered], tokens[filtered], rules["divisor"][filtered])
    if changed.size:
        raw_logprobs = logprobs.copy()
        raw_logprobs[changed] = logprobs_of(logits[changed], tokens[changed], np.ones(1, np.float32))
    return Drawn(tokens, logprobs, unfiltered, raw_logprobs)


def _filter(weights: Float32s, rules: Rules) -> Int64s:
    """Set the weights [N, vocab] of excluded tokens to 0 where a row has filters; see `Sampling`.

    The largest weight of each row is 1. Returns the rows with filters.
    """
    rows = rules["is_filtered"].nonzero()[0]
    if not rows.size:
        return rows
    own, vocab = weights[rows], weights.shape[1]
    top_ks, top_ps, min_ps = (rules[name][rows] for name in ("top_k", "top_p", "min_p"))
    limits = np.where(top_ks > 0, np.minimum(top_ks, vocab), vocab)
    totals = own.sum(1)
    ids, ranked, counts = _ranked(own, _cuts(own, totals, limits, top_ps, min_ps))
    cumulative = ranked.cumsum(1, dtype=np.float64)
    ends = np.minimum(limits, counts)
    in_top_k = cumulative[np.arange(len(rows)), ends - 1]
    reach = np.where(top_ps < 1, top_ps * np.where(limits < vocab, in_top_k, totals), np.inf)
    kept = (np.arange(ids.shape[1]) < ends[:, None]) & (ranked >= min_ps[:, None])
    kept &= cumulative - ranked < reach[:, None]
    at, places = kept.nonzero()
    weights[rows] = 0
    weights[rows[at], ids[at, places]] = ranked[at, places]
    return rows


def _cuts(
    weights: Float32s, totals: Float32s, limits: Int64s, top_ps: Float64s, min_ps: Float64s
) -> Float32s:
    """Weights [N] below which nothing can be kept, so that only a few tokens need to be sorted.

    Tokens below (1 - top_p) / vocab of all weight together weigh less than 1 - top_p. And of any
    blocks of tokens, the k-th largest maximum is at most the k-th largest weight.
    """
    vocab = weights.shape[1]
    cuts: Float32s = np.maximum(min_ps, (1 - top_ps) * totals / vocab).astype(np.float32)
    for limit in np.unique(limits[limits < vocab]):
        rows = np.flatnonzero(limits == limit)
        size = max(1, vocab // (_BLOCKS_PER_K * limit))
        num_blocks = vocab // size
        blocks = weights[rows, : num_blocks * size].reshape(len(rows), num_blocks, size)
        largest = blocks.max(2) if size > 1 else blocks[:, :, 0]
        cuts[rows] = np.partition(largest, num_blocks - limit, axis=1)[:, num_blocks - limit]
    return cuts


def _ranked(weights: Float32s, cuts: Float32s) -> tuple[Int64s, Float32s, Int64s]:
    """Ids and weights [N, widest] of the tokens that reach their row's cut, and how many do.

    The heaviest come first, equal ones by id: what is sorted is a float's bits, reversed, and the id.
    """
    found = np.flatnonzero(weights >= cuts[:, None])
    rows, ids = np.divmod(found, weights.shape[1])
    counts = np.bincount(rows, minlength=len(weights))
    places = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    keys = np.full((len(weights), counts.max(initial=1)), _NO_KEY)
    bits = ~weights.ravel()[found].view(np.uint32)
    keys[rows, places] = bits.astype(np.uint64) << _ID_BITS | ids.astype(np.uint64)
    keys.sort(1)
    ranked = (~(keys >> _ID_BITS).astype(np.uint32)).view(np.float32)
    return (keys & _ID_MASK).astype(np.int64), ranked, counts
