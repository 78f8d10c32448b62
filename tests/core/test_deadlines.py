"""What the trainer waits for is named and sped up: stalls and rushes."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, limits

from dora.core.actions import Action, ReportStall, Rush, Train
from dora.core.events import GroupScored, Migrated, Progressed, RequestFinished, Trained, Woken
from dora.core.records import GroupId, RequestId
from dora.core.state import State


def request(row: int, sibling: int = 0) -> RequestId:
    return RequestId(0, row, sibling)


def waiting_for_two(**changes: object) -> State:
    """Step 2 needs 1 and 2, which are at their deadline; 3 to 5, of version 2, may come later."""
    bounds = limits(num_steps=20, batch_size=2, max_staleness=2, **changes)
    state = midway(bounds, newest=2)
    engine(state, 0, rows=4, slots=2, held={0, 2})
    engine(state, 1, rows=4, slots=2, held={0, 2})
    running(state, 0, 0, 1)
    running(state, 1, 0, 2)
    running(state, 0, 2, 3, 4)
    running(state, 1, 2, 5)
    state.num_fetching = 2  # a dataset that is slow
    return state


def rushes(orders: list[Action]) -> list[Rush]:
    return [order for order in orders if isinstance(order, Rush)]


def test_engines_decode_only_what_the_trainer_waits_for_until_it_comes() -> None:
    run = Stations(waiting_for_two().limits, state=waiting_for_two())
    assert rushes(run.tell(Woken())) == [Rush(0, (request(1),)), Rush(1, (request(2),))]
    assert rushes(run.tell(Woken())) == [], "it was said"
    run.finish(GroupId(0, 1))
    assert run.orders(Rush)[2:] == [Rush(0, ())], "engine 0 has nothing urgent any more"
    run.finish(GroupId(0, 2))
    assert run.orders(Rush)[3:] == [Rush(1, ())]
    assert run.orders(Train) == [Train(2, (GroupId(0, 1), GroupId(0, 2)))]


def test_a_rush_follows_a_request_that_moves() -> None:
    run = Stations(waiting_for_two().limits, state=waiting_for_two())
    run.tell(Progressed(1, ((request(2), 50),), 10.0, kv_share=0.95))
    move = next(fact for fact in run.pending if isinstance(fact, Migrated))
    assert move.request == request(2)
    assert rushes(run.given) == [Rush(0, (request(1),)), Rush(1, (request(2),))]
    assert rushes(run.tell(move)) == [Rush(0, (request(1), request(2))), Rush(1, ())]


def test_an_engine_with_nothing_but_urgent_requests_is_told_nothing() -> None:
    state = midway(limits(num_steps=20, batch_size=2, max_staleness=0), newest=2)
    engine(state, 0, rows=2, held={2})
    running(state, 0, 2, 1, 2)
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    assert run.state.stall_group == GroupId(0, 1)
    assert run.orders(Rush) == []


def test_nobody_is_rushed_while_the_trainer_is_busy() -> None:
    """Step 2 trains; what step 3 waits for is not yet waited for."""
    bounds = limits(num_steps=20, batch_size=2, max_staleness=2)
    run = Stations(bounds)
    run.join(0, rows=9, slots=3)
    run.settle(but=lambda fact: isinstance(fact, RequestFinished | Trained | GroupScored))
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    assert run.state.training == 0
    run.now = 100.0
    run.tell(Woken())
    assert run.orders(Rush) == []
    assert run.state.stall_s == 0.0


def test_nobody_is_rushed_where_that_is_not_wished_and_the_wait_is_counted_all_the_same() -> None:
    state = waiting_for_two(rush=False)
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    run.now = 3.0
    run.finish(GroupId(0, 1))
    assert run.orders(Rush) == []
    assert run.state.stall_s == 3.0


def test_a_wait_is_named_with_the_group_and_the_requests_that_lack() -> None:
    bounds = limits(num_steps=20, batch_size=1, max_staleness=1, group_size=3, stall_report_s=2.0)
    state = midway(bounds, newest=1)
    engine(state, 0, rows=4, held={0, 1}, slots=2)
    running(state, 0, 0, 1, siblings=[0, 2])
    run = Stations(bounds, state=state)
    run.now = 1.0
    run.tell(Woken())
    run.now = 2.9
    run.tell(Woken())
    assert run.orders(ReportStall) == []
    assert run.core.next_wakeup() == 3.0
    run.now = 3.0
    orders = run.tell(Woken())
    assert orders == [ReportStall(1, GroupId(0, 1), (request(1, 0), request(1, 2)), 1.0)]


@pytest.mark.parametrize("scored_late", [True, False])
def test_a_wait_for_a_reward_is_a_wait_too(scored_late: bool) -> None:
    """All requests have ended; the group is waited for, and no engine is rushed for it."""
    bounds = limits(num_steps=20, batch_size=1, max_staleness=0, stall_report_s=2.0)
    state = midway(bounds, newest=0)
    engine(state, 0, rows=4, held={0})
    running(state, 0, 0, 1)
    run = Stations(bounds, state=state)
    run.tell(run.possible()[0])
    assert run.state.stall_group == GroupId(0, 1)
    run.now = 2.5 if scored_late else 1.5
    run.tell(Woken())
    run.tell(GroupScored(GroupId(0, 1), (1.0,)))
    assert run.orders(ReportStall) == ([ReportStall(0, GroupId(0, 1), (), 0.0)] if scored_late else [])
    assert run.state.stall_s == run.now
    assert run.orders(Rush) == []
