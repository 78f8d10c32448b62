"""What the engine is asked for, what it works on, and what it gives back.

Tokens live in `rows`; these records only name what belongs together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.records import Chunk, GroupId, RequestId
from dora.errors import DoraError


class EngineError(DoraError):
    """An order the engine cannot carry out; what it was doing is unharmed.

    `refused` names the requests that were refused and why; all others were taken.
    """

    def __init__(self, message: str, refused: Mapping[RequestId, str] | None = None) -> None:
        super().__init__(message)
        self.refused = dict(refused or {})


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when an answer ends.

    In this order: the logits are divided by `temperature` (0: greedy, without filters); the `top_k`
    likeliest tokens stay (0: all); of these, the fewest whose probability reaches `top_p`; of these, those
    at least `min_p` times as likely as the likeliest. Equal tokens are ranked by id; one always stays.
    A stop id, or the token that completes a stop string in the answer's text, is the answer's last.

    With `max_turn_tokens` (0: none) the answer is an episode: these end a turn only, as does its having so
    many tokens; stop strings are looked for in a turn's own text, and `max_tokens` counts what was read
    between turns, too.
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    max_turn_tokens: int = 0

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
        for name, (is_kept, rule) in rules.items():
            if not is_kept:
                raise EngineError(f"{name} = {getattr(self, name)!r} must be {rule}")


class PromptKey(NamedTuple):
    """Requests of equal key share the KV of their prompt."""

    group: GroupId
    version: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One sibling of a group, to be answered by `version`. The low 64 bits of `seed` count."""

    id: RequestId
    group: GroupId
    prompt_ids: tuple[int, ...]
    version: int
    seed: int
    sampling: Sampling

    @property
    def max_length(self) -> int:
        """Tokens of prompt and longest answer."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def num_prompt_kv(self) -> int:
        """Tokens whose KV the siblings share: all but the last, which is the first decode input."""
        return len(self.prompt_ids) - 1

    @property
    def prompt_key(self) -> PromptKey:
        return PromptKey(self.group, self.version, self.prompt_ids)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request that occupies a decode row; `blocks` hold its KV, in order, and grow with its answer.

    The lower its `number`, the longer ago it got its first row here.
    """

    request: Request
    row: int
    blocks: list[int]
    number: int


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    `logprobs` are those of the distribution that the tokens were drawn from (greedy: at temperature 1),
    `unfiltered_logprobs` those at the same temperature before any token was excluded: what a trainer that
    knows no filters compares its own with. `raw_logprobs` are the model's, at temperature 1. `chunks` are
    the runs of tokens by the weights that the decode steps really used. `routes` [tokens of prompt and
    answer - 1, mixture layers, k] are the experts that each token was sent to, if the engine returns them.
    Tokens that were read between the turns of an episode have log-probs of NaN.
    """

    id: RequestId
    version: int
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    unfiltered_logprobs: list[float]
    raw_logprobs: list[float]
    chunks: tuple[Chunk, ...]
    finish_reason: str  # "stop" | "length" | "turn_length", for the last turn of an episode
    routes: NDArray[np.int16] | None = None
