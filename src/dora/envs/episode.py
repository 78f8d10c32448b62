"""Messages between the driver and what replies to the policy in an episode: an environment, or an agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dora.core.types import RequestId


class EpisodeId(NamedTuple):
    """One attempt at the episode of a request. No two episodes of a run have the same attempt number.

    Replies about an earlier attempt are ignored.
    """

    request: RequestId
    attempt: int


# from the driver


@dataclass(frozen=True)
class PolicyTurn:
    """The model has generated turn `number` (from 0) of an episode, which waits for the environment.

    `token_ids` are the turn's own, including a stop token. `finish_reason` is "stop", "turn_length" (the turn
    has its maximum length) or "length" (the episode has). `num_left` is how many tokens the episode may still
    have: an observation must have fewer, and without room for one the episode can only end. `logprobs` are
    those of the tokens, in nats, or empty if the engine does not report them.
    """

    episode: EpisodeId
    number: int
    token_ids: list[int]
    finish_reason: str
    num_left: int
    logprobs: Sequence[float] = ()


# to the driver


@dataclass(frozen=True)
class EpisodeStarted:
    """The episode starts with this prompt; `max_turn_tokens` may limit its turns further.

    `state` restores the episode in a resumed run; empty: it cannot be restored.
    """

    episode: EpisodeId
    prompt_ids: tuple[int, ...]
    max_turn_tokens: int | None = None
    state: bytes = b""


@dataclass(frozen=True)
class EpisodeObservation:
    """The observation after turn `turn`, at least one token; the model continues after it.

    `state` as in `EpisodeStarted`.
    """

    episode: EpisodeId
    turn: int
    token_ids: tuple[int, ...]
    state: bytes = b""


@dataclass(frozen=True)
class EpisodeEnded:
    """The episode ended with turn `turn`. Without a reward, the reward tasks of the run score it.

    `turn_rewards` are the parts of the reward by turn, or empty if they are not known. `cut` is "max_turns"
    or "observation_length" if the episode would go on without `env.max_turns`, or with room for the
    observation.
    """

    episode: EpisodeId
    turn: int
    reward: float | None
    turn_rewards: Sequence[float] = ()
    cut: str = ""


@dataclass(frozen=True)
class EpisodeFailed:
    """The episode cannot continue: it restarts, or its group fails. A turn in progress is finished first."""

    episode: EpisodeId
    reason: str
    detail: str = ""  # the traceback, for the log


@dataclass(frozen=True)
class EpisodeBranched:
    """After turn `turn` the model continues from other tokens: a branch of the episode's tree of tokens.

    `prompt_ids` are all tokens that the next turn follows. The last `num_new` of them are new. Those before
    are shared, and end at the position `parent` of all tokens of the episode so far, prompt included.
    """

    episode: EpisodeId
    turn: int
    prompt_ids: tuple[int, ...]
    num_new: int
    parent: int


EpisodeReply = EpisodeStarted | EpisodeObservation | EpisodeBranched | EpisodeEnded | EpisodeFailed
