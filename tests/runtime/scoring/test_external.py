"""Rewards from outside: a group is lent, comes back, and counts once, whoever disappears."""

from __future__ import annotations

import time

import pytest
from tests.runtime.test_rewarding import Bench, bench

from dora.core.events import GroupScored, ScoringFailed
from dora.errors import ServiceError
from dora.runtime.scoring.external import ExternalRewards, LeasedGroup
from dora.runtime.scoring.reward_manager import RewardTask
from dora.runtime.scoring.reward_worker import RewardSpec

__all__ = ["bench"]  # the fixture


def outside(bench: Bench, timeout_s: float = 60.0, weight: float = 1.0, name: str = "people") -> RewardTask:
    """A task that is judged from outside."""
    spec = RewardSpec(name, "service", f"reward_task.{name}.class", bench.model)
    return RewardTask(spec, timeout_s, f"reward_task.{name}.timeout_s", weight)


@pytest.fixture
def judge(bench: Bench) -> ExternalRewards:
    """Of a bench with this task alone."""
    bench.open(outside(bench))
    return bench.rewarding.outside["people"]


def lend(judge: ExternalRewards) -> LeasedGroup:
    loan = judge.lease()
    assert loan is not None
    return loan


def test_a_group_is_lent_with_its_question_and_judged(bench: Bench, judge: ExternalRewards) -> None:
    assert judge.lease() is None
    assert not judge.has_group()
    group = bench.ask(4, mood="good")
    assert judge.has_group()
    loan = lend(judge)
    assert (loan.group, loan.prompt, loan.columns, loan.texts) == ("0/4", "7:", {"mood": "good"}, ["7", "77"])
    assert not judge.has_group()
    judge.submit(loan.lease, [0.5, 2.0])
    assert bench.hear(1) == [GroupScored(group, (0.5, 2.0))]


def test_rewards_from_outside_are_added_to_those_of_other_tasks(bench: Bench) -> None:
    bench.open(outside(bench, weight=10.0), bench.task())
    group = bench.ask(0)
    judge = bench.rewarding.outside["people"]
    judge.submit(lend(judge).lease, [1.0, 2.0])
    assert bench.hear(1) == [GroupScored(group, (11.0, 22.0))]


def test_who_has_judged_in_time_does_not_fail_a_group_that_others_are_still_at(bench: Bench) -> None:
    bench.open(outside(bench, timeout_s=0.3), outside(bench, name="others"))
    group = bench.ask(0)
    fast, slow = bench.rewarding.outside["people"], bench.rewarding.outside["others"]
    fast.submit(lend(fast).lease, [1.0, 2.0])
    assert (fast.has_group(), slow.has_group()) == (False, True)  # else clients of the first would ask on
    end_s = time.monotonic() + 0.4
    while time.monotonic() < end_s:
        assert fast.check_deadlines(0.0) == []
    slow.submit(lend(slow).lease, [10.0, 20.0])
    assert bench.hear(1) == [GroupScored(group, (11.0, 22.0))]


def test_rewards_may_be_given_again_but_not_others(bench: Bench, judge: ExternalRewards) -> None:
    bench.ask(0)
    loan = lend(judge)
    for _ in range(2):
        judge.submit(loan.lease, [1.0, 2.0])
    with pytest.raises(ServiceError, match=f"lease {loan.lease} is over"):
        judge.submit(loan.lease, [1.0, 3.0])
    assert [fact.group for fact in bench.hear(1)] == [(0, 0)]


def test_too_few_rewards_are_refused_and_the_loan_goes_on(bench: Bench, judge: ExternalRewards) -> None:
    bench.ask(0)
    loan = lend(judge)
    with pytest.raises(ServiceError, match="1 rewards for 2 answers"):
        judge.submit(loan.lease, [1.0])
    with pytest.raises(ServiceError, match="lease 77 is over, or was never given"):
        judge.submit(77, [1.0, 2.0])
    judge.submit(loan.lease, [1.0, 2.0])
    assert len(bench.hear(1)) == 1


def test_a_loan_that_is_not_answered_is_given_to_somebody_else(bench: Bench) -> None:
    bench.open(outside(bench, timeout_s=2.0))
    judge = bench.rewarding.outside["people"]
    group = bench.ask(0)
    first, second = lend(judge), None
    while second is None:
        second = judge.lease()
    assert (second.group, second.lease) != (first.group, first.lease)
    with pytest.raises(ServiceError, match=f"lease {first.lease} is over"):
        judge.submit(first.lease, [9.0, 9.0])
    judge.submit(second.lease, [1.0, 2.0])
    assert bench.hear(1) == [GroupScored(group, (1.0, 2.0))]


def test_a_group_that_nobody_judges_fails_by_name_and_later_rewards_are_refused(bench: Bench) -> None:
    bench.open(outside(bench, timeout_s=0.6))
    judge = bench.rewarding.outside["people"]
    group = bench.ask(0)
    reason = "people: no rewards came from outside within reward_task.people.timeout_s = 0.6"
    assert bench.hear(1) == [ScoringFailed(group, reason)]
    bench.feed.drop([group])  # as the driver does with a group that has failed
    assert judge.lease() is None
    assert not judge.has_group()


def test_rewards_for_a_group_that_has_failed_meanwhile_are_refused(
    bench: Bench, judge: ExternalRewards
) -> None:
    group = bench.ask(0)
    loan = lend(judge)
    bench.feed.drop([group])
    with pytest.raises(ServiceError, match="given to somebody else, or has ended"):
        judge.submit(loan.lease, [1.0, 2.0])
