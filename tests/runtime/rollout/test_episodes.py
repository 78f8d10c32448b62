"""The driver between engines and an episode runner: turns, aborts, migrations and lost engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tests.runtime.tiny import completion_of, write_task

from dora.config import load
from dora.core import actions, events
from dora.core.types import Branch, Chunk, GroupId, RequestId
from dora.engine.decode_batch import NUM_LOGPROBS
from dora.engine.messages import OutputPart, TurnFinished
from dora.engine.request import Request
from dora.envs.episode import (
    EpisodeBranched,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.metrics.rollout import NO_USAGE
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.rollout.episodes import Episodes
from dora.runtime.rollout.partial_outputs import FILE_NAME, PartialOutputs, SavedEpisode
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore

FIRST, SECOND = RequestId(0, 3, 0), RequestId(0, 3, 1)
GROUP = GroupId(0, 3)
NAN = float("nan")
MAX_TOKENS = 24  # of an episode
OTHER_BACKEND = 2  # the number of an engine


class Runner:
    """An episode runner that records its calls and never replies."""

    def __init__(self) -> None:
        self.started: dict[RequestId, EpisodeId] = {}
        self.released: list[EpisodeId] = []
        self.turns: list[PolicyTurn] = []
        self.restored: list[SavedEpisode | None] = []
        self.version = 7

    def start(self, episode: EpisodeId, version: int, saved: SavedEpisode | None = None) -> None:
        assert version == self.version
        self.started[episode.request] = episode
        self.restored.append(saved)

    def on_turn(self, turn: PolicyTurn) -> None:
        self.turns.append(turn)

    def release(self, episode: EpisodeId) -> None:
        assert episode not in self.released
        self.released.append(episode)

    def check_deadlines(self) -> None: ...


class Engines:
    """Engines 0 and 1 of an engine pool that records messages."""

    def __init__(self) -> None:
        self.workers: dict[int, None] = {0: None, 1: None}
        self.digests = {7: "digest"}
        self.sent: list[tuple[int, object]] = []
        self.migrated: list[Request] = []
        self.is_moving = False

    def send(self, engine: int, message: object) -> bool:
        if engine in self.workers:
            self.sent.append((engine, message))
        return engine in self.workers

    def migrate(self, action: actions.Migrate, request: Request) -> None:
        self.migrated.append(request)

    def is_migrating(self, request: RequestId) -> bool:
        return self.is_moving

    def continues_outputs(self, engine: int) -> bool:
        return engine != OTHER_BACKEND


class Driver:
    """`Episodes` with a runner and engines that do nothing by themselves."""

    def __init__(self, folder: Path) -> None:
        config = load.read_config(write_task(folder), ["service.agents=true"])
        self.setup = RunSetup.make(config, folder)
        self.samples = SampleStore(folder / "samples.sqlite")
        self.sample_book = SampleBook(self.setup, self.samples)
        self.events: deque[events.Event] = deque()
        self.engines, self.runner, self.clock = Engines(), Runner(), DriverClock(lambda: 0.0)
        self.episodes = self._make_episodes()

    def _make_episodes(self) -> Episodes:
        engine_pool = cast(EnginePool, self.engines)
        return Episodes(self.setup, self.runner, engine_pool, self.events, self.sample_book, self.clock)

    def resume(self) -> None:
        """Replace the driver by one that has only read the files."""
        self.engines.sent.clear()
        outputs = self.sample_book.partial_outputs = PartialOutputs(self.setup.out / FILE_NAME)
        outputs.read([FIRST, SECOND], are_episodes=True)
        self.episodes = self._make_episodes()

    def start(self, *requests: RequestId, engine: int = 0) -> None:
        """Start episodes, and give them a prompt."""
        self.episodes.generate(actions.Generate(engine, 7, requests))
        for request in requests:
            self.reply(EpisodeStarted(self.runner.started[request], (1, 2)))
        self.engines.sent.clear()

    def reply(self, reply: EpisodeReply) -> None:
        self.episodes.on_message(reply)

    def report(self, request: RequestId, start: int, token_ids: list[int], digest: str = "digest") -> None:
        """An engine reports tokens of an unfinished output."""
        logprobs = np.full((len(token_ids), NUM_LOGPROBS), -0.5, np.float32)
        part = OutputPart(request, 7, digest, start, np.array(token_ids, np.int32), logprobs)
        self.episodes.on_engine_message(0, m.OutputsReported([part]))

    def lose_engine(self, engine: int = 0) -> None:
        """An engine crashes, and the orchestrator handles the event, with all tokens that are kept."""
        del self.engines.workers[engine]
        kept_tokens = self.sample_book.partial_outputs.lengths([FIRST, SECOND])
        self.episodes.on_event(events.EngineLost(engine, "killed", kept_tokens))

    def generate_turn(self, request: RequestId = FIRST, num_left: int = 10, engine: int = 0) -> EpisodeId:
        """An engine generates a turn. Returns its episode."""
        turn = TurnFinished(request, [5, 6], "stop", num_left)
        self.episodes.on_engine_message(engine, m.TurnsCompleted([turn]))
        return self.runner.started[request]

    def finish(self, request: RequestId) -> list[events.Event]:
        """An engine completes a request: two turns with an observation of one token in between."""
        chunks = (Chunk(7, "digest", 3),)
        completion = completion_of(request, [5, 4, 6], [-1.0, NAN, -2.0], chunks)
        message = m.RequestsCompleted([completion], NO_USAGE)
        self.episodes.on_engine_message(0, message)
        return [*self.sample_book.events_from(0, message)]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.samples.close()


def test_an_episode_from_its_prompt_to_its_completion(driver: Driver) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (FIRST, SECOND)))
    assert driver.engines.sent == []
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2), max_turn_tokens=3))
    ((engine, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    (request,) = submitted.requests
    assert (engine, request.prompt_ids, request.version) == (0, (1, 2), 7)
    assert (request.sampling.max_turn_tokens, request.sampling.max_tokens) == (3, 24)
    driver.reply(EpisodeStarted(driver.runner.started[SECOND], (1, 2)))
    driver.engines.sent.clear()
    episode = driver.generate_turn()
    assert driver.runner.turns == [PolicyTurn(episode, 0, [5, 6], "stop", 10)]
    driver.reply(EpisodeObservation(episode, 0, (4,)))
    assert driver.engines.sent == [(0, m.ContinueEpisode(FIRST, (4,)))]
    driver.reply(EpisodeEnded(driver.generate_turn(engine=1), 1, 0.5))
    assert driver.engines.sent[1:] == [(1, m.EndEpisode(FIRST))]
    driver.reply(EpisodeEnded(driver.generate_turn(SECOND), 0, 1.0))
    (event,) = driver.finish(FIRST)
    assert isinstance(event, events.RequestFinished)
    assert event == events.RequestFinished(0, FIRST, 7, 3, (Chunk(7, "digest", 3),), "stop", event.payload)
    driver.reply(EpisodeEnded(driver.runner.started[SECOND], 0, 9.0))  # it has ended already
    driver.finish(SECOND)
    assert driver.runner.released == [driver.runner.started[FIRST], driver.runner.started[SECOND]]
    assert driver.sample_book.num_tokens == {GROUP: {0: 2, 1: 2}}


def test_a_branch_is_another_request_and_the_episode_is_one_sample(driver: Driver) -> None:
    driver.start(FIRST)
    episode = driver.generate_turn(num_left=10)  # the tree is 1 2 | 5 6
    driver.reply(EpisodeBranched(episode, 0, (1, 2, 5, 3, 3), num_new=2, parent=3))
    driver.engines.is_moving = True
    first = replace(
        completion_of(FIRST, [5, 6], [-1.0, -2.0], (Chunk(7, "digest", 2),)), prompt_ids=np.array([1, 2])
    )
    message = driver.episodes.on_engine_message(1, m.RequestsCompleted([first], NO_USAGE))
    assert [*driver.sample_book.events_from(1, message)] == []
    assert driver.engines.sent == [(0, m.EndEpisode(FIRST))]  # an engine may still move the first request
    driver.engines.is_moving = False
    driver.episodes.check_deadlines()
    engine, submitted = driver.engines.sent[-1]
    assert isinstance(submitted, m.SubmitRequests)
    (request,) = submitted.requests
    assert (engine, request.prompt_ids, request.sampling.max_tokens) == (1, (1, 2, 5, 3, 3), 8)
    (same,) = driver.setup.requests([FIRST], 7)
    assert request.seed != same.seed
    driver.reply(EpisodeEnded(driver.generate_turn(engine=1), 1, 0.5))
    last = replace(
        completion_of(FIRST, [7], [-3.0], (Chunk(7, "digest", 1),)), prompt_ids=np.array([1, 2, 5, 3, 3])
    )
    message = driver.episodes.on_engine_message(1, m.RequestsCompleted([last], NO_USAGE))
    (event,) = driver.sample_book.events_from(1, message)
    assert isinstance(event, events.RequestFinished)
    assert event == events.RequestFinished(1, FIRST, 7, 5, (Chunk(7, "digest", 5),), "stop", event.payload)
    assert driver.runner.released == [episode]
    ((sample, *_),) = driver.samples._rows("sibling = ?", str(FIRST.sibling))
    assert ([*sample.prompt_ids], [*sample.token_ids]) == ([1, 2], [5, 6, 3, 3, 7])
    assert ([*(np.asarray(sample.loss_mask))], sample.branches) == ([1, 1, 0, 0, 1], [Branch(4, 3)])


def test_rewards_of_episodes_are_stored_with_the_samples_and_score_the_group(driver: Driver) -> None:
    driver.start(FIRST, SECOND)
    for request, reward in ((FIRST, 0.5), (SECOND, 1.5)):
        driver.reply(EpisodeEnded(driver.generate_turn(request), 0, reward))
        driver.finish(request)
    driver.samples.commit()
    found = driver.samples.finished(GROUP)
    assert [(sample.reward, sample.is_scored) for sample in found] == [(0.5, False), (1.5, False)]
    assert driver.samples.response_lengths(GROUP) == [3, 3]
    assert driver.samples.episode_sizes() == {FIRST: (1, 2), SECOND: (1, 2)}
    resumed = SampleBook(driver.setup, driver.samples)
    resumed.restore_group(GROUP, False, found, 2)
    assert resumed.score_from_episodes(GROUP) == events.GroupScored(GROUP, (0.5, 1.5))
    assert [sample.is_scored for sample in driver.samples.finished(GROUP)] == [True, True]
    assert resumed.episode_rewards == {}


def test_the_rewards_of_turns_are_stored_with_the_sample(driver: Driver) -> None:
    driver.start(FIRST, SECOND)
    driver.reply(EpisodeObservation(episode := driver.generate_turn(), 0, (4,)))
    driver.reply(EpisodeEnded(driver.generate_turn(), 1, 0.75, (0.5, 0.25)))
    driver.reply(EpisodeEnded(driver.generate_turn(SECOND), 0, 1.0))
    driver.finish(FIRST)
    driver.finish(SECOND)
    rows = driver.samples._rows("state = 'finished'")
    assert [[*sample.turn_rewards] for sample, *_ in rows] == [[0.5, 0.25], []]
    assert driver.runner.released[0] == episode


def test_an_episode_that_starts_again_forgets_the_rewards_of_its_turns(driver: Driver) -> None:
    driver.start(FIRST)
    driver.reply(EpisodeEnded(driver.generate_turn(), 0, 0.75, (0.75,)))
    driver.sample_book.forget_episode(FIRST)
    driver.finish(FIRST)
    ((sample, *_),) = driver.samples._rows("state = 'finished'")
    assert (sample.reward, [*sample.turn_rewards]) == (None, [])


@pytest.mark.parametrize("cut", ["max_turns", "observation_length", ""])
def test_an_episode_that_was_cut_has_the_reason_and_its_turns_are_counted(driver: Driver, cut: str) -> None:
    driver.start(FIRST, SECOND)
    driver.reply(EpisodeObservation(driver.generate_turn(), 0, (4,)))
    driver.reply(EpisodeEnded(driver.generate_turn(), 1, 0.75, (0.5, 0.25), cut))
    (event,) = driver.finish(FIRST)
    assert isinstance(event, events.RequestFinished)
    assert event.finish_reason == (cut or "stop")
    ((sample, *_),) = driver.samples._rows("sibling = ?", str(FIRST.sibling))
    assert sample.finish_reason == (cut or "stop")
    assert driver.sample_book.num_turns == {GROUP: {FIRST.sibling: 2}}


def test_a_turn_reward_out_of_range_fails_its_episode(driver: Driver) -> None:
    driver.start(FIRST)
    driver.reply(EpisodeEnded(driver.generate_turn(), 0, 0.0, (1e7,)))
    reason = "turn reward 1e+07 must be between -1e+06 and 1e+06"
    assert driver.engines.sent == [(0, m.FailRequest(FIRST, reason))]
    assert driver.sample_book.episode_rewards == {}


def test_a_group_without_episode_rewards_is_left_to_the_reward_tasks(driver: Driver) -> None:
    driver.start(FIRST, SECOND)
    for request in (FIRST, SECOND):
        driver.reply(EpisodeEnded(driver.generate_turn(request), 0, None))
        driver.finish(request)
    assert driver.sample_book.score_from_episodes(GROUP) is None


@pytest.mark.parametrize("moment", ["before the loss", "before the request", "after the request"])
@pytest.mark.parametrize("reply", ["observation", "end", "branch"])
def test_an_episode_of_a_lost_engine_continues_after_its_last_turn(
    driver: Driver, moment: str, reply: str
) -> None:
    """Whenever the only reply of the environment to the turn arrives, the next engine gets it."""
    driver.start(FIRST)
    driver.report(FIRST, 0, [5, 6])
    episode = driver.generate_turn(num_left=MAX_TOKENS - 2)
    replies: dict[str, EpisodeReply] = {
        "observation": EpisodeObservation(episode, 0, (4, 4)),
        "end": EpisodeEnded(episode, 0, 0.5),
        "branch": EpisodeBranched(episode, 0, (1, 3), num_new=1, parent=1),
    }
    if moment == "before the loss":
        driver.reply(replies[reply])
    driver.lose_engine()
    if moment == "before the request":
        driver.reply(replies[reply])
    driver.engines.sent.clear()
    driver.episodes.generate(actions.Generate(1, 7, (FIRST,)))
    if moment == "after the request":
        driver.reply(replies[reply])
    (engine, submitted), *others = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    (request,), output = submitted.requests, submitted.outputs[FIRST]
    assert (engine, request.prompt_ids, output.chunks[0][:2]) == (1, (1, 2), (7, "digest"))
    is_known = reply == "observation" and moment != "after the request"
    assert output.token_ids.tolist() == [5, 6, 4, 4] if is_known else [5, 6]
    assert np.isnan(output.logprobs[:, 0]).tolist() == [False, False, True, True][: len(output.token_ids)]
    message = m.ContinueEpisode(FIRST, (4, 4)) if reply == "observation" else m.EndEpisode(FIRST)
    assert others == ([] if is_known else [(1, message)])
    assert (len(driver.runner.turns), driver.runner.released) == (1, [])


def test_an_episode_of_a_lost_engine_continues_in_its_turn(driver: Driver) -> None:
    driver.start(FIRST)
    driver.report(FIRST, 0, [5, 6])
    driver.reply(EpisodeObservation(driver.generate_turn(num_left=MAX_TOKENS - 2), 0, (4,)))
    driver.report(FIRST, 2, [4, 7])
    driver.lose_engine()
    driver.engines.sent.clear()
    driver.episodes.generate(actions.Generate(1, 7, (FIRST,)))
    ((_, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    assert submitted.outputs[FIRST].token_ids.tolist() == [5, 6, 4, 7]
    driver.generate_turn(num_left=MAX_TOKENS - 5, engine=1)
    assert [turn.number for turn in driver.runner.turns] == [0, 1]


def test_an_episode_without_a_finished_turn_keeps_its_prompt(driver: Driver) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (FIRST, SECOND)))
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2)))
    driver.lose_engine()
    driver.engines.sent.clear()
    driver.episodes.generate(actions.Generate(1, 7, (FIRST, SECOND)))
    driver.reply(EpisodeStarted(driver.runner.started[SECOND], (1, 2)))
    assert [(engine, message.requests[0].id) for engine, message in driver.engines.sent] == [  # type: ignore[attr-defined]
        (1, FIRST),
        (1, SECOND),
    ]
    assert driver.runner.released == []


@pytest.mark.parametrize("digest", ["digest", "of other weights"])
def test_a_saved_episode_continues_in_a_resumed_run(driver: Driver, digest: str) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (FIRST, SECOND)))
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2), state=b"at the start"))
    driver.reply(EpisodeStarted(driver.runner.started[SECOND], (1, 2)))
    driver.report(FIRST, 0, [5, 6])
    episode = driver.generate_turn(num_left=MAX_TOKENS - 2)
    driver.reply(EpisodeObservation(episode, 0, (4,), b"after a turn"))
    driver.report(FIRST, 3, [7, 8])
    driver.report(SECOND, 0, [5, 6])
    kept = driver.sample_book.partial_outputs
    driver.resume()
    driver.engines.digests[7] = digest
    driver.episodes.generate(actions.Generate(1, 7, (FIRST, SECOND)))
    is_kept = digest == "digest"
    saved = SavedEpisode((1, 2), 1, 3, b"after a turn")
    assert kept.saved(FIRST) == saved
    assert driver.runner.restored[2:] == [saved if is_kept else None, None]
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2)))
    ((engine, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    found = [output.token_ids.tolist() for output in submitted.outputs.values()]
    assert (engine, found) == (1, [[5, 6, 4, 7]] if is_kept else [])
    driver.generate_turn(num_left=MAX_TOKENS - 5, engine=1)
    assert [turn.number for turn in driver.runner.turns] == [0, 1 if is_kept else 0]


def test_an_episode_whose_environment_is_not_restored_loses_what_was_kept(driver: Driver) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (FIRST,)))
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2), state=b"at the start"))
    driver.report(FIRST, 0, [5, 6])
    driver.reply(EpisodeObservation(driver.generate_turn(num_left=MAX_TOKENS - 2), 0, (4,), b"later"))
    driver.resume()
    driver.episodes.generate(actions.Generate(1, 7, (FIRST,)))
    driver.reply(EpisodeFailed(driver.runner.started[FIRST], "environment raised KeyError"))
    failed = events.RequestFailed(1, FIRST, "environment raised KeyError", "environment")
    driver.episodes.check_deadlines()
    assert [*driver.events] == [failed], "which takes back what was counted as kept"
    driver.resume()
    assert driver.sample_book.partial_outputs.saved(FIRST) is None, "the failed attempt does not come back"


def test_a_branch_continues_after_the_loss_of_its_engine(driver: Driver) -> None:
    driver.start(FIRST)
    driver.report(FIRST, 0, [5, 6])
    episode = driver.generate_turn(num_left=MAX_TOKENS - 2)
    driver.reply(EpisodeBranched(episode, 0, (1, 2, 5, 3), num_new=1, parent=3))
    first = completion_of(FIRST, [5, 6], [-1.0, -2.0], (Chunk(7, "digest", 2),))
    driver.engines.is_moving = True
    driver.episodes.on_engine_message(0, m.RequestsCompleted([first], NO_USAGE))
    driver.engines.is_moving = False
    driver.lose_engine()
    driver.engines.sent.clear()
    driver.episodes.generate(actions.Generate(1, 7, (FIRST,)))
    ((_, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    assert ([request.prompt_ids for request in submitted.requests], submitted.outputs) == ([(1, 2, 5, 3)], {})


def test_an_episode_without_an_engine_ends_its_session_after_a_while(driver: Driver) -> None:
    """Else an agent could wait for a row, and the episode in the row for an agent."""
    driver.start(FIRST)
    episode = driver.runner.started[FIRST]
    driver.report(FIRST, 0, [5, 6])
    driver.lose_engine()
    driver.clock._ran_s += 59.0
    driver.episodes.check_deadlines()
    assert (driver.runner.released, [*driver.events]) == ([], [])
    driver.clock._ran_s += 1.5
    driver.episodes.check_deadlines()
    assert (driver.runner.released, [*driver.events]) == ([episode], [events.OutputsLost((FIRST,))])
    driver.start(FIRST, engine=1)
    assert driver.runner.started[FIRST] != episode


def test_a_first_turn_that_the_next_engine_cannot_continue_is_lost(driver: Driver) -> None:
    driver.start(FIRST)
    driver.report(FIRST, 0, [5, 6])
    driver.lose_engine()
    driver.engines.workers[OTHER_BACKEND] = None
    driver.episodes.generate(actions.Generate(OTHER_BACKEND, 7, (FIRST,)))
    ((_, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    assert (submitted.outputs, [*driver.events]) == ({}, [events.OutputsLost((FIRST,))])


@pytest.mark.parametrize("reason", ["no report", "other weights", "other backend", "other version"])
def test_an_episode_of_a_lost_engine_restarts_and_old_replies_are_ignored(
    driver: Driver, reason: str
) -> None:
    driver.start(FIRST)
    if reason != "no report":
        driver.report(FIRST, 0, [5, 6], "other" if reason == "other weights" else "digest")
    old = driver.generate_turn(num_left=MAX_TOKENS - 2)
    driver.reply(EpisodeEnded(old, 0, 1.0))
    driver.lose_engine()
    driver.engines.workers[OTHER_BACKEND] = None
    engine = OTHER_BACKEND if reason == "other backend" else 1
    driver.runner.version = 8 if reason == "other version" else 7
    driver.episodes.generate(actions.Generate(engine, driver.runner.version, (FIRST,)))
    assert driver.runner.released == [old]
    assert driver.sample_book.episode_rewards == {}
    driver.engines.sent.clear()
    driver.episodes.check_deadlines()
    assert [*driver.events] == ([] if reason == "no report" else [events.OutputsLost((FIRST,))])
    driver.events.clear()
    for reply in (
        EpisodeStarted(old, (9,)),
        EpisodeObservation(old, 0, (9,)),
        EpisodeEnded(old, 0, 1.0),
        EpisodeFailed(old, "late"),
    ):
        driver.reply(reply)
    assert (driver.engines.sent, [*driver.events]) == ([], [])
    driver.reply(EpisodeStarted(driver.runner.started[FIRST], (1, 2)))
    ((sent_to, submitted),) = driver.engines.sent
    assert isinstance(submitted, m.SubmitRequests)
    assert (sent_to, submitted.outputs) == (engine, {})


@pytest.mark.parametrize("is_handled", [False, True])
def test_failed_episodes_of_a_lost_engine_restart(driver: Driver, is_handled: bool) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (SECOND,)))
    driver.start(FIRST)
    driver.report(FIRST, 0, [5, 6])
    failed = [driver.generate_turn(), driver.runner.started[SECOND]]
    if is_handled:
        driver.lose_engine()
    else:
        del driver.engines.workers[0]
        lost = events.EngineLost(0, "killed", driver.sample_book.partial_outputs.lengths([FIRST]))
    for episode in failed:
        driver.reply(EpisodeFailed(episode, "too slow"))
    if not is_handled:
        assert [*driver.events] == []
        driver.episodes.on_event(lost)
    assert (driver.engines.sent, [*driver.events]) == ([], [events.OutputsLost((FIRST,))])
    assert {*driver.runner.released} == {*failed}
    assert driver.sample_book.partial_outputs.lengths([FIRST]) == ()


def test_replies_that_are_not_awaited_are_ignored(driver: Driver) -> None:
    driver.start(FIRST)
    episode = driver.runner.started[FIRST]
    for reply in (
        EpisodeStarted(episode, (3,)),
        EpisodeObservation(episode, 0, (3,)),
        EpisodeEnded(episode, 0, 1.0),
    ):
        driver.reply(reply)  # the model generates a turn
    driver.generate_turn()
    for reply in (
        EpisodeStarted(episode, (3,)),
        EpisodeObservation(episode, 1, (3,)),
        EpisodeEnded(episode, 1, 1.0),
    ):
        driver.reply(reply)  # there is no second turn yet
    assert (driver.engines.sent, driver.sample_book.episode_rewards) == ([], {})


def test_a_failed_episode_fails_at_once_or_after_the_turn_in_progress(driver: Driver) -> None:
    driver.start(FIRST, SECOND)
    driver.reply(EpisodeFailed(driver.generate_turn(FIRST), "session expired"))
    assert driver.engines.sent == [(0, m.FailRequest(FIRST, "session expired"))]
    driver.reply(EpisodeFailed(driver.runner.started[SECOND], "its process exited"))
    assert len(driver.engines.sent) == 1
    driver.generate_turn(SECOND, engine=1)
    assert driver.engines.sent[1:] == [(1, m.FailRequest(SECOND, "its process exited"))]
    assert len(driver.runner.turns) == 1
    rejected = m.RequestsRejected({SECOND: "its process exited"})
    failed = events.RequestFailed(1, SECOND, "its process exited", "environment")
    driver.episodes.on_engine_message(1, rejected)
    assert [*driver.sample_book.events_from(1, rejected)] == [failed]
    assert driver.runner.released == [driver.runner.started[SECOND]]
    driver.episodes.discard_group(GROUP)
    assert len(driver.runner.released) == 2


def test_a_migrated_episode_is_not_lost_with_its_first_engine(driver: Driver) -> None:
    driver.start(FIRST, SECOND)
    started = {**driver.runner.started}
    driver.episodes.on_event(events.Migrated(SECOND, 0, 1, 0, 0, 0.0, 0.0))
    driver.lose_engine()
    for episode in started.values():
        driver.reply(EpisodeFailed(episode, "too slow"))
    assert driver.runner.released == [started[FIRST]], "the other one is in its turn on engine 1"


def test_an_episode_that_cannot_start_fails_at_once(driver: Driver) -> None:
    driver.episodes.generate(actions.Generate(1, 7, (FIRST,)))
    driver.reply(EpisodeFailed(driver.runner.started[FIRST], "reset raised KeyError"))
    assert [*driver.events] == [events.RequestFailed(1, FIRST, "reset raised KeyError", "environment")]
    assert driver.engines.sent == []
    assert driver.runner.released == [driver.runner.started[FIRST]]


def test_episodes_without_a_prompt_are_aborted_and_migrated_at_once(driver: Driver) -> None:
    driver.start(FIRST)
    driver.episodes.generate(actions.Generate(0, 7, (SECOND,)))
    driver.episodes.migrate(actions.Migrate(SECOND, 0, 1, 7, "flip"))
    driver.episodes.migrate(actions.Migrate(FIRST, 0, 1, 7, "flip"))
    assert [*driver.events] == [events.Migrated(SECOND, 0, 1, 0, 0, 0.0, 0.0)]
    assert [request.prompt_ids for request in driver.engines.migrated] == [(1, 2)]
    driver.events.clear()
    driver.episodes.abort(actions.Abort(1, (SECOND,)))
    driver.episodes.abort(actions.Abort(0, (FIRST,)))
    assert [*driver.events] == [events.RequestsAborted(1, (SECOND,), 0)]
    assert driver.engines.sent == [(1, m.AbortRequests((SECOND,))), (0, m.AbortRequests((FIRST,)))]
    assert {*driver.runner.released} == {*driver.runner.started.values()}


def test_an_abort_that_crosses_a_migration_is_repeated_on_the_new_engine(driver: Driver) -> None:
    driver.episodes.generate(actions.Generate(0, 7, (FIRST,)))
    driver.episodes.migrate(actions.Migrate(FIRST, 0, 1, 7, "flip"))
    driver.episodes.abort(actions.Abort(0, (FIRST,)))  # the orchestrator has not handled `Migrated` yet
    driver.episodes.discard_group(GROUP)
    assert [*driver.events] == [events.Migrated(FIRST, 0, 1, 0, 0, 0.0, 0.0)]
    driver.episodes.abort(actions.Abort(1, (FIRST,)))
    assert [*driver.events][1:] == [events.RequestsAborted(1, (FIRST,), 0)]
    assert driver.runner.released == [driver.runner.started[FIRST]]


def test_a_migration_of_a_finished_request_or_to_a_lost_engine_fails(driver: Driver) -> None:
    driver.start(FIRST)
    driver.reply(EpisodeEnded(driver.generate_turn(), 0, None))
    driver.finish(FIRST)
    driver.episodes.migrate(actions.Migrate(FIRST, 0, 1, 7, "flip"))
    driver.episodes.generate(actions.Generate(0, 7, (SECOND,)))
    del driver.engines.workers[1]
    driver.episodes.migrate(actions.Migrate(SECOND, 0, 1, 7, "flip"))
    assert [*driver.events] == [
        events.MigrationFailed(SECOND, 0, 1, "an engine is lost"),
        events.MigrationFailed(FIRST, 0, 1, "it has finished on its source"),
    ]
