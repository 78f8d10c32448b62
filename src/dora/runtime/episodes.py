"""The driver's part in episodes: it stands between engines, which write turns, and the player.

For the orchestrator an episode is a request that is not finished yet. One that dies with its engine is
ordered again, and begins anew. While one waits for its player it is on the engine that has told its turn,
or, before its prompt is known, on none at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from dora.core.actions import Abort, Generate, Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestsAborted
from dora.core.records import GroupId, RequestId
from dora.engine.sequence import Request
from dora.runtime import messages as m
from dora.runtime.fleet import Fleet
from dora.runtime.plan import Plan
from dora.runtime.players import Began, Broken, Episode, Observed, Over, Player, Turn, Word
from dora.runtime.process import Worker
from dora.runtime.telling import Teller
from dora.turns.words import TurnEnded


@dataclass(eq=False)
class _Play:
    """An episode under way; `engine` is where it was ordered, or where it has told its last turn."""

    episode: Episode
    version: int
    engine: int
    request: Request | None = None  # None: its prompt is not known yet
    num_turns: int = 0
    is_awaited: bool = True  # the player is to speak
    broken: str = ""  # why it cannot go on after this turn


class Episodes:
    """Carries out orders about requests; where there is a `player`, each of them is an episode."""

    def __init__(
        self, plan: Plan, player: Player | None, fleet: Fleet, facts: deque[Event], teller: Teller
    ) -> None:
        self._plan, self._fleet, self._facts, self._teller = plan, fleet, facts, teller
        self.player = player
        self._plays: dict[RequestId, _Play] = {}
        self._adrift: set[RequestId] = set()  # given up where they no longer are
        self._numbers = count()

    # what the orchestrator says

    def generate(self, order: Generate) -> None:
        """Have requests answered from their beginning."""
        if self.player is None:
            self._fleet.send(order.engine, m.Submit(self._plan.requests(order.requests, order.version)))
            return
        for request in order.requests:
            self._leave(request)  # it was on an engine that is lost
            self._teller.earned.pop(request, None)
            episode = Episode(request, next(self._numbers))
            self._plays[request] = _Play(episode, order.version, order.engine)
            self.player.begin(episode, order.version)

    def give_up(self, order: Abort) -> None:
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
        if self._fleet.send(order.engine, m.GiveUp(order.requests)) and gone:
            self._facts.append(RequestsAborted(order.engine, tuple(gone), 0))

    def move(self, order: Migrate) -> None:
        """Have a request change its engine; one that waits moves once it writes on."""
        play, ends = self._plays.get(order.request), (order.source, order.destination)
        if self.player is None:
            (request,) = self._plan.requests([order.request], order.version)
            self._fleet.move(order, request)
        elif play is None:
            self._facts.append(MigrationFailed(order.request, *ends, "it has finished here first"))
        elif play.request is not None:
            self._fleet.move(order, play.request)
        elif self._fleet.workers.keys() >= {*ends}:  # there is nothing to be moved yet
            play.engine = order.destination
            self._facts.append(Migrated(order.request, *ends, 0, 0, 0.0, 0.0))
        else:
            self._facts.appendleft(MigrationFailed(order.request, *ends, "an engine is lost"))

    def end(self, group: GroupId) -> None:
        """The group has failed, and nobody works on it any more."""
        for request in [request for request in self._plays if request.group == group]:
            self._leave(request)

    # what engines and the player say

    def hear_engine(self, engine: int, message: Any) -> None:
        """Turns are the player's; what is finished or refused is no episode any more."""
        match message:
            case m.TurnsEnded(turns):
                for turn in turns:
                    self._take_turn(engine, turn)
            case m.Completed(completions):
                self._leave_all(completion.id for completion in completions)
            case m.Refused(reasons):
                self._leave_all(reasons)

    def hear(self, worker: Worker | None, message: Any) -> None:
        """A word of the player, or of one of its processes."""
        if worker is not None and self.player is not None:
            self.player.hear(worker, message)
        elif isinstance(message, Word):
            play = self._plays.get(message.episode.request)
            if play is not None and play.episode == message.episode:
                self._heed(play, message)

    @property
    def late(self) -> list[str]:
        """What of the player has not started yet."""
        return [] if self.player is None else self.player.late

    def check_deadlines(self) -> None:
        if self.player is not None:
            self.player.check_deadlines()

    def close(self) -> None:
        if self.player is not None:
            self.player.close()

    def _heed(self, play: _Play, word: Word) -> None:
        """What is said out of turn changes nothing, but that an episode is broken."""
        request = play.episode.request
        match word:
            case Broken(_, reason) if play.is_awaited:
                self._break(play, reason)
            case Broken(_, reason):
                play.broken = reason
            case Began(_, prompt_ids, max_turn_tokens) if play.is_awaited and play.request is None:
                play.request = self._request(play, prompt_ids, max_turn_tokens)
                self._answer(play, m.Submit([play.request]))
            case Observed(_, turn, token_ids) if play.is_awaited and turn == play.num_turns - 1:
                self._answer(play, m.Observe(request, token_ids))
            case Over(_, turn, reward) if play.is_awaited and turn == play.num_turns - 1:
                if reward is not None:
                    self._teller.earned[request] = reward
                self._answer(play, m.Finish(request))

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

    def _take_turn(self, engine: int, ended: TurnEnded) -> None:
        play = self._plays.get(ended.request)
        if play is None:
            return  # its group has failed, and the engine is about to hear of it
        play.engine, play.is_awaited = engine, True
        turn = Turn(play.episode, play.num_turns, ended.token_ids, ended.finish_reason, ended.num_left)
        play.num_turns += 1
        if play.broken:
            self._break(play, play.broken)
        elif self.player is not None:
            self.player.take_turn(turn)

    def _break(self, play: _Play, reason: str) -> None:
        """The request fails on its engine; if that is lost it begins anew instead."""
        request = play.episode.request
        if play.request is not None:
            self._answer(play, m.Break(request, reason))
        elif play.engine in self._fleet.workers:
            self._leave(request)
            self._facts.append(self._teller.failed(play.engine, request, reason))

    def _leave_all(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            self._leave(request)

    def _leave(self, request: RequestId) -> _Play | None:
        """The player forgets the episode, and so do we."""
        play = self._plays.pop(request, None)
        if play is not None and self.player is not None:
            self.player.forget(play.episode)
        return play
