"""What a server is asked, and what it says.

A row is a request at the server, a word is news of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.engine.sequence import Request


class Word(NamedTuple):
    """What a server says of an answer: new tokens, their log-probs, and with the last ones how it ended.

    `spans` are the names of the weights that drew its tokens, as in vLLM's `weight_versions`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[Mapping[str, object]] | None = None


@dataclass(eq=False)
class Row:
    """A request at the server, which knows it by its `name` and has drawn all but `num_before` tokens."""

    request: Request
    name: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)  # at temperature 1; NaN where nobody told
    num_before: int = 0
    is_halting: bool = False  # the server was told to stop
    is_still: bool = False  # and has

    @property
    def prompt_ids(self) -> list[int]:
        """What the server is to continue."""
        return [*self.request.prompt_ids, *self.token_ids[: self.num_before]]

    @property
    def num_left(self) -> int:
        """Tokens that the server may draw."""
        return self.request.sampling.max_tokens - self.num_before
