"""Which groups form a batch, when a step starts, and what is said while the trainer waits."""

from __future__ import annotations

import pytest
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Admit, Commit, Filter, Publish, ReportStall, Stop, Train
from dora.core.events import GroupScored, Published, Trained, Woken
from dora.core.records import GroupId, RequestId


def groups(*rows: int) -> list[GroupId]:
    return [GroupId(0, row) for row in rows]


def members(run: Stations, step: int) -> list[GroupId]:
    return [order.group for order in run.orders(Commit) if order.step == step]


@pytest.fixture
def run() -> Stations:
    """Four groups of version 0 may be trained in step 0 or 1; then come those of version 1."""
    stations = Stations(limits(num_steps=6, max_staleness=1, rush=False))
    stations.join(0, rows=8, slots=2)
    stations.settle(but=is_work)
    assert [order.deadline for order in stations.orders(Admit)] == [1, 1, 1, 1]
    return stations


def train_step_0(run: Stations) -> None:
    """Step 0 trains groups 1 and 2; 0 and 3 are left, and 4 and 5 come at version 1."""
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert [order.group for order in run.orders(Admit)[4:]] == groups(4, 5)


def test_a_straggler_is_passed_while_a_place_is_kept_for_it(run: Stations) -> None:
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    assert run.orders(Train) == [Train(0, tuple(groups(1, 2)))]


def test_a_straggler_is_not_passed_where_its_place_would_be_lost(run: Stations) -> None:
    train_step_0(run)
    run.finish(GroupId(0, 4))
    run.finish(GroupId(0, 5))
    assert members(run, 1) == []
    run.finish(GroupId(0, 0))
    assert members(run, 1) == groups(0)
    run.finish(GroupId(0, 3))
    assert run.orders(Train)[1] == Train(1, tuple(groups(0, 3)))


def test_groups_are_committed_in_the_order_of_their_deadlines(run: Stations) -> None:
    train_step_0(run)
    for row in (5, 4, 3, 0):
        run.finish(GroupId(0, row))
    assert members(run, 1) == groups(3, 0)
    assert members(run, 2) == groups(4, 5)


def test_a_full_batch_moves_to_the_next_step_at_once(run: Stations) -> None:
    run.finish(GroupId(0, 0))
    assert (run.state.next_step, len(run.state.committed)) == (0, 1)
    run.finish(GroupId(0, 1))
    assert (run.state.next_step, run.state.committed) == (1, [])


def test_a_step_starts_only_after_the_version_before_it_is_published(run: Stations) -> None:
    for row in range(4):
        run.finish(GroupId(0, row))
    assert run.orders(Train) == [Train(0, tuple(groups(0, 1)))]
    run.tell(Trained(0))
    assert len(run.orders(Train)) == 1
    run.tell(Published(1, "v1"))
    assert run.orders(Train)[1:] == [Train(1, tuple(groups(2, 3)))]


def test_a_group_whose_rewards_are_equal_is_filtered_only_if_wished() -> None:
    for filter_groups in (True, False):
        run = Stations(limits(group_size=2, filter_groups=filter_groups))
        run.join(0, rows=4, slots=1)
        run.settle(but=lambda fact: isinstance(fact, GroupScored))
        run.pending.clear()
        run.tell(GroupScored(GroupId(0, 0), (1.0, 1.0)))
        assert run.orders(Filter) == ([Filter(GroupId(0, 0), "zero_variance")] if filter_groups else [])
        assert members(run, 0) == ([] if filter_groups else groups(0))


def test_a_run_stops_once_after_the_last_version_is_published() -> None:
    run = Stations(limits(num_steps=2))
    run.join(0, rows=4, slots=1)
    run.settle()
    assert [order.version for order in run.orders(Publish)] == [0, 1, 2]
    assert len(run.orders(Stop)) == 1
    assert run.core.done
    assert run.core.next_wakeup() is None


def test_a_stall_is_reported_once_and_names_the_group_and_its_requests() -> None:
    run = Stations(limits(group_size=2, max_staleness=0, stall_report_s=5.0))
    run.join(0, rows=8, slots=1)
    run.now = 2.0
    run.settle(but=is_work)
    run.tell(run.pending[0])
    assert run.core.next_wakeup() == 7.0
    run.now = 6.9
    assert run.tell(Woken()) == []
    run.now = 7.0
    assert run.tell(Woken()) == [ReportStall(0, GroupId(0, 0), (RequestId(0, 0, 1),), 2.0)]
    assert run.core.next_wakeup() is None
    run.now = 50.0
    assert run.tell(Woken()) == []


def test_the_time_of_a_stall_is_counted_for_each_straggler() -> None:
    run = Stations(limits(max_staleness=0, stall_report_s=5.0))
    run.join(0, rows=8, slots=1)
    run.settle(but=is_work)
    run.now = 8.0
    run.tell(Woken())
    run.finish(GroupId(0, 0))
    assert run.state.stall_s == 8.0
    assert run.core.next_wakeup() == 13.0
    run.now = 14.0
    run.tell(Woken())
    assert [order.group for order in run.orders(ReportStall)] == groups(0, 1)
    run.finish(GroupId(0, 1))
    assert run.state.stall_s == 14.0


def test_a_wakeup_at_the_named_moment_is_always_late_enough() -> None:
    """0.7 + 0.1 - 0.7 is less than 0.1: the moment must be compared as it was named."""
    run = Stations(limits(max_staleness=0, stall_report_s=0.1))
    run.join(0, rows=8, slots=1)
    run.now = 0.7
    run.settle(but=is_work)
    wakeup = run.core.next_wakeup()
    assert wakeup is not None
    run.now = wakeup
    run.tell(Woken())
    assert run.core.next_wakeup() is None
