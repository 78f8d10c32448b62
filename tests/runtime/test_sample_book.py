"""Messages of engines become events, and discarded groups are forgotten."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.running import query
from tests.runtime.tiny import completion_of

from dora.config import load
from dora.core.events import GroupScored, RequestFailed, RequestFinished, ScoringFailed
from dora.core.types import Chunk, GroupId, RequestId
from dora.metrics.rollout import NO_USAGE
from dora.runtime.process.messages import RequestsCompleted, RequestsRejected
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import MAX_DISCARDED_GROUPS, SampleBook
from dora.stream.sample_db import SampleStore

GROUP = GroupId(0, 3)


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[SampleStore]:
    store = SampleStore(tmp_path / "samples.sqlite")
    yield store
    store.close()


@pytest.fixture
def book(task: Path, tmp_path: Path, samples: SampleStore) -> SampleBook:
    return SampleBook(RunSetup.make(load.read_config(task), tmp_path), samples)


def test_observations_count_towards_the_length_of_the_overlong_penalty(
    task: Path, tmp_path: Path, samples: SampleStore
) -> None:
    """Of at most 24 tokens the last 20 cost up to 1: ten of these for the second episode."""
    settings = ["algorithm.adv_estimator=dr_grpo", "algorithm.overlong_buffer_tokens=20"]
    book = SampleBook(RunSetup.make(load.read_config(task, settings), tmp_path), samples)
    for sibling, num_observed in enumerate((0, 12)):
        logprobs = [-1.0, *[math.nan] * num_observed, -2.0]
        chunks = (Chunk(0, "digest", len(logprobs)),)
        request = RequestId(*GROUP, sibling)
        completion = completion_of(request, [5] * len(logprobs), logprobs, chunks)
        assert [*book.events_from(0, RequestsCompleted([completion], NO_USAGE))]
    book.record_scores(GroupScored(GROUP, (1.0, 1.0)))
    samples.commit()
    assert query(tmp_path, "select finish_reason from samples") == [("stop",), ("stop",)]
    advantages = query(tmp_path, "select advantage from samples order by sibling")
    assert advantages == [(pytest.approx(0.25),), (pytest.approx(-0.25),)]


def finish(book: SampleBook, sibling: int, group: GroupId = GROUP) -> None:
    request = RequestId(*group, sibling)
    chunks = (Chunk(0, "digest", 2),)
    completion = completion_of(request, [5, 6], [-1.0, -2.0], chunks)
    (event,) = book.events_from(0, RequestsCompleted([completion], NO_USAGE))
    assert isinstance(event, RequestFinished)
    assert event == RequestFinished(0, request, 0, 2, chunks, "stop", event.payload)


def test_a_late_sample_of_a_failed_group_is_stored_and_not_kept(
    book: SampleBook, samples: SampleStore, tmp_path: Path
) -> None:
    finish(book, 0)
    assert book.num_tokens == {GROUP: {0: 2}}
    book.discard_group(GROUP, "failed: refused")
    finish(book, 1)
    assert book.num_tokens == {}
    assert book.pop_held_out_answers(GROUP) == []  # only answers to held-out prompts are kept
    samples.commit()
    assert query(tmp_path, "select state from samples") == [("failed: refused",)] * 2


def test_a_held_out_prompt_with_a_failed_request_keeps_no_answers(
    task: Path, tmp_path: Path, samples: SampleStore
) -> None:
    held_out = [f"eval.path={task.parent / 'prompts.jsonl'}", "eval.every=2", "eval.num_prompts=3"]
    setup = RunSetup.make(load.read_config(task, held_out), tmp_path)
    book, group = SampleBook(setup, samples), GroupId(-3, 1)
    finish(book, 0, group)
    failed = RequestId(*group, 1)
    assert [*book.events_from(0, RequestsRejected({failed: "too long"}))] == [
        RequestFailed(0, failed, "too long")
    ]
    restored = SampleBook(setup, samples)
    restored.restore_group(group, False, samples.finished(group), 2)
    ((token_ids, finish_reason),) = restored.pop_held_out_answers(group)
    assert ([*token_ids], finish_reason) == ([5, 6], "stop")
    resumed = SampleBook(setup, samples)
    resumed.mark_discarded(group, "failed: too long")
    for sibling, each in ((2, book), (3, resumed)):
        finish(each, sibling, group)
        assert each.pop_held_out_answers(group) == []
    assert {state for _, state, _ in samples.states()} == {"failed: too long"}


def test_the_rewards_by_task_of_a_held_out_prompt_are_stored_and_kept_for_its_evaluation(
    book: SampleBook, samples: SampleStore, tmp_path: Path
) -> None:
    group, by_task = GroupId(-1, 3), {"looks": (1.0, 0.5), "length": (3.0, 4.0)}
    for sibling in range(2):
        finish(book, sibling, group)
    book.record_scores(GroupScored(group, (4.0, 4.5)), by_task)
    assert (book.task_rewards, book.rewards) == ({group: by_task}, {})
    assert samples.task_rewards(group, 2) == by_task
    samples.commit()
    assert query(tmp_path, "select state, advantage from samples") == [("evaluated", None)] * 2


def test_only_the_newest_discarded_groups_are_remembered(book: SampleBook) -> None:
    for row in range(MAX_DISCARDED_GROUPS):
        book.discard_group(GroupId(1, row), "filtered: zero_variance")
    finish(book, 0)
    assert book.num_tokens == {GROUP: {0: 2}}
    book.discard_group(GROUP, "failed: refused")
    for row in range(MAX_DISCARDED_GROUPS - 1):
        book.discard_group(GroupId(2, row), "filtered: zero_variance")
    finish(book, 1)
    assert book.num_tokens == {}
    book.discard_group(GroupId(3, 0), "filtered: zero_variance")
    finish(book, 2)
    assert book.num_tokens == {GROUP: {2: 2}}


def finish_group(book: SampleBook, *rewards: float) -> None:
    """Finish a group of two episodes, of which the first ones have these rewards."""
    book.episode_rewards = {RequestId(*GROUP, sibling): reward for sibling, reward in enumerate(rewards)}
    for sibling in range(2):
        finish(book, sibling)


def test_a_group_with_too_large_rewards_cannot_be_scored(book: SampleBook) -> None:
    finish_group(book, 1e200, 0.0)
    failed = ScoringFailed(GROUP, "reward 1e+200 must be between -1e+06 and 1e+06")
    assert book.score_from_episodes(GROUP) == failed
    assert book.record_scores(GroupScored(GROUP, (0.0, -1e200))) == ScoringFailed(
        GROUP, "reward -1e+200 must be between -1e+06 and 1e+06"
    )
    assert GROUP not in book.rewards


def test_a_resumed_run_survives_too_large_rewards(
    book: SampleBook, samples: SampleStore, task: Path, tmp_path: Path
) -> None:
    finish_group(book, 1e200, 0.0)
    resumed = SampleBook(RunSetup.make(load.read_config(task), tmp_path), samples)
    resumed.restore_group(GROUP, False, samples.finished(GROUP), 2)
    assert isinstance(resumed.score_from_episodes(GROUP), ScoringFailed)


def test_a_group_with_rewards_of_some_episodes_only_cannot_be_scored(book: SampleBook) -> None:
    finish_group(book, 0.5)
    reason = "1 of 2 episodes returned a reward; all or none of a group must"
    assert book.score_from_episodes(GROUP) == ScoringFailed(GROUP, reason)
    assert book.score_from_episodes(GroupId(0, 4)) is None


@pytest.mark.parametrize("replays", [True, False])
def test_routes_are_stored_only_if_the_trainer_replays_them(
    task: Path, tmp_path: Path, samples: SampleStore, replays: bool
) -> None:
    """A backend may report them in every run."""
    setup = RunSetup.make(load.read_config(task), tmp_path)
    trainer = setup.config.trainer.model_copy(update={"routing_replay": replays})
    setup = replace(setup, config=setup.config.model_copy(update={"trainer": trainer}))
    request, routes = RequestId(*GROUP, 0), np.ones((3, 2), np.int16)
    chunks = (Chunk(0, "digest", 2),)
    completion = completion_of(request, [5, 6], [-1.0] * 2, chunks)
    completion = replace(completion, routes=routes)
    assert [*SampleBook(setup, samples).events_from(0, RequestsCompleted([completion], NO_USAGE))]
    samples.commit()
    assert query(tmp_path, "select routes from samples") == [(routes.tobytes() if replays else None,)]
