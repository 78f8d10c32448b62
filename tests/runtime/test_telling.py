"""What workers say becomes facts; what is of no use any more is not kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora import settings
from dora.core.events import GroupScored, GroupUnscorable, RequestFailed, RequestFinished
from dora.core.records import Chunk, GroupId, RequestId
from dora.engine.sequence import Completion
from dora.runtime.messages import Completed, Refused
from dora.runtime.occupancy import NEW
from dora.runtime.plan import Plan
from dora.runtime.telling import MAX_ENDED, Teller
from dora.stream.samples import SampleStore

GROUP = GroupId(0, 3)


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[SampleStore]:
    made = SampleStore(tmp_path / "samples.sqlite")
    yield made
    made.close()


@pytest.fixture
def teller(task: Path, tmp_path: Path, samples: SampleStore) -> Teller:
    return Teller(Plan.make(settings.read(task), tmp_path), samples)


def finish(teller: Teller, sibling: int, group: GroupId = GROUP) -> None:
    request, logprobs = RequestId(*group, sibling), [-1.0, -2.0]
    chunks = (Chunk(0, "digest", 2),)
    done = Completion(request, 0, (3, 4), [5, 6], logprobs, logprobs, logprobs, chunks, "stop")
    facts = teller.told(0, Completed([done], NEW))
    assert [*facts] == [RequestFinished(0, request, 0, 2, chunks, "stop")]


def test_an_answer_of_a_group_that_has_failed_is_stored_as_such_and_not_kept(
    teller: Teller, samples: SampleStore, tmp_path: Path
) -> None:
    finish(teller, 0)
    assert teller.num_tokens == {GROUP: 2}
    teller.end(GROUP, "failed: refused")
    finish(teller, 1)
    assert teller.num_tokens == {}
    assert teller.held_out(GROUP) == []  # it is in the stream, as all answers of groups are
    samples.commit()
    with sqlite3.connect(tmp_path / "samples.sqlite") as db:
        assert db.execute("select state from samples").fetchall() == [("failed: refused",)] * 2


def test_a_held_out_prompt_with_an_answer_that_failed_keeps_no_others(
    task: Path, tmp_path: Path, samples: SampleStore
) -> None:
    held_out = [f"eval.path={task.parent / 'prompts.jsonl'}", "eval.every=2", "eval.num_prompts=3"]
    plan = Plan.make(settings.read(task, held_out), tmp_path)
    teller, group = Teller(plan, samples), GroupId(-3, 1)
    finish(teller, 0, group)
    failed = RequestId(*group, 1)
    assert [*teller.told(0, Refused({failed: "too long"}))] == [RequestFailed(0, failed, "too long")]
    later = Teller(plan, samples)
    later.recall_end(group, "failed: too long")
    for sibling, life in ((2, teller), (3, later)):
        finish(life, sibling, group)
        with pytest.raises(KeyError):
            life.peek(group)
    assert {state for _, state, _ in samples.states()} == {"failed: too long"}


def test_only_the_newest_ended_groups_are_remembered(teller: Teller) -> None:
    for row in range(MAX_ENDED):
        teller.end(GroupId(1, row), "filtered: zero_variance")
    finish(teller, 0)
    assert teller.num_tokens == {GROUP: 2}
    teller.end(GROUP, "failed: refused")
    for row in range(MAX_ENDED - 1):
        teller.end(GroupId(2, row), "filtered: zero_variance")
    finish(teller, 1)
    assert teller.num_tokens == {}
    teller.end(GroupId(3, 0), "filtered: zero_variance")
    finish(teller, 2)
    assert teller.num_tokens == {GROUP: 2}


def earn(teller: Teller, *rewards: float) -> None:
    """A group of two whose first answers come with rewards of their own."""
    teller.earned = {RequestId(*GROUP, sibling): reward for sibling, reward in enumerate(rewards)}
    for sibling in range(2):
        finish(teller, sibling)


def test_a_group_whose_rewards_are_too_large_cannot_be_scored(teller: Teller) -> None:
    earn(teller, 1e200, 0.0)
    told = GroupUnscorable(GROUP, "rewards too large: 1e+200, and the most is 1e+06")
    assert teller.scored_by_itself(GROUP) == told
    assert teller.scored(GroupScored(GROUP, (0.0, -1e200))) == GroupUnscorable(
        GROUP, "rewards too large: -1e+200, and the most is 1e+06"
    )
    assert GROUP not in teller.rewards


def test_a_run_that_goes_on_does_not_die_of_rewards_that_are_too_large(
    teller: Teller, samples: SampleStore, task: Path, tmp_path: Path
) -> None:
    earn(teller, 1e200, 0.0)
    later = Teller(Plan.make(settings.read(task), tmp_path), samples)
    later.restore(GROUP, False, samples.finished(GROUP), 2)
    assert isinstance(later.scored_by_itself(GROUP), GroupUnscorable)


def test_answers_with_and_without_rewards_of_their_own_are_not_compared(teller: Teller) -> None:
    earn(teller, 0.5)
    told = "1 of 2 answers came with rewards of their own, the others without"
    assert teller.scored_by_itself(GROUP) == GroupUnscorable(GROUP, told)
    assert teller.scored_by_itself(GroupId(0, 4)) is None
