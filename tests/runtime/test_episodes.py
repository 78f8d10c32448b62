"""The driver between engines and a player: whose turn it is, and what becomes of those who leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.runtime.tiny import write_task

from dora import settings
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
from dora.core.records import Chunk, GroupId, RequestId
from dora.engine.sequence import Completion, Request
from dora.runtime import messages as m
from dora.runtime.episodes import Episodes
from dora.runtime.fleet import Fleet
from dora.runtime.occupancy import NEW
from dora.runtime.plan import Plan
from dora.runtime.players import Began, Broken, Episode, Observed, Over, Turn, Word
from dora.runtime.process import Worker
from dora.runtime.telling import Teller
from dora.stream.samples import SampleStore
from dora.turns.words import TurnEnded

FIRST, SECOND = RequestId(0, 3, 0), RequestId(0, 3, 1)
GROUP = GroupId(0, 3)
NAN = float("nan")


class Player:
    """Says nothing by itself."""

    def __init__(self) -> None:
        self.begun: dict[RequestId, Episode] = {}
        self.forgotten: list[Episode] = []
        self.turns: list[Turn] = []
        self.late: list[str] = []

    def begin(self, episode: Episode, version: int) -> None:
        assert version == 7
        self.begun[episode.request] = episode

    def take_turn(self, turn: Turn) -> None:
        self.turns.append(turn)

    def forget(self, episode: Episode) -> None:
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
        config = settings.read(write_task(folder), ["service.agents=true"])
        self.plan = Plan.make(config, folder)
        self.samples = SampleStore(folder / "samples.sqlite")
        self.teller = Teller(self.plan, self.samples)
        self.facts: deque[Event] = deque()
        self.engines, self.player = Engines(), Player()
        fleet = cast(Fleet, self.engines)
        self.episodes = Episodes(self.plan, self.player, fleet, self.facts, self.teller)

    def begin(self, *requests: RequestId, engine: int = 0) -> None:
        """Order them, and have the player begin."""
        self.episodes.generate(Generate(engine, 7, requests))
        for request in requests:
            self.say(Began(self.player.begun[request], (1, 2)))
        self.engines.sent.clear()

    def say(self, word: Word) -> None:
        self.episodes.hear(None, word)

    def write(self, request: RequestId = FIRST, num_left: int = 10, engine: int = 0) -> Episode:
        """The engine writes a turn; whose it is."""
        ended = TurnEnded(request, [5, 6], "stop", num_left)
        self.episodes.hear_engine(engine, m.TurnsEnded([ended]))
        return self.player.begun[request]

    def finish(self, request: RequestId) -> list[Event]:
        """The engine gives an answer back, of two turns with a token in between."""
        logprobs = [-1.0, NAN, -2.0]
        chunks = (Chunk(7, "digest", 3),)
        answer = Completion(request, 7, (1, 2), [5, 4, 6], logprobs, logprobs, logprobs, chunks, "stop")
        message = m.Completed([answer], NEW)
        self.episodes.hear_engine(0, message)
        return [*self.teller.told(0, message)]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.samples.close()


def test_an_episode_goes_from_its_prompt_to_a_scored_group(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (FIRST, SECOND)))
    assert table.engines.sent == []
    table.say(Began(table.player.begun[FIRST], (1, 2), max_turn_tokens=3))
    ((engine, submitted),) = table.engines.sent
    assert isinstance(submitted, m.Submit)
    (request,) = submitted.requests
    assert (engine, request.prompt_ids, request.version) == (0, (1, 2), 7)
    assert (request.sampling.max_turn_tokens, request.sampling.max_tokens) == (3, 24)
    table.say(Began(table.player.begun[SECOND], (1, 2)))
    table.engines.sent.clear()
    episode = table.write()
    assert table.player.turns == [Turn(episode, 0, [5, 6], "stop", 10)]
    table.say(Observed(episode, 0, (4,)))
    assert table.engines.sent == [(0, m.Observe(FIRST, (4,)))]
    table.say(Over(table.write(engine=1), 1, 0.5))
    assert table.engines.sent[1:] == [(1, m.Finish(FIRST))]
    table.say(Over(table.write(SECOND), 0, 1.0))
    facts = table.finish(FIRST)
    assert facts == [RequestFinished(0, FIRST, 7, 3, (Chunk(7, "digest", 3),), "stop")]
    table.say(Over(table.player.begun[SECOND], 0, 9.0))  # it is over already
    table.finish(SECOND)
    assert table.player.forgotten == [table.player.begun[FIRST], table.player.begun[SECOND]]
    assert table.teller.num_tokens == {GROUP: 4}


def test_rewards_that_were_earned_are_stored_with_the_answers_and_score_the_group(table: Table) -> None:
    table.begin(FIRST, SECOND)
    for request, reward in ((FIRST, 0.5), (SECOND, 1.5)):
        table.say(Over(table.write(request), 0, reward))
        table.finish(request)
    table.samples.commit()
    found = table.samples.finished(GROUP)
    assert [(one.reward, one.is_judged) for one in found] == [(0.5, False), (1.5, False)]
    assert table.samples.num_drawn(GROUP) == [2, 2]
    assert table.samples.num_read() == {FIRST: 1, SECOND: 1}
    again = Teller(table.plan, table.samples)  # everything has died
    again.restore(GROUP, False, found, 2)
    assert again.scored_by_itself(GROUP) == GroupScored(GROUP, (0.5, 1.5))
    assert [one.is_judged for one in table.samples.finished(GROUP)] == [True, True]
    assert again.earned == {}


def test_a_group_without_rewards_of_its_own_is_left_to_the_reward_tasks(table: Table) -> None:
    table.begin(FIRST, SECOND)
    for request in (FIRST, SECOND):
        table.say(Over(table.write(request), 0, None))
        table.finish(request)
    assert table.teller.scored_by_itself(GROUP) is None


def test_what_dies_with_its_engine_begins_anew_and_late_words_are_not_heard(table: Table) -> None:
    table.begin(FIRST)
    before = table.write()
    table.say(Over(before, 0, 1.0))
    del table.engines.workers[0]
    table.episodes.generate(Generate(1, 7, (FIRST,)))
    assert table.player.forgotten == [before]
    assert table.teller.earned == {}
    table.engines.sent.clear()
    for word in (
        Began(before, (9,)),
        Observed(before, 0, (9,)),
        Over(before, 0, 1.0),
        Broken(before, "late"),
    ):
        table.say(word)
    assert (table.engines.sent, [*table.facts]) == ([], [])
    table.say(Began(table.player.begun[FIRST], (1, 2)))
    assert [engine for engine, _ in table.engines.sent] == [1]


def test_words_to_an_engine_that_is_lost_go_nowhere(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    table.begin(FIRST)
    episode = table.write()
    del table.engines.workers[0]
    for word in (Broken(episode, "too slow"), Broken(table.player.begun[SECOND], "too slow")):
        table.say(word)
    assert (table.engines.sent, [*table.facts]) == ([], [])


def test_words_out_of_turn_change_nothing(table: Table) -> None:
    table.begin(FIRST)
    episode = table.player.begun[FIRST]
    for word in (Began(episode, (3,)), Observed(episode, 0, (3,)), Over(episode, 0, 1.0)):
        table.say(word)  # the model writes
    table.write()
    for word in (Began(episode, (3,)), Observed(episode, 1, (3,)), Over(episode, 1, 1.0)):
        table.say(word)  # there is no second turn yet
    assert (table.engines.sent, table.teller.earned) == ([], {})


def test_an_episode_that_breaks_fails_where_it_waits_or_after_the_turn(table: Table) -> None:
    table.begin(FIRST, SECOND)
    table.say(Broken(table.write(FIRST), "session expired"))
    assert table.engines.sent == [(0, m.Break(FIRST, "session expired"))]
    table.say(Broken(table.player.begun[SECOND], "it has died"))
    assert len(table.engines.sent) == 1
    table.write(SECOND, engine=1)
    assert table.engines.sent[1:] == [(1, m.Break(SECOND, "it has died"))]
    assert len(table.player.turns) == 1
    refused = m.Refused({SECOND: "it has died"})
    table.episodes.hear_engine(1, refused)
    assert [*table.teller.told(1, refused)] == [RequestFailed(1, SECOND, "it has died")]
    assert table.player.forgotten == [table.player.begun[SECOND]]
    table.episodes.end(GROUP)
    assert len(table.player.forgotten) == 2


def test_an_episode_that_cannot_begin_fails_at_once(table: Table) -> None:
    table.episodes.generate(Generate(1, 7, (FIRST,)))
    table.say(Broken(table.player.begun[FIRST], "reset raised KeyError"))
    assert [*table.facts] == [RequestFailed(1, FIRST, "reset raised KeyError")]
    assert table.engines.sent == []
    assert table.player.forgotten == [table.player.begun[FIRST]]


def test_who_has_not_begun_is_given_up_and_moved_at_once(table: Table) -> None:
    table.begin(FIRST)
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    table.episodes.move(Migrate(SECOND, 0, 1, 7, "flip"))
    table.episodes.move(Migrate(FIRST, 0, 1, 7, "flip"))
    assert [*table.facts] == [Migrated(SECOND, 0, 1, 0, 0, 0.0, 0.0)]
    assert [request.prompt_ids for request in table.engines.moved] == [(1, 2)]
    table.facts.clear()
    table.episodes.give_up(Abort(1, (SECOND,)))
    table.episodes.give_up(Abort(0, (FIRST,)))
    assert [*table.facts] == [RequestsAborted(1, (SECOND,), 0)]
    assert table.engines.sent == [(1, m.GiveUp((SECOND,))), (0, m.GiveUp((FIRST,)))]
    assert {*table.player.forgotten} == {*table.player.begun.values()}


def test_who_is_given_up_where_it_no_longer_is_is_given_up_again(table: Table) -> None:
    table.episodes.generate(Generate(0, 7, (FIRST,)))
    table.episodes.move(Migrate(FIRST, 0, 1, 7, "flip"))
    table.episodes.give_up(Abort(0, (FIRST,)))  # the orchestrator has yet to hear of the move
    table.episodes.end(GROUP)
    assert [*table.facts] == [Migrated(FIRST, 0, 1, 0, 0, 0.0, 0.0)]
    table.episodes.give_up(Abort(1, (FIRST,)))
    assert [*table.facts][1:] == [RequestsAborted(1, (FIRST,), 0)]
    assert table.player.forgotten == [table.player.begun[FIRST]]


def test_a_move_of_who_has_finished_or_to_who_is_gone_fails(table: Table) -> None:
    table.begin(FIRST)
    table.say(Over(table.write(), 0, None))
    table.finish(FIRST)
    table.episodes.move(Migrate(FIRST, 0, 1, 7, "flip"))
    table.episodes.generate(Generate(0, 7, (SECOND,)))
    del table.engines.workers[1]
    table.episodes.move(Migrate(SECOND, 0, 1, 7, "flip"))
    assert [*table.facts] == [
        MigrationFailed(SECOND, 0, 1, "an engine is lost"),
        MigrationFailed(FIRST, 0, 1, "it has finished here first"),
    ]
