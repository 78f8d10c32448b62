"""External rewards: a leased group counts once, whichever client fails."""

from __future__ import annotations

import pytest
from tests.runtime.scoring.conftest import RewardBench
from tests.runtime.tiny import CHARACTERS

from dora.core.events import GroupScored, ScoringFailed
from dora.errors import ServiceError
from dora.runtime.process.messages import RewardSpec
from dora.runtime.scoring.external import ExternalRewards, LeasedGroup
from dora.runtime.scoring.reward_manager import RewardTask

SEVEN = CHARACTERS.index("7")


def external_task(
    bench: RewardBench, timeout_s: float = 60.0, weight: float = 1.0, name: str = "people"
) -> RewardTask:
    spec = RewardSpec(name, "service", f"reward_task.{name}.class", bench.model)
    return RewardTask(spec, timeout_s, f"reward_task.{name}.timeout_s", weight)


@pytest.fixture
def people(bench: RewardBench) -> ExternalRewards:
    """The only task of the bench."""
    bench.open(external_task(bench))
    return bench.manager.external["people"]


def lease(external: ExternalRewards) -> LeasedGroup:
    leased = external.lease()
    assert leased is not None
    return leased


def test_a_leased_group_has_its_prompt_and_its_rewards_are_accepted(
    bench: RewardBench, people: ExternalRewards
) -> None:
    assert people.lease() is None
    group = bench.submit(4, topic="sevens")
    leased = lease(people)
    assert (leased.group, leased.prompt, leased.columns) == ("0/4", "7:", {"topic": "sevens"})
    assert leased.token_ids == [[SEVEN], [SEVEN, SEVEN]]
    assert leased.finish_reasons == ["stop", "length"]
    assert people.lease() is None
    people.submit(leased.lease, [0.5, 2.0])
    assert bench.wait_for(1) == [GroupScored(group, (0.5, 2.0))]


def test_external_rewards_are_added_to_those_of_other_tasks(bench: RewardBench) -> None:
    bench.open(external_task(bench, weight=10.0), bench.task())
    group = bench.submit(0)
    people = bench.manager.external["people"]
    people.submit(lease(people).lease, [1.0, 2.0])
    assert bench.wait_for(1) == [GroupScored(group, (11.0, 22.0))]


def test_accepted_rewards_survive_a_new_storage_of_the_stream(bench: RewardBench) -> None:
    """Workers score their groups again, clients do not."""
    bench.open(external_task(bench), external_task(bench, name="others"))
    group = bench.submit(0)
    people, others = bench.manager.external["people"], bench.manager.external["others"]
    people.submit(lease(people).lease, [1.0, 2.0])
    bench.poll()
    leased = lease(others)
    bench.manager.on_storage_replaced()
    assert people.lease() is None
    others.submit(leased.lease, [10.0, 20.0])
    assert bench.wait_for(1) == [GroupScored(group, (11.0, 22.0))]


def test_a_task_that_scored_in_time_does_not_time_out_while_others_score(bench: RewardBench) -> None:
    bench.open(external_task(bench), external_task(bench, timeout_s=1000.0, name="others"))
    group = bench.submit(0)
    fast, slow = bench.manager.external["people"], bench.manager.external["others"]
    fast.submit(lease(fast).lease, [1.0, 2.0])
    assert fast.lease() is None
    bench.pass_time(100.0)
    assert fast.check_deadlines() == []
    slow.submit(lease(slow).lease, [10.0, 20.0])
    assert bench.wait_for(1) == [GroupScored(group, (11.0, 22.0))]


def test_a_repeated_submission_is_accepted_and_a_different_one_is_refused(
    bench: RewardBench, people: ExternalRewards
) -> None:
    bench.submit(0)
    leased = lease(people)
    for _ in range(2):
        people.submit(leased.lease, [1.0, 2.0])
    with pytest.raises(ServiceError, match=f"lease {leased.lease} has expired"):
        people.submit(leased.lease, [1.0, 3.0])
    assert [event.group for event in bench.wait_for(1)] == [(0, 0)]


def test_a_wrong_number_of_rewards_is_refused_and_the_lease_continues(
    bench: RewardBench, people: ExternalRewards
) -> None:
    bench.submit(0)
    leased = lease(people)
    with pytest.raises(ServiceError, match="1 rewards for 2 responses"):
        people.submit(leased.lease, [1.0])
    with pytest.raises(ServiceError, match="lease 77 has expired or never existed"):
        people.submit(77, [1.0, 2.0])
    people.submit(leased.lease, [1.0, 2.0])
    assert len(bench.wait_for(1)) == 1


def test_a_group_is_leased_again_when_its_lease_expires(bench: RewardBench) -> None:
    bench.open(external_task(bench))
    people = bench.manager.external["people"]
    group = bench.submit(0)
    first = lease(people)
    bench.pass_time(29.0)
    assert people.lease() is None
    bench.pass_time(2.0)
    with pytest.raises(ServiceError, match=f"lease {first.lease} has expired"):
        people.submit(first.lease, [9.0, 9.0])
    again = lease(people)
    assert again.group == first.group
    assert again.lease != first.lease
    with pytest.raises(ServiceError, match=f"lease {first.lease} has expired"):
        people.submit(first.lease, [9.0, 9.0])
    people.submit(again.lease, [1.0, 2.0])
    assert bench.wait_for(1) == [GroupScored(group, (1.0, 2.0))]


def test_the_oldest_version_is_leased_first(bench: RewardBench, people: ExternalRewards) -> None:
    for version in (3, 1, 2, 1):
        bench.submit(10 * version + len(bench.responses), version)
    assert [lease(people).group for _ in range(4)] == ["0/11", "0/13", "0/22", "0/30"]


def test_a_group_without_rewards_fails_after_its_timeout(bench: RewardBench) -> None:
    bench.open(external_task(bench))
    people = bench.manager.external["people"]
    group = bench.submit(0)
    bench.pass_time(59.0)
    assert people.check_deadlines() == []
    bench.pass_time(2.0)
    reason = "people: no client submitted rewards within reward_task.people.timeout_s = 60"
    assert bench.wait_for(1) == [ScoringFailed(group, reason)]
    assert people.lease() is None


def test_rewards_for_a_group_that_has_failed_are_refused(bench: RewardBench, people: ExternalRewards) -> None:
    bench.submit(0)
    bench.pass_time(40.0)
    leased = lease(people)
    bench.pass_time(21.0)
    bench.poll()
    with pytest.raises(ServiceError, match="or its group has ended"):
        people.submit(leased.lease, [1.0, 2.0])
