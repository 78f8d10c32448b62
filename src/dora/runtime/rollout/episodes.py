"""Who plays the other side of an episode, and the words that pass between a player and the driver.

An episode is a request whose answer is written in turns: the model's, which an engine generates, and
in between what the other side says, an environment or a client of the service.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, Protocol

from dora.core.actions import Abort, Generate, Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestsAborted
from dora.core.types import GroupId, RequestId
from dora.engine.messages import TurnFinished
from dora.engine.request import Request
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook


class EpisodeId(NamedTuple):
    """One playing of a request. What dies with its engine is played anew, as another attempt.

    Words about an attempt that is over are not heard any more; no two have the same number in a run.
    """

    request: RequestId
    attempt: int


@dataclass(frozen=True)
class PolicyTurn:
    """The model has written a turn, number `number` (from 0) of its episode, and waits for an answer.

    `token_ids` are its own alone, a stop token included. `finish_reason` says why it ended: "stop",
    "turn_length" (it has as many tokens as a turn may have) or "length" (the episode has). `num_left` is
    how many tokens the episode may still have: what is observed must be fewer, or it can only be over.
    """

    episode: EpisodeId
    number: int
    token_ids: list[int]
    finish_reason: str
    num_left: int


@dataclass(frozen=True)
class EpisodeStarted:
    """The episode begins with this prompt; `max_turn_tokens` may bound its turns further."""

    episode: EpisodeId
    prompt_ids: tuple[int, ...]
    max_turn_tokens: int | None = None


@dataclass(frozen=True)
class EpisodeObservation:
    """The other side's answer to turn `turn`, at least one token: the model reads it and writes on."""

    episode: EpisodeId
    turn: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EpisodeEnded:
    """The episode ended with turn `turn`. Without a reward, the run's reward tasks judge the answer."""

    episode: EpisodeId
    turn: int
    reward: float | None


@dataclass(frozen=True)
class EpisodeFailed:
    """The episode cannot go on, and its group fails; at any time until it is over.

    While the model writes, it writes its turn to the end before that.
    """

    episode: EpisodeId
    reason: str


EpisodeReply = EpisodeStarted | EpisodeObservation | EpisodeEnded | EpisodeFailed


class EpisodeRunner(Protocol):
    """The other side of all episodes of a run. Everything is called on the driver's thread and must not wait.

    Its words are put into the driver's queue as `told.put((None, word))`, from any thread.
    """

    def start(self, episode: EpisodeId, version: int) -> None:
        """Play an episode; `Began` or `Broken` is to be said."""

    def on_turn(self, turn: PolicyTurn) -> None:
        """The model has written a turn; `Observed`, `Over` or `Broken` is to be said."""

    def release(self, episode: EpisodeId) -> None:
        """Nothing is awaited any more: it was finished, its group has failed, or its next attempt begins."""

    def on_message(self, worker: Worker, message: Any) -> bool:
        """What a worker process said; False if it is none of the player's."""

    def check_deadlines(self) -> None:
        """To be called a few times a second: who took too long is `Broken`."""

    @property
    def not_started(self) -> list[str]:
        """What has not started yet; the run begins once nothing is left."""

    def close(self) -> None:
        """End what was started."""


# === dora.runtime.rollout.episodes: The driver's part in episodes: it stands between engines, which write turns, and the player.
#
# For the orchestrator an episode is a request that is not finished yet. One that dies with its engine is
# ordered again, and begins anew. While one waits for its player it is on the engine that has told its turn,
# or, before its prompt is known, on none at all.


@dataclass(eq=False)
class _Play:
    """An episode under way; `engine` is where it was ordered, or where it has told its last turn."""

    episode: EpisodeId
    version: int
    engine: int
    request: Request | None = None  # None: its prompt is not known yet
    num_turns: int = 0
    is_awaited: bool = True  # the player is to speak
    broken: str = ""  # why it cannot go on after this turn


class Episodes:
    """Carries out orders about requests; where there is a `player`, each of them is an episode."""

    def __init__(
        self,
        plan: RunSetup,
        player: EpisodeRunner | None,
        fleet: EnginePool,
        facts: deque[Event],
        teller: SampleBook,
    ) -> None:
        self._plan, self._fleet, self._facts, self._teller = plan, fleet, facts, teller
        self.runner = player
        self._plays: dict[RequestId, _Play] = {}
        self._adrift: set[RequestId] = set()  # given up where they no longer are
        self._numbers = count()

    # what the orchestrator says

    def generate(self, order: Generate) -> None:
        """Have requests answered from their beginning."""
        if self.runner is None:
            self._fleet.send(
                order.engine, m.SubmitRequests(self._plan.requests(order.requests, order.version))
            )
            return
        for request in order.requests:
            self._leave(request)  # it was on an engine that is lost
            self._teller.episode_rewards.pop(request, None)
            episode = EpisodeId(request, next(self._numbers))
            self._plays[request] = _Play(episode, order.version, order.engine)
            self.runner.start(episode, order.version)

    def abort(self, order: Abort) -> None:
        """Their groups have failed. Those that no engine has yet are gone at once.

        Of one that has moved meanwhile the orchestrator is about to hear, and gives it up there again.
        """
        gone = [request for request in order.requests if request in self._adrift]
        self._adrift.difference_update(gone)
        for play in map(self._leave, order.requests):
            if play is not None and play.request is None:
                if play.engine == order.engine:
                    gone.append(play.episode.request)
                else:
                    self._adrift.add(play.episode.request)
        if self._fleet.send(order.engine, m.AbortRequests(order.requests)) and gone:
            self._facts.append(RequestsAborted(order.engine, tuple(gone), 0))

    def migrate(self, order: Migrate) -> None:
        """Have a request change its engine; one that waits moves once it writes on."""
        play, ends = self._plays.get(order.request), (order.source, order.destination)
        if self.runner is None:
            (request,) = self._plan.requests([order.request], order.version)
            self._fleet.migrate(order, request)
        elif play is None:
            self._facts.append(MigrationFailed(order.request, *ends, "it has finished here first"))
        elif play.request is not None:
            self._fleet.migrate(order, play.request)
        elif self._fleet.workers.keys() >= {*ends}:  # there is nothing to be moved yet
            play.engine = order.destination
            self._facts.append(Migrated(order.request, *ends, 0, 0, 0.0, 0.0))
        else:
            self._facts.appendleft(MigrationFailed(order.request, *ends, "an engine is lost"))

    def discard_group(self, group: GroupId) -> None:
        """The group has failed, and nobody works on it any more."""
        for request in [request for request in self._plays if request.group == group]:
            self._leave(request)

    # what engines and the player say

    def on_engine_message(self, engine: int, message: Any) -> None:
        """Turns are the player's; what is finished or refused is no episode any more."""
        match message:
            case m.TurnsCompleted(turns):
                for turn in turns:
                    self._take_turn(engine, turn)
            case m.RequestsCompleted(completions):
                self._leave_all(completion.id for completion in completions)
            case m.RequestsRejected(reasons):
                self._leave_all(reasons)

    def on_message(self, worker: Worker | None, message: Any) -> None:
        """A word of the player, or of one of its processes."""
        if worker is not None and self.runner is not None:
            self.runner.on_message(worker, message)
        elif isinstance(message, EpisodeReply):
            play = self._plays.get(message.episode.request)
            if play is not None and play.episode == message.episode:
                self._heed(play, message)

    @property
    def not_started(self) -> list[str]:
        """What of the player has not started yet."""
        return [] if self.runner is None else self.runner.not_started

    def check_deadlines(self) -> None:
        if self.runner is not None:
            self.runner.check_deadlines()

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()

    def _heed(self, play: _Play, word: EpisodeReply) -> None:
        """What is said out of turn changes nothing, but that an episode is broken."""
        request = play.episode.request
        match word:
            case EpisodeFailed(_, reason) if play.is_awaited:
                self._break(play, reason)
            case EpisodeFailed(_, reason):
                play.broken = reason
            case EpisodeStarted(_, prompt_ids, max_turn_tokens) if play.is_awaited and play.request is None:
                play.request = self._request(play, prompt_ids, max_turn_tokens)
                self._answer(play, m.SubmitRequests([play.request]))
            case EpisodeObservation(_, turn, token_ids) if play.is_awaited and turn == play.num_turns - 1:
                self._answer(play, m.ContinueEpisode(request, token_ids))
            case EpisodeEnded(_, turn, reward) if play.is_awaited and turn == play.num_turns - 1:
                if reward is not None:
                    self._teller.episode_rewards[request] = reward
                self._answer(play, m.EndEpisode(request))

    def _answer(self, play: _Play, message: object) -> None:
        """To the engine; if it is lost, the orchestrator hears of it and orders the request again."""
        play.is_awaited = False
        self._fleet.send(play.engine, message)

    def _request(self, play: _Play, prompt_ids: tuple[int, ...], max_turn_tokens: int | None) -> Request:
        (request,) = self._plan.requests([play.episode.request], play.version)
        sampling = request.sampling
        if max_turn_tokens is not None:
            most = min(max_turn_tokens, sampling.max_turn_tokens)
            sampling = replace(sampling, max_turn_tokens=most)
        return replace(request, prompt_ids=prompt_ids, sampling=sampling)

    def _take_turn(self, engine: int, ended: TurnFinished) -> None:
        play = self._plays.get(ended.request_id)
        if play is None:
            return  # its group has failed, and the engine is about to hear of it
        play.engine, play.is_awaited = engine, True
        turn = PolicyTurn(play.episode, play.num_turns, ended.token_ids, ended.finish_reason, ended.num_left)
        play.num_turns += 1
        if play.broken:
            self._break(play, play.broken)
        elif self.runner is not None:
            self.runner.on_turn(turn)

    def _break(self, play: _Play, reason: str) -> None:
        """The request fails on its engine; if that is lost it begins anew instead."""
        request = play.episode.request
        if play.request is not None:
            self._answer(play, m.FailRequest(request, reason))
        elif play.engine in self._fleet.workers:
            self._leave(request)
            self._facts.append(self._teller.fail_request(play.engine, request, reason))

    def _leave_all(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            self._leave(request)

    def _leave(self, request: RequestId) -> _Play | None:
        """The player forgets the episode, and so do we."""
        play = self._plays.pop(request, None)
        if play is not None and self.runner is not None:
            self.runner.release(play.episode)
        return play
