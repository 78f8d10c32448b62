"""What workers say becomes facts; what is of no use any more is not kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.config import load
from dora.core.events import GroupScored, RequestFailed, RequestFinished, ScoringFailed
from dora.core.types import Chunk, GroupId, RequestId
from dora.engine.request import Completion
from dora.metrics.rollout import NO_USAGE
from dora.runtime.process.messages import RequestsCompleted, RequestsRejected
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import MAX_DISCARDED_GROUPS, SampleBook
from dora.stream.sample_db import SampleStore

GROUP = GroupId(0, 3)


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[SampleStore]:
    made = SampleStore(tmp_path / "samples.sqlite")
    yield made
    made.close()


@pytest.fixture
def teller(task: Path, tmp_path: Path, samples: SampleStore) -> SampleBook:
    return SampleBook(RunSetup.make(load.read_config(task), tmp_path), samples)


def finish(teller: SampleBook, sibling: int, group: GroupId = GROUP) -> None:
    request, logprobs = RequestId(*group, sibling), [-1.0, -2.0]
    chunks = (Chunk(0, "digest", 2),)
    done = Completion(request, 0, (3, 4), [5, 6], logprobs, logprobs, logprobs, chunks, "stop")
    facts = teller.events_from(0, RequestsCompleted([done], NO_USAGE))
    assert [*facts] == [RequestFinished(0, request, 0, 2, chunks, "stop")]


def test_an_answer_of_a_group_that_has_failed_is_stored_as_such_and_not_kept(
    teller: SampleBook, samples: SampleStore, tmp_path: Path
) -> None:
    finish(teller, 0)
    assert teller.num_tokens == {GROUP: 2}
    teller.discard_group(GROUP, "failed: refused")
    finish(teller, 1)
    assert teller.num_tokens == {}
    assert teller.pop_held_out_answers(GROUP) == []  # it is in the stream, as all answers of groups are
    samples.commit()
    with sqlite3.connect(tmp_path / "samples.sqlite") as db:
        assert db.execute("select state from samples").fetchall() == [("failed: refused",)] * 2


def test_a_held_out_prompt_with_an_answer_that_failed_keeps_no_others(
    task: Path, tmp_path: Path, samples: SampleStore
) -> None:
    held_out = [f"eval.path={task.parent / 'prompts.jsonl'}", "eval.every=2", "eval.num_prompts=3"]
    plan = RunSetup.make(load.read_config(task, held_out), tmp_path)
    teller, group = SampleBook(plan, samples), GroupId(-3, 1)
    finish(teller, 0, group)
    failed = RequestId(*group, 1)
    assert [*teller.events_from(0, RequestsRejected({failed: "too long"}))] == [
        RequestFailed(0, failed, "too long")
    ]
    later = SampleBook(plan, samples)
    later.mark_discarded(group, "failed: too long")
    for sibling, life in ((2, teller), (3, later)):
        finish(life, sibling, group)
        with pytest.raises(KeyError):
            life.held_out_answers(group)
    assert {state for _, state, _ in samples.states()} == {"failed: too long"}


def test_only_the_newest_ended_groups_are_remembered(teller: SampleBook) -> None:
    for row in range(MAX_DISCARDED_GROUPS):
        teller.discard_group(GroupId(1, row), "filtered: zero_variance")
    finish(teller, 0)
    assert teller.num_tokens == {GROUP: 2}
    teller.discard_group(GROUP, "failed: refused")
    for row in range(MAX_DISCARDED_GROUPS - 1):
        teller.discard_group(GroupId(2, row), "filtered: zero_variance")
    finish(teller, 1)
    assert teller.num_tokens == {}
    teller.discard_group(GroupId(3, 0), "filtered: zero_variance")
    finish(teller, 2)
    assert teller.num_tokens == {GROUP: 2}


def earn(teller: SampleBook, *rewards: float) -> None:
    """A group of two whose first answers come with rewards of their own."""
    teller.episode_rewards = {RequestId(*GROUP, sibling): reward for sibling, reward in enumerate(rewards)}
    for sibling in range(2):
        finish(teller, sibling)


def test_a_group_whose_rewards_are_too_large_cannot_be_scored(teller: SampleBook) -> None:
    earn(teller, 1e200, 0.0)
    told = ScoringFailed(GROUP, "reward 1e+200 must be between -1e+06 and 1e+06")
    assert teller.score_from_episodes(GROUP) == told
    assert teller.record_scores(GroupScored(GROUP, (0.0, -1e200))) == ScoringFailed(
        GROUP, "reward -1e+200 must be between -1e+06 and 1e+06"
    )
    assert GROUP not in teller.rewards


def test_a_run_that_goes_on_does_not_die_of_rewards_that_are_too_large(
    teller: SampleBook, samples: SampleStore, task: Path, tmp_path: Path
) -> None:
    earn(teller, 1e200, 0.0)
    later = SampleBook(RunSetup.make(load.read_config(task), tmp_path), samples)
    later.restore_group(GROUP, False, samples.finished(GROUP), 2)
    assert isinstance(later.score_from_episodes(GROUP), ScoringFailed)


def test_answers_with_and_without_rewards_of_their_own_are_not_compared(teller: SampleBook) -> None:
    earn(teller, 0.5)
    told = "1 of 2 answers came with rewards of their own, the others without"
    assert teller.score_from_episodes(GROUP) == ScoringFailed(GROUP, told)
    assert teller.score_from_episodes(GroupId(0, 4)) is None
