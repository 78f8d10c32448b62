"""Stalls: what the trainer waits for is reported and decoded alone."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, limits, one_engine
from tests.core.midrun import add_engine, add_running, request, state_at

from dora.core.actions import Action, DecodeOnly, ReportStall, Train
from dora.core.events import GroupScored, Migrated, ProgressReported, RequestFinished, TimerFired, Trained
from dora.core.state import State
from dora.core.types import GroupId


def state_before_stall(**changes: object) -> State:
    """Step 2 needs groups 1 and 2, which are at their deadline; groups 3 to 5 of version 2 are not."""
    bounds = limits(num_steps=20, batch_size=2, max_staleness=2, **changes)
    state = state_at(bounds, newest=2)
    add_engine(state, 0, rows=4, slots=2, loaded={0, 2})
    add_engine(state, 1, rows=4, slots=2, loaded={0, 2})
    add_running(state, 0, 0, 1)
    add_running(state, 1, 0, 2)
    add_running(state, 0, 2, 3, 4)
    add_running(state, 1, 2, 5)
    state.num_fetching = 2  # no prompts arrive
    return state


def decode_only_actions(actions: list[Action]) -> list[DecodeOnly]:
    return [action for action in actions if isinstance(action, DecodeOnly)]


def test_engines_decode_only_stragglers_until_they_finish() -> None:
    run = FakeWorkers(state_before_stall().limits, state=state_before_stall())
    assert decode_only_actions(run.deliver(TimerFired())) == [
        DecodeOnly(0, (request(1),)),
        DecodeOnly(1, (request(2),)),
    ]
    assert decode_only_actions(run.deliver(TimerFired())) == [], "it was ordered before"
    run.finish_group(GroupId(0, 1))
    assert run.actions(DecodeOnly)[2:] == [DecodeOnly(0, ())], "engine 0 has no straggler any more"
    run.finish_group(GroupId(0, 2))
    assert run.actions(DecodeOnly)[3:] == [DecodeOnly(1, ())]
    assert run.actions(Train) == [Train(2, (GroupId(0, 1), GroupId(0, 2)))]


def test_decode_only_follows_a_migrating_request() -> None:
    run = FakeWorkers(state_before_stall().limits, state=state_before_stall())
    run.deliver(ProgressReported(1, ((request(2), 50),), 10.0, kv_usage=0.95))
    migrated = next(event for event in run.pending if isinstance(event, Migrated))
    assert migrated.request == request(2)
    assert decode_only_actions(run.emitted) == [DecodeOnly(0, (request(1),)), DecodeOnly(1, (request(2),))]
    assert decode_only_actions(run.deliver(migrated)) == [
        DecodeOnly(0, (request(1), request(2))),
        DecodeOnly(1, ()),
    ]


def test_an_engine_with_stragglers_only_gets_no_decode_only() -> None:
    state = state_at(limits(num_steps=20, batch_size=2, max_staleness=0), newest=2)
    add_engine(state, 0, rows=2, loaded={2})
    add_running(state, 0, 2, 1, 2)
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    assert run.state.stall_group == GroupId(0, 1)
    assert run.actions(DecodeOnly) == []


def test_stragglers_are_not_prioritized_while_the_trainer_is_busy() -> None:
    """While a step trains, the trainer waits for nothing."""
    bounds = limits(num_steps=20, batch_size=2, max_staleness=2)
    run = one_engine(bounds, rows=9, slots=3)
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished | Trained | GroupScored))
    run.finish_group(GroupId(0, 0))
    run.finish_group(GroupId(0, 1))
    assert run.state.training_step == 0
    run.now = 100.0
    run.deliver(TimerFired())
    assert run.actions(DecodeOnly) == []
    assert run.state.stall_s == 0.0


def test_without_prioritize_stragglers_the_stall_is_still_counted() -> None:
    state = state_before_stall(prioritize_stragglers=False)
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    run.now = 3.0
    run.finish_group(GroupId(0, 1))
    assert run.actions(DecodeOnly) == []
    assert run.state.stall_s == 3.0


def test_a_stall_report_names_the_group_and_its_unfinished_requests() -> None:
    bounds = limits(num_steps=20, batch_size=1, max_staleness=1, group_size=3, stall_report_s=2.0)
    state = state_at(bounds, newest=1)
    add_engine(state, 0, rows=4, loaded={0, 1}, slots=2)
    add_running(state, 0, 0, 1, siblings=[0, 2])
    run = FakeWorkers(bounds, state=state)
    run.now = 1.0
    run.deliver(TimerFired())
    run.now = 2.9
    run.deliver(TimerFired())
    assert run.actions(ReportStall) == []
    assert run.orchestrator.next_wakeup() == 3.0
    run.now = 3.0
    actions = run.deliver(TimerFired())
    assert actions == [ReportStall(1, GroupId(0, 1), (request(1, 0), request(1, 2)), 1.0)]


@pytest.mark.parametrize("is_late", [True, False])
def test_waiting_for_a_reward_is_a_stall_too(is_late: bool) -> None:
    """All requests have finished; the trainer waits for the group, and no engine is affected."""
    bounds = limits(num_steps=20, batch_size=1, max_staleness=0, stall_report_s=2.0)
    state = state_at(bounds, newest=0)
    add_engine(state, 0, rows=4, loaded={0})
    add_running(state, 0, 0, 1)
    run = FakeWorkers(bounds, state=state)
    run.deliver(run.deliverable()[0])
    assert run.state.stall_group == GroupId(0, 1)
    run.now = 2.5 if is_late else 1.5
    run.deliver(TimerFired())
    run.deliver(GroupScored(GroupId(0, 1), (1.0,)))
    assert run.actions(ReportStall) == ([ReportStall(0, GroupId(0, 1), (), 0.0)] if is_late else [])
    assert run.state.stall_s == run.now
    assert run.actions(DecodeOnly) == []
