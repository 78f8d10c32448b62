"""What an engine says of a turn, and what it may be answered.

The driver carries these words, so nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dora.core.records import RequestId


@dataclass(frozen=True)
class TurnEnded:
    """A request has written a turn, `token_ids`, and waits; see `Completion` for the reason.

    It may have `num_left` more tokens, of which it must draw at least one.
    """

    request: RequestId
    token_ids: list[int]
    finish_reason: str
    num_left: int


@dataclass(frozen=True)
class Observe:
    """Read these tokens, at least one, and write another turn."""

    request: RequestId
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The answer ends with this turn."""

    request: RequestId


@runtime_checkable
class TurnTaking(Protocol):
    """What an engine offers beside `InferenceEngine` to play episodes; see `TurnTakingEngine`."""

    def take_turns(self) -> list[TurnEnded]:
        """The turns that have ended since this was last asked."""

    def observe(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """What the other side says to a turn: it is read, and the request writes its next turn."""

    def finish(self, request_id: RequestId) -> None:
        """The answer ends with its last turn, and a step gives it back."""
