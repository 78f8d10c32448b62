"""Draw tokens so that a request gets the same ones in any batch, on any engine, after any move.

The random number of a token depends only on the request's seed and the token's position: a
counter-based generator (splitmix64's finaliser, Steele, Lea and Flood, OOPSLA 2014), turned
into a token by the inverse of the cumulative distribution. NumPy, because a step draws few
numbers and torch's dispatch would cost three times as much.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _12 = (np.uint64(num_bits) for num_bits in (30, 27, 31, 12))


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each seed and position; equal inputs give equal numbers."""
    z = _mixed(_mixed(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (z >> _12).astype(np.float64) * 2.0**-52


def sample(
    logits: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    temperatures: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens [N] and their log-probs [N] from logits [N, vocab], for the positions they will have.

    The log-prob is that of the distribution drawn from; greedy rows (temperature 0) report
    the one at temperature 1.
    """
    greedy = temperatures == 0
    scaled = logits / np.where(greedy, np.float32(1), temperatures)[:, None]
    scaled -= scaled.max(1, keepdims=True)
    cumulative = np.exp(scaled).cumsum(1, dtype=np.float64)
    total = cumulative[:, -1]
    tokens = (cumulative <= (uniform(seeds, positions) * total)[:, None]).sum(1)
    if greedy.any():
        tokens = np.where(greedy, scaled.argmax(1), tokens)
    logprobs = scaled[np.arange(len(tokens)), tokens] - np.log(total)
    return tokens, logprobs.astype(np.float32)
