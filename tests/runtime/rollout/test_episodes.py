"""The driver between engines and a player: whose turn it is, and what becomes of those who leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.actions import Abort, Generate, Migrate
from dora.core.events import (
    Event,
    GroupScored,
    Migrated,
    MigrationFailed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
)
from dora.core.types import Chunk, GroupId, RequestId
from dora.engine.messages import TurnFinished
from dora.engine.request import Completion, Request
from dora.metrics.rollout import NO_USAGE
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.rollout.episodes import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    Episodes,
    EpisodeStarted,
    PolicyTurn,
)
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore

FIRST, SECOND = RequestId(0, 3, 0), RequestId(0, 3, 1)
GROUP = GroupId(0, 3)
NAN = float("nan")


class Player:
    """Says nothing by itself."""

    def __init__(self) -> None:
        self.begun: dict[RequestId, EpisodeId] = {}
        self.forgotten: list[EpisodeId] = []
        self.turns: list[PolicyTurn] = []
        self.late: list[str] = []

    def begin(self, episode: EpisodeId, version: int) -> None:
        assert version == 7
        self.begun[episode.request] = episode

    def take_turn(self, turn: PolicyTurn) -> None:
        self.turns.append(turn)

    def forget(self, episode: EpisodeId) -> None:
        assert episode not in self.forgotten
        self.forgotten.append(episode)

    def hear(self, worker: Worker, message: Any) -> bool:
        return False

    def check_deadlines(self) -> None: ...

    def close(self) -> None: ...


class Engines:
    """Engines 0 and 1, as far as a fleet says what they are told."""

    def __init__(self) -> None:
        self.workers: dict[int, None] = {0: None, 1: None}
        self.sent: list[tuple[int, object]] = []
        self.moved: list[Request] = []

    def send(self, engine: int, message: object) -> bool:
        if engine in self.workers:
            self.sent.append((engine, message))
        return engine in self.workers

    def move(self, order: Migrate, request: Request) -> None:
        self.moved.append(request)


class Table:
    """Episodes with a player, engines and an orchestrator that say nothing by themselves."""

    def __init__(self, folder: Path) -> None:
        config = load.read_config(write_task(folder), ["service.agents=true"])
        self.plan = RunSetup.make(config, folder)
        self.samples = SampleStore(folder / "samples.sqlite")
        self.teller = SampleBook(self.plan, self.samples)
        self.facts: deque[Event] = deque()
        self.engines, self.player = Engines(), Player()
        fleet = cast(EnginePool, self.engines)
        self.episodes = Episodes(self.plan, self.player, fleet, self.facts, self.teller)

    def begin(self, *requests: RequestId, engine: int = 0) -> None:
        """Order them, and have the player begin."""
        self.episodes.generate(Generate(engine, 7, requests))
        for request in requests:
            self.say(EpisodeStarted(self.player.begun[request], (1, 2)))
        self.engines.sent.clear()

    def say(self, word: EpisodeReply) -> None:
        self.episodes.on_message(None, word)

    def write(self, request: RequestId = FIRST, num_left: int = 10, engine: int = 0) -> EpisodeId:
        """The engine writes a turn; whose it is."""
        ended = TurnFinished(request, [5, 6], "stop", num_left)
        self.episodes.on_engine_message(engine, m.TurnsCompleted([ended]))
        return self.player.begun[request]

    def finish(self, request: RequestId) -> list[Event]:
        """The engine gives an answer back, of two turns with a token in between."""
        logprobs = [-1.0, NAN, -2.0]
        chunks = (Chunk(7, "digest", 3),)
        answer = Completion(request, 7, (1, 2), [5, 4, 6], logprobs, logprobs, logprobs, chunks, "stop")
        message = m.RequestsCompleted([answer], NO_USAGE)
        self.episodes.on_engine_message(0, message)
        return [*self.teller.events_from(0, message)]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.samples.close()


def test_an_episode_goes_from_its_prompt_to_a_scored_group(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (FIRST, SECOND)))
    assert table.engines.sent == []
    table.say(EpisodeStarted(table.player.begun[FIRST], (1, 2), max_turn_tokens=3))
    ((engine, submitted),) = table.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    (request,) = submitted.requests
    assert (engine, request.prompt_ids, request.version) == (0, (1, 2), 7)
    assert (request.sampling.max_turn_tokens, request.sampling.max_tokens) == (3, 24)
    table.say(EpisodeStarted(table.player.begun[SECOND], (1, 2)))
    table.engines.sent.clear()
    episode = table.write()
    assert table.player.turns == [PolicyTurn(episode, 0, [5, 6], "stop", 10)]
    table.say(EpisodeObservation(episode, 0, (4,)))
    assert table.engines.sent == [(0, m.ContinueEpisode(FIRST, (4,)))]
    table.say(EpisodeEnded(table.write(engine=1), 1, 0.5))
    assert table.engines.sent[1:] == [(1, m.EndEpisode(FIRST))]
    table.say(EpisodeEnded(table.write(SECOND), 0, 1.0))
    facts = table.finish(FIRST)
    assert facts == [RequestFinished(0, FIRST, 7, 3, (Chunk(7, "digest", 3),), "stop")]
    table.say(EpisodeEnded(table.player.begun[SECOND], 0, 9.0))  # it is over already
    table.finish(SECOND)
    assert table.player.forgotten == [table.player.begun[FIRST], table.player.begun[SECOND]]
    assert table.teller.num_tokens == {GROUP: 4}


def test_rewards_that_were_earned_are_stored_with_the_answers_and_score_the_group(table: Table) -> None:
    table.begin(FIRST, SECOND)
    for request, reward in ((FIRST, 0.5), (SECOND, 1.5)):
        table.say(EpisodeEnded(table.write(request), 0, reward))
        table.finish(request)
    table.samples.commit()
    found = table.samples.finished(GROUP)
    assert [(one.reward, one.is_scored) for one in found] == [(0.5, False), (1.5, False)]
    assert table.samples.num_generated(GROUP) == [2, 2]
    assert table.samples.num_observed() == {FIRST: 1, SECOND: 1}
    again = SampleBook(table.plan, table.samples)  # everything has died
    again.restore_group(GROUP, False, found, 2)
    assert again.score_from_episodes(GROUP) == GroupScored(GROUP, (0.5, 1.5))
    assert [one.is_scored for one in table.samples.finished(GROUP)] == [True, True]
    assert again.episode_rewards == {}


def test_a_group_without_rewards_of_its_own_is_left_to_the_reward_tasks(table: Table) -> None:
    table.begin(FIRST, SECOND)
    for request in (FIRST, SECOND):
        table.say(EpisodeEnded(table.write(request), 0, None))
        table.finish(request)
    assert table.teller.score_from_episodes(GROUP) is None


def test_what_dies_with_its_engine_begins_anew_and_late_words_are_not_heard(table: Table) -> None:
    table.begin(FIRST)
    before = table.write()
    table.say(EpisodeEnded(before, 0, 1.0))
    del table.engines.workers[0]
    table.episodes.generate(Generate(1, 7, (FIRST,)))
    assert table.player.forgotten == [before]
    assert table.teller.episode_rewards == {}
    table.engines.sent.clear()
    for word in (
        EpisodeStarted(before, (9,)),
        EpisodeObservation(before, 0, (9,)),
        EpisodeEnded(before, 0, 1.0),
        EpisodeFailed(before, "late"),
    ):
        table.say(word)
    assert (table.engines.sent, [*table.facts]) == ([], [])
    table.say(EpisodeStarted(table.player.begun[FIRST], (1, 2)))
    assert [engine for engine, _ in table.engines.sent] == [1]


def test_words_to_an_engine_that_is_lost_go_nowhere(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    table.begin(FIRST)
    episode = table.write()
    del table.engines.workers[0]
    for word in (EpisodeFailed(episode, "too slow"), EpisodeFailed(table.player.begun[SECOND], "too slow")):
        table.say(word)
    assert (table.engines.sent, [*table.facts]) == ([], [])


def test_words_out_of_turn_change_nothing(table: Table) -> None:
    table.begin(FIRST)
    episode = table.player.begun[FIRST]
    for word in (
        EpisodeStarted(episode, (3,)),
        EpisodeObservation(episode, 0, (3,)),
        EpisodeEnded(episode, 0, 1.0),
    ):
        table.say(word)  # the model writes
    table.write()
    for word in (
        EpisodeStarted(episode, (3,)),
        EpisodeObservation(episode, 1, (3,)),
        EpisodeEnded(episode, 1, 1.0),
    ):
        table.say(word)  # there is no second turn yet
    assert (table.engines.sent, table.teller.episode_rewards) == ([], {})


def test_an_episode_that_breaks_fails_where_it_waits_or_after_the_turn(table: Table) -> None:
    table.begin(FIRST, SECOND)
    table.say(EpisodeFailed(table.write(FIRST), "session expired"))
    assert table.engines.sent == [(0, m.FailRequest(FIRST, "session expired"))]
    table.say(EpisodeFailed(table.player.begun[SECOND], "it has died"))
    assert len(table.engines.sent) == 1
    table.write(SECOND, engine=1)
    assert table.engines.sent[1:] == [(1, m.FailRequest(SECOND, "it has died"))]
    assert len(table.player.turns) == 1
    refused = m.RequestsRejected({SECOND: "it has died"})
    table.episodes.on_engine_message(1, refused)
    assert [*table.teller.events_from(1, refused)] == [RequestFailed(1, SECOND, "it has died")]
    assert table.player.forgotten == [table.player.begun[SECOND]]
    table.episodes.discard_group(GROUP)
    assert len(table.player.forgotten) == 2


def test_an_episode_that_cannot_begin_fails_at_once(table: Table) -> None:
    table.episodes.generate(Generate(1, 7, (FIRST,)))
    table.say(EpisodeFailed(table.player.begun[FIRST], "reset raised KeyError"))
    assert [*table.facts] == [RequestFailed(1, FIRST, "reset raised KeyError")]
    assert table.engines.sent == []
    assert table.player.forgotten == [table.player.begun[FIRST]]


def test_who_has_not_begun_is_given_up_and_moved_at_once(table: Table) -> None:
    table.begin(FIRST)
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    table.episodes.migrate(Migrate(SECOND, 0, 1, 7, "flip"))
    table.episodes.migrate(Migrate(FIRST, 0, 1, 7, "flip"))
    assert [*table.facts] == [Migrated(SECOND, 0, 1, 0, 0, 0.0, 0.0)]
    assert [request.prompt_ids for request in table.engines.moved] == [(1, 2)]
    table.facts.clear()
    table.episodes.abort(Abort(1, (SECOND,)))
    table.episodes.abort(Abort(0, (FIRST,)))
    assert [*table.facts] == [RequestsAborted(1, (SECOND,), 0)]
    assert table.engines.sent == [(1, m.AbortRequests((SECOND,))), (0, m.AbortRequests((FIRST,)))]
    assert {*table.player.forgotten} == {*table.player.begun.values()}


def test_who_is_given_up_where_it_no_longer_is_is_given_up_again(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (FIRST,)))
    table.episodes.migrate(Migrate(FIRST, 0, 1, 7, "flip"))
    table.episodes.abort(Abort(0, (FIRST,)))  # the orchestrator has yet to hear of the move
    table.episodes.discard_group(GROUP)
    assert [*table.facts] == [Migrated(FIRST, 0, 1, 0, 0, 0.0, 0.0)]
    table.episodes.abort(Abort(1, (FIRST,)))
    assert [*table.facts][1:] == [RequestsAborted(1, (FIRST,), 0)]
    assert table.player.forgotten == [table.player.begun[FIRST]]


def test_a_move_of_who_has_finished_or_to_who_is_gone_fails(table: Table) -> None:
    table.begin(FIRST)
    table.say(EpisodeEnded(table.write(), 0, None))
    table.finish(FIRST)
    table.episodes.migrate(Migrate(FIRST, 0, 1, 7, "flip"))
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    del table.engines.workers[1]
    table.episodes.migrate(Migrate(SECOND, 0, 1, 7, "flip"))
    assert [*table.facts] == [
        MigrationFailed(SECOND, 0, 1, "an engine is lost"),
        MigrationFailed(FIRST, 0, 1, "it has finished here first"),
    ]
