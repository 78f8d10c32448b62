"""Who plays the other side of an episode, and the words that pass between a player and the driver.

An episode is a request whose answer is written in turns: the model's, which an engine generates, and
in between what the other side says, an environment or a client of the service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dora.core.records import RequestId
from dora.runtime.process import Worker


class Episode(NamedTuple):
    """One playing of a request. What dies with its engine is played anew, as another attempt.

    Words about an attempt that is over are not heard any more; no two have the same number in a run.
    """

    request: RequestId
    attempt: int


@dataclass(frozen=True)
class Turn:
    """The model has written a turn, number `number` (from 0) of its episode, and waits for an answer.

    `token_ids` are its own alone, a stop token included. `finish_reason` says why it ended: "stop",
    "turn_length" (it has as many tokens as a turn may have) or "length" (the episode has). `num_left` is
    how many tokens the episode may still have: what is observed must be fewer, or it can only be over.
    """

    episode: Episode
    number: int
    token_ids: list[int]
    finish_reason: str
    num_left: int


@dataclass(frozen=True)
class Began:
    """The episode begins with this prompt; `max_turn_tokens` may bound its turns further."""

    episode: Episode
    prompt_ids: tuple[int, ...]
    max_turn_tokens: int | None = None


@dataclass(frozen=True)
class Observed:
    """The other side's answer to turn `turn`, at least one token: the model reads it and writes on."""

    episode: Episode
    turn: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Over:
    """The episode ended with turn `turn`. Without a reward, the run's reward tasks judge the answer."""

    episode: Episode
    turn: int
    reward: float | None


@dataclass(frozen=True)
class Broken:
    """The episode cannot go on, and its group fails; at any time until it is over.

    While the model writes, it writes its turn to the end before that.
    """

    episode: Episode
    reason: str


Word = Began | Observed | Over | Broken


class Player(Protocol):
    """The other side of all episodes of a run. Everything is called on the driver's thread and must not wait.

    Its words are put into the driver's queue as `told.put((None, word))`, from any thread.
    """

    def begin(self, episode: Episode, version: int) -> None:
        """Play an episode; `Began` or `Broken` is to be said."""

    def take_turn(self, turn: Turn) -> None:
        """The model has written a turn; `Observed`, `Over` or `Broken` is to be said."""

    def forget(self, episode: Episode) -> None:
        """Nothing is awaited any more: it was finished, its group has failed, or its next attempt begins."""

    def hear(self, worker: Worker, message: Any) -> bool:
        """What a worker process said; False if it is none of the player's."""

    def check_deadlines(self) -> None:
        """To be called a few times a second: who took too long is `Broken`."""

    @property
    def late(self) -> list[str]:
        """What has not started yet; the run begins once nothing is left."""

    def close(self) -> None:
        """End what was started."""
