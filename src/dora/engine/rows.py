"""What every decode row carries from step to step, as arrays over rows.

A step touches all active rows at once; Python looks at a single row only when its answer
begins or ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.records import Chunk
from dora.engine.sampler import RULE, Drawn, Float32s, Int64s, Rules, rule
from dora.engine.sequence import Completion, Sequence
from dora.engine.stopping import Detokenize, ends_in_stop_string

MAX_STOP_IDS = 8
NUM_LOGPROBS = len(Drawn._fields) - 1  # of each token


class Draft(NamedTuple):
    """An unfinished answer: tokens [N], their log-probs [N, 3] as in `Drawn`, and whose weights drew them.

    Tokens that were not drawn but read have none: NaN.
    """

    token_ids: Int64s
    logprobs: Float32s
    chunks: tuple[Chunk, ...]


class Rows:
    """Tokens, log-probs and limits of up to `max_rows` sequences of up to `max_context` tokens.

    `active` are the rows that decode, in order; the fields named active_* follow that order.
    Without `detokenize`, no row can have stop strings.
    """

    def __init__(self, max_rows: int, max_context: int, detokenize: Detokenize | None = None) -> None:
        self._detokenize = detokenize
        self._tokens = np.zeros((max_rows, max_context), np.int64)  # prompt and answer
        self._logprobs = np.zeros((max_rows, max_context, NUM_LOGPROBS), np.float32)
        self._stamps = np.zeros((max_rows, max_context), np.int64)  # whose weights drew the token
        self._sources: dict[tuple[int, str], int] = {}  # stamp by version and digest
        self._turn_starts = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int64)
        self._max_lengths = np.zeros(max_rows, np.int64)
        self._rules = np.zeros(max_rows, RULE)
        self._stop_strings: list[tuple[str, ...]] = [()] * max_rows
        self._stop_ids = np.full((max_rows, MAX_STOP_IDS), -1, np.int64)
        self.arrange([])

    def stamp(self, version: int, digest: str) -> int:
        """The number that tokens drawn from these weights carry."""
        return self._sources.setdefault((version, digest), len(self._sources))

    def seat(self, sequence: Sequence) -> None:
        """Begin an answer: the row holds the prompt."""
        request, row = sequence.request, sequence.row
        sampling = request.sampling
        self._tokens[row, : len(request.prompt_ids)] = request.prompt_ids
        self._begin_turn(sequence, len(request.prompt_ids))
        self._rules[row] = rule(request.seed, sampling)
        self._stop_strings[row] = sampling.stop_strings
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids

    def arrange(self, rows: Items[int]) -> None:
        """Name the rows that decode from now on, in order."""
        self.active = np.array(rows, np.int64)
        self.active_rules: Rules = self._rules[self.active]
        self._active_readers = [(i, row) for i, row in enumerate(rows) if self._stop_strings[row]]
        self._active_max_lengths = self._max_lengths[self.active]
        self._active_stop_ids = self._stop_ids[self.active]

    def active_positions(self) -> Int64s:
        """The position of every active row's next input, which is its last token."""
        return self._lengths[self.active] - 1

    def goes_on(self, num_tokens: int) -> NDArray[np.bool_]:
        """Which active rows could have so many more tokens and still not be at their greatest length."""
        return self._lengths[self.active] + num_tokens < self._active_max_lengths

    def inputs(self) -> tuple[Int64s, Int64s]:
        """The last token of every active row and its position."""
        positions = self.active_positions()
        return self._tokens[self.active, positions], positions

    def append(self, drawn: Drawn, stamps: Int64s) -> Int64s:
        """Add one token to every active row; returns which of them (by order) have finished."""
        rows, lengths = self.active, self._lengths[self.active]
        self._tokens[rows, lengths] = drawn.tokens
        self._logprobs[rows, lengths] = np.stack(drawn[1:], axis=1)
        self._stamps[rows, lengths] = stamps
        self._lengths[rows] = lengths + 1
        stopped = (self._active_stop_ids == drawn.tokens[:, None]).any(1)
        for i, row in self._active_readers:
            stopped[i] |= self._reads_a_stop(row)
        finished: Int64s = np.flatnonzero(stopped | (lengths + 1 >= self._active_max_lengths))
        return finished

    def read(self, sequence: Sequence, token_ids: Items[int], stamp: int) -> None:
        """Add tokens that nobody drew, for weights with this `stamp` to read; the next turn begins."""
        row, start = sequence.row, int(self._lengths[sequence.row])
        stop = start + len(token_ids)
        self._tokens[row, start:stop], self._logprobs[row, start:stop] = token_ids, np.nan
        self._stamps[row, start:stop] = stamp
        self._begin_turn(sequence, stop)

    def resume(self, sequence: Sequence, draft: Draft) -> None:
        """Go on with an answer that was begun elsewhere; its row has been seated."""
        row, start = sequence.row, len(sequence.request.prompt_ids)
        stop = start + len(draft.token_ids)
        self._tokens[row, start:stop] = draft.token_ids
        self._logprobs[row, start:stop] = draft.logprobs
        read = np.isnan(draft.logprobs[:, 0]).nonzero()[0]
        if read.size:
            self._begin_turn(sequence, start + int(read[-1]) + 1)
        for chunk in draft.chunks:
            self._stamps[row, start : start + chunk.num_tokens] = self.stamp(chunk.version, chunk.digest)
            start += chunk.num_tokens
        self._lengths[row] = stop

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens of the answer so far."""
        return int(self._lengths[sequence.row]) - len(sequence.request.prompt_ids)

    def num_computed(self, sequence: Sequence) -> int:
        """Tokens whose KV is computed: all but the last, which is the next input."""
        return int(self._lengths[sequence.row]) - 1

    def draft(self, sequence: Sequence) -> Draft:
        """A copy of the answer so far."""
        row = sequence.row
        answer = slice(len(sequence.request.prompt_ids), int(self._lengths[row]))
        return Draft(
            self._tokens[row, answer].copy(),
            self._logprobs[row, answer].copy(),
            self._chunks(self._stamps[row, answer]),
        )

    def completion(self, sequence: Sequence) -> Completion:
        """The finished answer of a row."""
        request, draft = sequence.request, self.draft(sequence)
        logprobs, unfiltered, raw = draft.logprobs.T.tolist()
        return Completion(
            request.id,
            request.version,
            request.prompt_ids,
            draft.token_ids.tolist(),
            logprobs,
            unfiltered,
            raw,
            draft.chunks,
            self.finish_reason(sequence),
        )

    def finish_reason(self, sequence: Sequence) -> str:
        """Why a row has no more tokens, or its turn has none; see `Completion`."""
        row, length, request = sequence.row, self._lengths[sequence.row], sequence.request
        if self._tokens[row, length - 1] in request.sampling.stop_ids or self._reads_a_stop(row):
            return "stop"
        return "length" if length == request.max_length else "turn_length"

    def turn(self, row: int) -> Int64s:
        """The tokens of a row's turn."""
        return self._tokens[row, self._turn_starts[row] : self._lengths[row]]

    def _begin_turn(self, sequence: Sequence, start: int) -> None:
        """Nothing has been drawn behind `start`; a turn ends where the answer must, at the latest."""
        request, row = sequence.request, sequence.row
        self._turn_starts[row] = self._lengths[row] = start
        num_tokens = request.sampling.max_turn_tokens or request.sampling.max_tokens
        self._max_lengths[row] = min(request.max_length, start + num_tokens)

    def _reads_a_stop(self, row: int) -> bool:
        """Whether the row's last token completed one of its stop strings."""
        if not self._stop_strings[row]:
            return False
        assert self._detokenize is not None
        return ends_in_stop_string(self._detokenize, self.turn(row), self._stop_strings[row])

    def _chunks(self, stamps: Int64s) -> tuple[Chunk, ...]:
        """Merge what every step stamped into runs of one version's weights."""
        if not stamps.size:
            return ()
        sources = [*self._sources]
        edges = [0, *(np.flatnonzero(stamps[1:] != stamps[:-1]) + 1).tolist(), stamps.size]
        runs = ((*sources[stamps[start]], stop - start) for start, stop in pairwise(edges))
        return tuple(Chunk(version, digest, num_tokens) for version, digest, num_tokens in runs)
