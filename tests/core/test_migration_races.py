"""Races between a migration and the end of its request, in every order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.fake_workers import FakeWorkers, finished, limits
from tests.core.midrun import add_engine, add_running, state_at

from dora.core import codec, invariants
from dora.core.actions import Abort, Commit, Fail, Generate, Migrate, Score
from dora.core.events import (
    EngineLost,
    Event,
    GroupScored,
    Migrated,
    MigrationFailed,
    ProgressReported,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    TimerFired,
)
from dora.core.types import ProtocolError, RequestId

STAYING, MIGRATING = RequestId(0, 1, 0), RequestId(0, 1, 1)  # siblings, on engine 0
DONE_MIGRATING, NOT_MIGRATED = (
    Migrated(MIGRATING, 0, 1, 51, 5_100, 0.1, 0.1),
    MigrationFailed(MIGRATING, 0, 1, "lease over"),
)


@pytest.fixture
def run() -> FakeWorkers:
    """`MIGRATING` moves from engine 0, which exceeds its KV watermark, to engine 1."""
    bounds = limits(num_steps=20, batch_size=1, group_size=2, max_staleness=2)
    state = state_at(bounds, newest=0)
    add_engine(state, 0, rows=4, loaded={0})
    add_engine(state, 1, rows=4, loaded={0})
    add_running(state, 0, 0, 1, num_tokens=50, siblings=[0, 1])
    run = FakeWorkers(bounds, state=state)
    run.deliver(ProgressReported(0, ((MIGRATING, 51),), 10.0, kv_usage=0.95))
    assert run.actions(Migrate) == [Migrate(MIGRATING, 0, 1, 0, "kv")]
    run.deliver(ProgressReported(0, (), 10.0, kv_usage=0.5))
    run.pending.clear()
    return run


def deliver_events(run: FakeWorkers, events: list[Event]) -> None:
    for event in events:
        run.deliver(event)


def assert_all_rows_are_free(run: FakeWorkers) -> None:
    for on in run.state.engines.values():
        assert (on.free_rows, on.is_empty, +on.rows_by_version) == (on.num_rows, True, {})
    assert run.state.migrations == {}
    assert run.state.requests == {}


@pytest.mark.parametrize("outcome", [DONE_MIGRATING, NOT_MIGRATED], ids=["migrated", "not migrated"])
def test_a_request_continues_on_its_owner(run: FakeWorkers, outcome: Event) -> None:
    owner = 1 if outcome == DONE_MIGRATING else 0
    run.deliver(outcome)
    assert MIGRATING in run.state.engines[owner].requests
    assert MIGRATING not in run.state.engines[1 - owner].requests
    assert run.deliver(finished(owner, MIGRATING, 0)) == []
    assert Score(MIGRATING.group) in run.deliver(finished(0, STAYING, 0))
    assert_all_rows_are_free(run)


def test_a_request_may_finish_during_its_migration(run: FakeWorkers) -> None:
    run.deliver(finished(0, MIGRATING, 0))
    assert run.state.engines[1].free_rows == 3, "its row is reserved until the migration ends"
    run.deliver(NOT_MIGRATED)
    assert run.state.engines[1].free_rows == 4
    run.deliver(finished(0, STAYING, 0))
    assert_all_rows_are_free(run)
    assert run.actions(Abort) == []


ABORTED_ON_0, ABORTED_ON_1 = RequestsAborted(0, (MIGRATING,), 51), RequestsAborted(1, (MIGRATING,), 52)
NOTHING_ABORTED_ON_0, NOTHING_ABORTED_ON_1 = RequestsAborted(0, (), 0), RequestsAborted(1, (), 0)
EVENT_ORDERS = [
    [ABORTED_ON_0, NOT_MIGRATED],
    [NOT_MIGRATED, ABORTED_ON_0],
    [finished(0, MIGRATING, 0), NOT_MIGRATED, NOTHING_ABORTED_ON_0],
    [finished(0, MIGRATING, 0), NOTHING_ABORTED_ON_0, NOT_MIGRATED],
    [NOT_MIGRATED, finished(0, MIGRATING, 0), NOTHING_ABORTED_ON_0],
    [RequestFailed(0, MIGRATING, "refused, too"), NOT_MIGRATED, NOTHING_ABORTED_ON_0],
    [NOTHING_ABORTED_ON_0, DONE_MIGRATING, ABORTED_ON_1],
    [DONE_MIGRATING, NOTHING_ABORTED_ON_0, ABORTED_ON_1],
    [DONE_MIGRATING, ABORTED_ON_1, NOTHING_ABORTED_ON_0],
    [DONE_MIGRATING, NOTHING_ABORTED_ON_0, finished(1, MIGRATING, 0), NOTHING_ABORTED_ON_1],
    [DONE_MIGRATING, finished(1, MIGRATING, 0), NOTHING_ABORTED_ON_1, NOTHING_ABORTED_ON_0],
    [DONE_MIGRATING, NOTHING_ABORTED_ON_0, RequestFailed(1, MIGRATING, "refused, too"), NOTHING_ABORTED_ON_1],
]


def event_names(events: list[Event]) -> str:
    return ", ".join(f"{type(f).__name__} {getattr(f, 'engine', '')}".strip() for f in events)


@pytest.mark.parametrize("events", EVENT_ORDERS, ids=event_names)
def test_the_migration_of_an_aborted_request_leaves_no_row_in_use(
    run: FakeWorkers, events: list[Event]
) -> None:
    actions = run.deliver(RequestFailed(0, STAYING, "refused"))
    assert actions == [Abort(0, (MIGRATING,)), Fail(STAYING.group, "refused")]
    run.pending.clear()
    deliver_events(run, events)
    assert_all_rows_are_free(run)
    ends_at_1 = DONE_MIGRATING in events
    assert run.actions(Abort)[1:] == ([Abort(1, (MIGRATING,))] if ends_at_1 else [])
    assert run.actions(Score) == []
    assert len(run.actions(Fail)) == 1
    assert run.state.num_regenerated_tokens == 0


@pytest.mark.parametrize("fails_before", [True, False])
def test_a_migrating_request_that_fails_fails_its_group(run: FakeWorkers, fails_before: bool) -> None:
    if fails_before:
        run.deliver(NOT_MIGRATED)
    actions = run.deliver(RequestFailed(0, MIGRATING, "refused"))
    assert actions == [Abort(0, (STAYING,)), Fail(MIGRATING.group, "refused")]
    run.deliver(RequestsAborted(0, (STAYING,), 50))
    if not fails_before:
        run.deliver(NOT_MIGRATED)
    assert_all_rows_are_free(run)


@pytest.mark.parametrize(("lost", "regenerated"), [(0, {STAYING, MIGRATING}), (1, set[RequestId]())])
def test_a_migration_ends_before_one_of_its_engines_is_lost(
    run: FakeWorkers, lost: int, regenerated: set[RequestId]
) -> None:
    run.deliver(NOT_MIGRATED)
    run.deliver(EngineLost(lost, "killed"))
    again = {request for action in run.actions(Generate) for request in action.requests}
    assert again == regenerated
    assert run.state.num_regenerated_tokens == (101 if lost == 0 else 0)


def test_a_migrated_request_survives_the_loss_of_its_source(run: FakeWorkers) -> None:
    run.deliver(DONE_MIGRATING)
    run.deliver(EngineLost(0, "killed"))
    assert MIGRATING in run.state.engines[1].requests
    again = [request for action in run.actions(Generate) for request in action.requests]
    assert again == [STAYING]


IN_FLIGHT, RUNNING = "the migration must be in flight", "the engine must be running the request"
ILLEGAL: list[tuple[list[Event], Event, str]] = [
    ([], EngineLost(0, "killed"), "the engine's migrations must have ended before"),
    ([], EngineLost(1, "killed"), "the engine's migrations must have ended before"),
    ([], replace(DONE_MIGRATING, source=1, destination=0), IN_FLIGHT),
    ([], replace(DONE_MIGRATING, request=STAYING), IN_FLIGHT),
    ([], replace(NOT_MIGRATED, destination=0), IN_FLIGHT),
    ([], finished(1, MIGRATING, 0), RUNNING),
    ([DONE_MIGRATING], DONE_MIGRATING, IN_FLIGHT),
    ([DONE_MIGRATING], NOT_MIGRATED, IN_FLIGHT),
    ([NOT_MIGRATED], DONE_MIGRATING, IN_FLIGHT),
    ([DONE_MIGRATING], finished(0, MIGRATING, 0), RUNNING),
    ([finished(0, MIGRATING, 0)], DONE_MIGRATING, "the request must be unfinished"),
    (
        [RequestFailed(0, STAYING, "refused"), RequestsAborted(0, (MIGRATING,), 51)],
        DONE_MIGRATING,
        "the request must be unfinished",
    ),
]


@pytest.mark.parametrize(("before", "event", "rule"), ILLEGAL)
def test_impossible_migration_events_are_rejected_and_change_nothing(
    run: FakeWorkers, before: list[Event], event: Event, rule: str
) -> None:
    deliver_events(run, before)
    state = codec.state_to_json(run.state)
    with pytest.raises(ProtocolError, match=rule):
        run.orchestrator.handle(event, run.now)
    assert codec.state_to_json(run.state) == state
    assert invariants.check(run.state) == []


def test_a_version_is_kept_for_an_incoming_request() -> None:
    """Without the incoming request, engine 1 could drop version 0 for the newest."""
    bounds = limits(num_steps=20, batch_size=4, max_staleness=2)
    state = state_at(bounds, newest=1)
    add_engine(state, 0, rows=4, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=1, loaded={0})
    add_running(state, 0, 0, 1)
    add_running(state, 1, 0, 2)
    run = FakeWorkers(bounds, state=state)
    run.finish_group(RequestId(0, 2, 0).group)
    run.now = 1.0
    run.deliver(TimerFired())
    assert run.actions(Migrate) == [Migrate(RequestId(0, 1, 0), 0, 1, 0, "leave")]
    run.deliver(finished(0, RequestId(0, 1, 0), 0))
    assert run.state.engines[1].loaded == {0}
    run.deliver_all(unless=lambda event: not isinstance(event, MigrationFailed))
    assert run.state.engines[1].loading == 1


def test_a_group_with_migrated_requests_is_trained(run: FakeWorkers) -> None:
    deliver_events(run, [DONE_MIGRATING, finished(1, MIGRATING, 0), finished(0, STAYING, 0)])
    actions = run.deliver(GroupScored(MIGRATING.group, (0.0, 1.0)))
    assert Commit(MIGRATING.group, 0) in actions
    assert not [event for event in run.pending if isinstance(event, RequestFinished)]
