"""The state of the decode rows: tokens, log-probs and limits as arrays, and the blocks that hold their KV.

A step updates all active rows at once. Python code handles a single row only when its output starts or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.core.types import Chunk, RequestId
from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for
from dora.engine.kernels.sampler import (
    SAMPLING_DTYPE,
    Float32s,
    Int64s,
    SamplerOutput,
    SamplingMetadata,
    sampling_metadata,
)
from dora.engine.request import Completion, Request, Sequence
from dora.model.device import to_device

MAX_STOP_IDS = 8
NUM_LOGPROBS = len(SamplerOutput._fields) - 1  # of each token
Detokenize = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # decoded from bytes that are no whole character
_MAX_BYTES = 4  # of a character in UTF-8


class PartialOutput(NamedTuple):
    """An unfinished output: tokens [N], their log-probs [N, 3] as in `SamplerOutput`, and the weights they
    are from.

    Observation tokens have log-probs of NaN.
    """

    token_ids: Int64s
    logprobs: Float32s
    chunks: tuple[Chunk, ...]


class DecodeBatch:
    """Tokens, log-probs and limits of up to `max_rows` sequences of up to `max_context` tokens.

    `active` are the rows that decode, in order. Results for active rows follow this order. Without
    `detokenize` no row may have stop strings.
    """

    def __init__(self, max_rows: int, max_context: int, detokenize: Detokenize | None = None) -> None:
        self._detokenize = detokenize
        self._tokens = np.zeros((max_rows, max_context), np.int64)  # prompt and output
        self._logprobs = np.zeros((max_rows, max_context, NUM_LOGPROBS), np.float32)
        self._token_weights = np.zeros((max_rows, max_context), np.int64)  # weights id of each token
        self._weights_ids: dict[tuple[int, str], int] = {}  # by version and digest
        self._turn_starts = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int64)
        self._max_lengths = np.zeros(max_rows, np.int64)
        self._sampling = np.zeros(max_rows, SAMPLING_DTYPE)
        self._stop_strings: list[tuple[str, ...]] = [()] * max_rows
        self._stop_ids = np.full((max_rows, MAX_STOP_IDS), -1, np.int64)
        self.set_active([])

    def weights_id(self, version: int, digest: str) -> int:
        """The number that marks tokens decoded with these weights."""
        return self._weights_ids.setdefault((version, digest), len(self._weights_ids))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its row, with the prompt and no output."""
        request, row = sequence.request, sequence.row
        sampling = request.sampling
        self._tokens[row, : len(request.prompt_ids)] = request.prompt_ids
        self._start_turn(sequence, len(request.prompt_ids))
        self._sampling[row] = sampling_metadata(request.seed, sampling)
        self._stop_strings[row] = sampling.stop_strings
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids

    def restore(self, sequence: Sequence, output: PartialOutput) -> None:
        """Continue an output that was started elsewhere; the sequence has been added to its row."""
        row, start = sequence.row, len(sequence.request.prompt_ids)
        stop = start + len(output.token_ids)
        self._tokens[row, start:stop] = output.token_ids
        self._logprobs[row, start:stop] = output.logprobs
        if turn_start := turn_start_of(output):
            self._start_turn(sequence, start + turn_start)
        for chunk in output.chunks:
            weights_id = self.weights_id(chunk.version, chunk.digest)
            self._token_weights[row, start : start + chunk.num_tokens] = weights_id
            start += chunk.num_tokens
        self._lengths[row] = stop

    def set_active(self, rows: list[int]) -> None:
        """Set the rows that decode from now on, in order."""
        self.active = np.array(rows, np.int64)
        self.active_sampling: SamplingMetadata = self._sampling[self.active]
        self._active_with_stop_strings = [(i, row) for i, row in enumerate(rows) if self._stop_strings[row]]
        self._active_max_lengths = self._max_lengths[self.active]
        self._active_stop_ids = self._stop_ids[self.active]

    def active_positions(self) -> Int64s:
        """The position of each active row's next input, which is its last token."""
        return self._lengths[self.active] - 1

    def has_tokens_left(self, num_tokens: int) -> NDArray[np.bool_]:
        """Which active rows stay below their maximum length with `num_tokens` more tokens."""
        return self._lengths[self.active] + num_tokens < self._active_max_lengths

    def inputs(self) -> tuple[Int64s, Int64s]:
        """The last token of each active row and its position."""
        positions = self.active_positions()
        return self._tokens[self.active, positions], positions

    def append(self, sampled: SamplerOutput, weights_ids: Int64s) -> Int64s:
        """Append a token to each active row; returns the indices of the active rows that have finished."""
        rows, lengths = self.active, self._lengths[self.active]
        self._tokens[rows, lengths] = sampled.tokens
        self._logprobs[rows, lengths] = np.stack(sampled[1:], axis=1)
        self._token_weights[rows, lengths] = weights_ids
        self._lengths[rows] = lengths + 1
        stopped = (self._active_stop_ids == sampled.tokens[:, None]).any(1)
        for i, row in self._active_with_stop_strings:
            stopped[i] |= self._has_stop_string(row)
        finished: Int64s = np.flatnonzero(stopped | (lengths + 1 >= self._active_max_lengths))
        return finished

    def append_observation(self, sequence: Sequence, token_ids: list[int], weights_id: int) -> None:
        """Append tokens that the model did not sample, for these weights to read, and start the next turn."""
        row, start = sequence.row, int(self._lengths[sequence.row])
        stop = start + len(token_ids)
        self._tokens[row, start:stop], self._logprobs[row, start:stop] = token_ids, np.nan
        self._token_weights[row, start:stop] = weights_id
        self._start_turn(sequence, stop)

    def num_output_tokens(self, sequence: Sequence) -> int:
        return int(self._lengths[sequence.row]) - len(sequence.request.prompt_ids)

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV is computed: all but the last, which is the next input."""
        return int(self._lengths[sequence.row]) - 1

    def partial_output(self, sequence: Sequence) -> PartialOutput:
        """A copy of the output so far."""
        row = sequence.row
        output = slice(len(sequence.request.prompt_ids), int(self._lengths[row]))
        return PartialOutput(
            self._tokens[row, output].copy(),
            self._logprobs[row, output].copy(),
            self._chunks(self._token_weights[row, output]),
        )

    def turn_token_ids(self, row: int) -> Int64s:
        """The tokens of a row's current turn."""
        return self._tokens[row, self._turn_starts[row] : self._lengths[row]]

    def turn_logprobs(self, row: int) -> list[float]:
        """The log-probs of these tokens, of the distribution that they were sampled from, in nats."""
        logprobs: list[float] = self._logprobs[row, self._turn_starts[row] : self._lengths[row], 0].tolist()
        return logprobs

    def completion(self, sequence: Sequence) -> Completion:
        """The finished output of a row."""
        request, output = sequence.request, self.partial_output(sequence)
        logprobs, unfiltered, raw = np.ascontiguousarray(output.logprobs.T)
        return Completion(
            request.id,
            request.version,
            np.array(request.prompt_ids, np.int32),
            output.token_ids.astype(np.int32),
            logprobs,
            unfiltered,
            raw,
            output.chunks,
            self.finish_reason(sequence),
        )

    def finish_reason(self, sequence: Sequence) -> str:
        """Why the output or the turn of a row has ended; see `Completion`."""
        row, length, request = sequence.row, self._lengths[sequence.row], sequence.request
        if self._tokens[row, length - 1] in request.sampling.stop_ids or self._has_stop_string(row):
            return "stop"
        return "length" if length == request.max_length else "turn_length"

    def _start_turn(self, sequence: Sequence, start: int) -> None:
        """A turn ends after its maximum number of tokens, or where the output must end."""
        request, row = sequence.request, sequence.row
        self._turn_starts[row] = self._lengths[row] = start
        num_tokens = request.sampling.max_turn_tokens or request.sampling.max_tokens
        self._max_lengths[row] = min(request.max_length, start + num_tokens)

    def _has_stop_string(self, row: int) -> bool:
        """Whether the row's last token completed one of its stop strings."""
        if not (stop_strings := self._stop_strings[row]):
            return False
        assert self._detokenize is not None
        return ends_with_stop_string(self._detokenize, self.turn_token_ids(row), stop_strings)

    def _chunks(self, weights_ids: Int64s) -> tuple[Chunk, ...]:
        """Runs of tokens with the same weights."""
        if not weights_ids.size:
            return ()
        sources = [*self._weights_ids]
        edges = [0, *(np.flatnonzero(weights_ids[1:] != weights_ids[:-1]) + 1).tolist(), weights_ids.size]
        runs = ((*sources[weights_ids[start]], stop - start) for start, stop in pairwise(edges))
        return tuple(Chunk(version, digest, num_tokens) for version, digest, num_tokens in runs)


def can_continue(request: Request, output: PartialOutput, digest: str) -> bool:
    """Whether an output is an unfinished one of the request, from its version's weights with this digest.

    A version that was trained again has another digest. Only an episode can be unfinished with all of its
    tokens.
    """
    num_tokens, is_episode = len(output.token_ids), request.sampling.max_turn_tokens > 0
    return (
        0 < num_tokens < request.sampling.max_tokens + is_episode
        and output.logprobs.shape == (num_tokens, NUM_LOGPROBS)
        and output.chunks == (Chunk(request.version, digest, num_tokens),)
    )


def turn_start_of(output: PartialOutput) -> int:
    """The number of the first token after the last observation token of an output."""
    observed = np.flatnonzero(np.isnan(output.logprobs[:, 0]))
    return int(observed[-1]) + 1 if observed.size else 0


def turn_end(request: Request, output: PartialOutput, detokenize: Detokenize | None) -> str:
    """Why the last turn of an episode's output has ended, see `Completion`; empty if it is not whole.

    `detokenize` is needed for stop strings only.
    """
    sampling, turn = request.sampling, output.token_ids[turn_start_of(output) :]
    if not sampling.max_turn_tokens or not len(turn):
        return ""
    if turn[-1] in sampling.stop_ids:
        return "stop"
    if sampling.stop_strings:
        assert detokenize is not None
        if ends_with_stop_string(detokenize, turn, sampling.stop_strings):
            return "stop"
    if len(output.token_ids) >= sampling.max_tokens:
        return "length"
    return "turn_length" if len(turn) >= sampling.max_turn_tokens else ""


class SwappedSequence(NamedTuple):
    output: PartialOutput
    kv: Tensor  # [blocks, ...], in host memory


class KVCache:
    """Block tables [rows, blocks] of a batch into a pool of KV [block, ...], and the swapped sequences.

    A swapped sequence returns to any row and blocks, with the same tokens, log-probs and KV. A row is
    grown `num_steps_ahead` steps before its next input would not fit.
    """

    def __init__(
        self, batch: DecodeBatch, block_tables: Tensor, kv: Tensor, num_steps_ahead: int = 0
    ) -> None:
        self._batch, self._block_tables, self._kv = batch, block_tables, kv
        self._tables_on_cpu = None if block_tables.is_cuda else block_tables.numpy()
        self._num_steps_ahead = num_steps_ahead
        self._capacities = np.zeros(len(block_tables), np.int64)  # tokens that the blocks of a row hold
        self._checked_rows = batch.active
        self._num_safe_steps = 0  # in which no checked row fills its blocks
        self._swapped: dict[RequestId, SwappedSequence] = {}

    @property
    def num_swapped(self) -> int:
        """Sequences in host memory."""
        return len(self._swapped)

    def add(self, sequence: Sequence) -> None:
        """Make a row ready to decode; its KV is in its blocks before the next step."""
        self._batch.add(sequence)
        self.update_block_table(sequence)

    def update_block_table(self, sequence: Sequence) -> None:
        """Copy the block table of a sequence that has grown to the device."""
        row, num_blocks = sequence.row, len(sequence.block_table)
        if self._tables_on_cpu is not None:
            self._tables_on_cpu[row, :num_blocks] = sequence.block_table
        else:  # torch reuses pinned memory only after the copy from it has finished
            blocks = torch.tensor(sequence.block_table, dtype=torch.int64, pin_memory=True)
            self._block_tables[row, :num_blocks].copy_(blocks, non_blocking=True)
        self._capacities[row] = num_blocks * BLOCK_SIZE

    def rows_to_grow(self) -> list[int]:
        """The indices of the active rows that need another block. Call it exactly once per step."""
        batch = self._batch
        if self._num_safe_steps and self._checked_rows is batch.active:
            self._num_safe_steps -= 1
            return []
        room = self._capacities[batch.active] - batch.active_positions()  # 0: not for the next input
        num_left = room - self._num_steps_ahead
        self._checked_rows = batch.active
        self._num_safe_steps = max(0, int(num_left.min(initial=BLOCK_SIZE)) - 1)
        found: list[int] = np.flatnonzero(
            (room <= 0) | (num_left <= 0) & batch.has_tokens_left(self._num_steps_ahead)
        ).tolist()
        return found

    def can_decode_again(self) -> bool:
        """Whether each active row has another step after its next token, and room for that input."""
        batch = self._batch
        has_room = self._capacities[batch.active] > batch.active_positions() + 1
        return bool((has_room & batch.has_tokens_left(1)).all())

    def swap_out(self, sequence: Sequence) -> int:
        """Copy output and KV of a sequence to host memory; returns the bytes of KV."""
        blocks = sequence.block_table[: num_blocks_for(self._batch.num_computed_tokens(sequence))]
        kv = self._kv
        on_host = torch.empty((len(blocks), *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)
        on_host.copy_(kv[to_device(torch.tensor(blocks, dtype=torch.int64), kv.device)])
        self._swapped[sequence.request.id] = SwappedSequence(self._batch.partial_output(sequence), on_host)
        return on_host.nbytes

    def swap_in(self, sequence: Sequence, num_cached: int) -> None:
        """Restore a sequence, except the KV of its first `num_cached` blocks, which is there."""
        output, on_host = self._swapped.pop(sequence.request.id)
        self.add(sequence)
        self._batch.restore(sequence, output)
        blocks = torch.tensor(sequence.block_table[num_cached : len(on_host)], dtype=torch.int64)
        device = self._kv.device
        self._kv[to_device(blocks, device)] = to_device(on_host[num_cached:], device)

    def discard_kv(self, sequence: Sequence) -> None:
        """Keep only the output of a sequence, as a swapped one without KV."""
        swapped = self._swapped.get(sequence.request.id)
        output = self._batch.partial_output(sequence) if swapped is None else swapped.output
        self.add_without_kv(sequence.request.id, output)

    def add_without_kv(self, request_id: RequestId, output: PartialOutput) -> None:
        """Continue an output that was started elsewhere, as that of a swapped sequence without KV."""
        self._swapped[request_id] = SwappedSequence(output, self._kv[:0].cpu())

    def partial_output(self, request_id: RequestId) -> PartialOutput:
        """The output so far of a swapped sequence."""
        return self._swapped[request_id].output

    def discard(self, request_id: RequestId) -> None:
        """Forget a request if it is swapped."""
        self._swapped.pop(request_id, None)


def ends_with_stop_string(detokenize: Detokenize, token_ids: Int64s, stop_strings: Collection[str]) -> bool:
    """Whether the text of `token_ids` contains a stop string, given that it did not before the last token.

    Only the end of the text is decoded, and no state is kept from token to token. A stop string of n
    characters usually lies in the last n tokens; some tokens show nothing and some characters need several
    tokens, so tokens are added until the text is long enough.
    """
    longest = max(map(len, stop_strings))
    width, num_new = longest + 2 * _MAX_BYTES, len(detokenize(token_ids[-1:].tolist()))
    while True:
        text = _tail_text(detokenize, token_ids, width)
        if any(stop in text for stop in stop_strings):
            return True
        if width >= len(token_ids) or len(text) - num_new >= longest + _MAX_BYTES:
            return False
        width *= 2


def _tail_text(detokenize: Detokenize, token_ids: Int64s, width: int) -> str:
    """Text of the last `width` tokens, and of those before them that belong to its first character."""
    text = ""
    for num_tokens in range(width, width + _MAX_BYTES):
        text = detokenize(token_ids[-num_tokens:].tolist())
        if not text.startswith(_REPLACEMENT) or num_tokens >= len(token_ids):
            break
    return text
