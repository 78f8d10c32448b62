"""Batches, training steps, and stall reports while the trainer waits."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine

from dora.core.actions import Admit, Commit, Filter, Publish, ReportStall, Stop, Train
from dora.core.events import GroupScored, Published, TimerFired, Trained
from dora.core.types import GroupId, RequestId


def groups(*rows: int) -> list[GroupId]:
    return [GroupId(0, row) for row in rows]


def members(run: FakeWorkers, step: int) -> list[GroupId]:
    return [action.group for action in run.actions(Commit) if action.step == step]


@pytest.fixture
def run() -> FakeWorkers:
    """Four groups of version 0 are due by step 1; groups of version 1 follow."""
    run = one_engine(limits(num_steps=6, max_staleness=1, prioritize_stragglers=False), rows=8, slots=2)
    run.deliver_all(unless=is_work)
    assert [action.deadline for action in run.actions(Admit)] == [1, 1, 1, 1]
    return run


def train_step_0(run: FakeWorkers) -> None:
    """Step 0 trains groups 1 and 2; 0 and 3 are left; 4 and 5 are admitted at version 1."""
    run.finish_group(GroupId(0, 1))
    run.finish_group(GroupId(0, 2))
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert [action.group for action in run.actions(Admit)[4:]] == groups(4, 5)


def test_a_straggler_is_passed_while_a_place_is_reserved_for_it(run: FakeWorkers) -> None:
    run.finish_group(GroupId(0, 1))
    run.finish_group(GroupId(0, 2))
    assert run.actions(Train) == [Train(0, tuple(groups(1, 2)))]


def test_a_straggler_is_not_passed_if_it_would_lose_its_place(run: FakeWorkers) -> None:
    train_step_0(run)
    run.finish_group(GroupId(0, 4))
    run.finish_group(GroupId(0, 5))
    assert members(run, 1) == []
    run.finish_group(GroupId(0, 0))
    assert members(run, 1) == groups(0)
    run.finish_group(GroupId(0, 3))
    assert run.actions(Train)[1] == Train(1, tuple(groups(0, 3)))


def test_groups_are_committed_in_the_order_of_their_deadlines(run: FakeWorkers) -> None:
    train_step_0(run)
    for row in (5, 4, 3, 0):
        run.finish_group(GroupId(0, row))
    assert members(run, 1) == groups(3, 0)
    assert members(run, 2) == groups(4, 5)


def test_a_full_batch_advances_the_next_step_at_once(run: FakeWorkers) -> None:
    run.finish_group(GroupId(0, 0))
    assert (run.state.next_step, len(run.state.committed)) == (0, 1)
    run.finish_group(GroupId(0, 1))
    assert (run.state.next_step, run.state.committed) == (1, [])


def test_a_step_starts_only_after_the_version_before_it_is_published(run: FakeWorkers) -> None:
    for row in range(4):
        run.finish_group(GroupId(0, row))
    assert run.actions(Train) == [Train(0, tuple(groups(0, 1)))]
    run.deliver(Trained(0))
    assert len(run.actions(Train)) == 1
    run.deliver(Published(1, "v1"))
    assert run.actions(Train)[1:] == [Train(1, tuple(groups(2, 3)))]


def test_a_group_with_equal_rewards_is_filtered_only_with_filter_groups() -> None:
    for filter_groups in (True, False):
        run = one_engine(limits(group_size=2, filter_groups=filter_groups), rows=4, slots=1)
        run.deliver_all(unless=lambda event: isinstance(event, GroupScored))
        run.pending.clear()
        run.deliver(GroupScored(GroupId(0, 0), (1.0, 1.0)))
        assert run.actions(Filter) == ([Filter(GroupId(0, 0), "zero_variance")] if filter_groups else [])
        assert members(run, 0) == ([] if filter_groups else groups(0))


def test_a_run_stops_once_after_the_last_version_is_published() -> None:
    run = one_engine(limits(num_steps=2), rows=4, slots=1)
    run.deliver_all()
    assert [action.version for action in run.actions(Publish)] == [0, 1, 2]
    assert len(run.actions(Stop)) == 1
    assert run.orchestrator.done
    assert run.orchestrator.next_wakeup() is None


def test_a_stall_is_reported_once_and_names_the_group_and_its_requests() -> None:
    run = one_engine(limits(group_size=2, max_staleness=0, stall_report_s=5.0), rows=8, slots=1)
    run.now = 2.0
    run.deliver_all(unless=is_work)
    run.deliver(run.pending[0])
    assert run.orchestrator.next_wakeup() == 7.0
    run.now = 6.9
    assert run.deliver(TimerFired()) == []
    run.now = 7.0
    assert run.deliver(TimerFired()) == [ReportStall(0, GroupId(0, 0), (RequestId(0, 0, 1),), 2.0)]
    assert run.orchestrator.next_wakeup() is None
    run.now = 50.0
    assert run.deliver(TimerFired()) == []


def test_stall_time_is_counted_for_each_straggler() -> None:
    run = one_engine(limits(max_staleness=0, stall_report_s=5.0), rows=8, slots=1)
    run.deliver_all(unless=is_work)
    run.now = 8.0
    run.deliver(TimerFired())
    run.finish_group(GroupId(0, 0))
    assert run.state.stall_s == 8.0
    assert run.orchestrator.next_wakeup() == 13.0
    run.now = 14.0
    run.deliver(TimerFired())
    assert [action.group for action in run.actions(ReportStall)] == groups(0, 1)
    run.finish_group(GroupId(0, 1))
    assert run.state.stall_s == 14.0


def test_a_wakeup_at_the_returned_time_is_late_enough() -> None:
    """0.7 + 0.1 - 0.7 is less than 0.1: the comparison must use the sum that was returned."""
    run = one_engine(limits(max_staleness=0, stall_report_s=0.1), rows=8, slots=1)
    run.now = 0.7
    run.deliver_all(unless=is_work)
    wakeup = run.orchestrator.next_wakeup()
    assert wakeup is not None
    run.now = wakeup
    run.deliver(TimerFired())
    assert run.orchestrator.next_wakeup() is None
