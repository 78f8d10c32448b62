"""What the engine is asked for, what it works on, and what it gives back.

Tokens live in `rows`; these records only name what belongs together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    """How tokens are drawn. `temperature` 0 is greedy; a stop id ends the answer and belongs to it."""

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise EngineError(f"temperature = {self.temperature} must be at least 0; 0 is greedy")
        if self.max_tokens < 1:
            raise EngineError(f"max_tokens = {self.max_tokens} must be at least 1")


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


@dataclass(frozen=True, slots=True)
class Sequence:
    """A request that occupies a decode row; `blocks` hold its KV, in order, up to its longest answer."""

    request: Request
    row: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """A finished answer. `logprobs` are those of the sampled tokens after temperature (greedy: at 1).

    `chunks` are the runs of tokens by the weights that the decode steps really used.
    """

    id: RequestId
    version: int
    token_ids: list[int]
    logprobs: list[float]
    chunks: tuple[Chunk, ...]
    finish_reason: str  # "stop" | "length"
