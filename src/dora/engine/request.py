"""Requests, their sampling parameters, the sequences that run them, and their completions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.types import Branch, Chunk, GroupId, RequestId
from dora.errors import DoraError


class EngineError(DoraError):
    """The engine cannot do what was requested; its state is unchanged.

    `rejected` maps the rejected requests to the reasons; all other requests were accepted.
    """

    def __init__(self, message: str, rejected: Mapping[RequestId, str] | None = None) -> None:
        super().__init__(message)
        self.rejected = dict(rejected or {})


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, and when an output ends.

    Filters apply in this order: logits are divided by `temperature` (0: greedy, without filters); `top_k`
    keeps the k most probable tokens (0: all); `top_p` keeps the smallest set of these whose cumulative
    probability reaches it; `min_p` keeps those at least `min_p` times as probable as the most probable one.
    Ties are broken by token id, and at least one token stays. An output ends with a stop id, with the token
    that completes a stop string in its text, or after `max_tokens` tokens.

    If `max_turn_tokens` is not 0, the request is an episode. Stop ids, stop strings and `max_turn_tokens`
    then end a turn, stop strings are matched in the text of the turn, and `max_tokens` also counts
    observation tokens.
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    max_turn_tokens: int = 0

    @property
    def filters(self) -> dict[str, float]:
        """Those that exclude tokens, by name."""
        given = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value != (1.0 if name == "top_p" else 0)}

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "finite and at least 0; 0 is greedy"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "top_p": (0 < self.top_p <= 1, "over 0 and at most 1; 1 keeps all tokens"),
            "top_k": (0 <= self.top_k < 2**31, "from 0 to 2147483647; 0 keeps all tokens"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1; 0 keeps all tokens"),
            "max_turn_tokens": (self.max_turn_tokens >= 0, "at least 0; 0: a single turn"),
            "stop_strings": ("" not in self.stop_strings, "a tuple of strings that are not empty"),
        }
        for name, (is_valid, rule) in rules.items():
            if not is_valid:
                raise EngineError(f"{name} = {getattr(self, name)!r} must be {rule}")


class PromptKey(NamedTuple):
    """Requests with equal keys share the KV of their prompt."""

    group: GroupId
    version: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One sibling of a group, to be generated with the weights of `version`.

    Only the low 64 bits of `seed` are used.
    """

    id: RequestId
    group: GroupId
    prompt_ids: tuple[int, ...]
    version: int
    seed: int
    sampling: SamplingParams

    @property
    def max_length(self) -> int:
        """Maximum number of prompt and output tokens."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens whose KV siblings share: all but the last, which is the first decode input."""
        return len(self.prompt_ids) - 1

    @property
    def prompt_key(self) -> PromptKey:
        return PromptKey(self.group, self.version, self.prompt_ids)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in a decode row. The blocks in `block_table` hold its KV, in order.

    `seq_id` grows with each admission, so the lowest one is the oldest sequence of the engine.
    """

    request: Request
    row: int
    block_table: list[int]
    seq_id: int


@dataclass(frozen=True)
class PrefillInput:
    """Tokens whose KV belongs in `block_table`.

    The KV of the first `num_cached` tokens exists already, or an earlier input of the same step computes it.
    """

    token_ids: tuple[int, ...]
    num_cached: int
    block_table: list[int]

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_cached

    @property
    def num_reads(self) -> int:
        """Tokens that the new ones attend to, summed over these."""
        return self.num_new * (self.num_cached + len(self.token_ids) + 1) // 2


@dataclass(frozen=True, eq=False)
class Completion:
    """A finished output. Its columns may be given as any sequences; they become arrays. Completions are equal
    if all their bits are.

    `logprobs` are those of the distribution that the tokens were sampled from (greedy: at temperature 1).
    `unfiltered_logprobs` are at the same temperature, before any filter: a trainer that applies no
    filters compares its own with these. SGLang reports only unfiltered log-probs, and vLLM in evaluations
    only filtered ones: both columns then have the same values. `raw_logprobs` are the model's, at
    temperature 1. Observation tokens of an episode have log-probs of NaN. A column of log-probs that is
    not needed is empty. `chunks` are runs of tokens with the weights that decoded them. `routes` [prompt
    and output tokens - 1, MoE layers, k] are the experts of each token, if the engine returns them.
    `branches` are those of an episode, which the driver joins from several requests.
    """

    id: RequestId
    version: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    unfiltered_logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32]
    chunks: tuple[Chunk, ...]
    finish_reason: str  # "stop" | "length" | "turn_length", for the last turn of an episode
    routes: NDArray[np.int16] | None = None
    branches: tuple[Branch, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in _COLUMN_DTYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return all(_bits(one) == _bits(another) for one, another in pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle columns as bytes, which costs half as much as arrays."""
        columns = [getattr(self, name).tobytes() for name in _COLUMN_DTYPES]
        others = (self.chunks, self.finish_reason, self.routes, self.branches)
        return _unpickle_completion, (tuple(self.id), self.version, columns, *others)

    def without_filtered_logprobs(self) -> Completion:
        """The same output with `unfiltered_logprobs` only, which are all that a run stores."""
        return replace(self, logprobs=_NO_LOGPROBS, raw_logprobs=_NO_LOGPROBS)


def _unpickle_completion(
    request: tuple[int, int, int], version: int, columns: list[bytes], *others: Any
) -> Completion:
    arrays: list[Any] = [*map(np.frombuffer, columns, _COLUMN_DTYPES.values())]
    return Completion(RequestId(*request), version, *arrays, *others)


def _bits(value: object) -> object:
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


_NO_LOGPROBS = np.zeros(0, np.float32)
_COLUMN_DTYPES = {
    "prompt_ids": np.int32,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "unfiltered_logprobs": np.float32,
    "raw_logprobs": np.float32,
}


def check_observation(
    request_id: RequestId, token_ids: Collection[int], num_left: int, vocab_size: int
) -> None:
    """Raises EngineError for an observation that is empty, too long or has unknown token ids.

    `num_left` tokens of the request's max_tokens are left for it and at least one token of another turn.
    """
    if not 1 <= len(token_ids) < num_left:
        raise EngineError(
            f"request {request_id}: an observation has {len(token_ids)} tokens; it needs from 1 to "
            f"{num_left - 1}, because {num_left} of max_tokens are left for it and another turn; end the "
            "episode or raise max_tokens"
        )
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise EngineError(
            f"request {request_id}: an observation has token ids outside 0..{vocab_size - 1}; "
            "use the model's own tokenizer"
        )
