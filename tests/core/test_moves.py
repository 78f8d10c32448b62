"""A move under way and the end of its request, in every order in which the facts may come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, finished, limits

from dora.core import invariants, snapshot
from dora.core.actions import Abort, Commit, Fail, Generate, Migrate, Score
from dora.core.events import (
    EngineLost,
    Event,
    GroupScored,
    Migrated,
    MigrationFailed,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Woken,
)
from dora.core.records import ProtocolError, RequestId

STAYING, MOVING = RequestId(0, 1, 0), RequestId(0, 1, 1)  # siblings, on engine 0
MOVED, KEPT = Migrated(MOVING, 0, 1, 51, 5_100, 0.1, 0.1), MigrationFailed(MOVING, 0, 1, "lease over")


@pytest.fixture
def run() -> Stations:
    """`MOVING` is on its way from engine 0, which is over its watermark, to engine 1."""
    bounds = limits(num_steps=20, batch_size=1, group_size=2, max_staleness=2)
    state = midway(bounds, newest=0)
    engine(state, 0, rows=4, held={0})
    engine(state, 1, rows=4, held={0})
    running(state, 0, 0, 1, num_tokens=50, siblings=[0, 1])
    stations = Stations(bounds, state=state)
    stations.tell(Progressed(0, ((MOVING, 51),), 10.0, kv_share=0.95))
    assert stations.orders(Migrate) == [Migrate(MOVING, 0, 1, 0, "kv")]
    stations.tell(Progressed(0, (), 10.0, kv_share=0.5))
    stations.pending.clear()
    return stations


def tell_all(run: Stations, facts: list[Event]) -> None:
    for fact in facts:
        run.tell(fact)


def assert_all_rows_are_free(run: Stations) -> None:
    for on in run.state.engines.values():
        assert (on.free_rows, on.is_empty, +on.running) == (on.rows, True, {})
    assert run.state.moves == {}
    assert run.state.requests == {}


@pytest.mark.parametrize("outcome", [MOVED, KEPT], ids=["taken", "kept"])
def test_a_request_goes_on_where_it_ends_up(run: Stations, outcome: Event) -> None:
    owner = 1 if outcome == MOVED else 0
    run.tell(outcome)
    assert MOVING in run.state.engines[owner].requests
    assert MOVING not in run.state.engines[1 - owner].requests
    assert run.tell(finished(owner, MOVING, 0)) == []
    assert Score(MOVING.group) in run.tell(finished(0, STAYING, 0))
    assert_all_rows_are_free(run)


def test_a_request_may_finish_before_it_is_handed_over(run: Stations) -> None:
    run.tell(finished(0, MOVING, 0))
    assert run.state.engines[1].free_rows == 3, "its place is kept until the move is told"
    run.tell(KEPT)
    assert run.state.engines[1].free_rows == 4
    run.tell(finished(0, STAYING, 0))
    assert_all_rows_are_free(run)
    assert run.orders(Abort) == []


GIVEN_UP_AT_0, GIVEN_UP_AT_1 = RequestsAborted(0, (MOVING,), 51), RequestsAborted(1, (MOVING,), 52)
TOO_LATE_AT_0, TOO_LATE_AT_1 = RequestsAborted(0, (), 0), RequestsAborted(1, (), 0)
FAILED = [
    [GIVEN_UP_AT_0, KEPT],
    [KEPT, GIVEN_UP_AT_0],
    [finished(0, MOVING, 0), KEPT, TOO_LATE_AT_0],
    [finished(0, MOVING, 0), TOO_LATE_AT_0, KEPT],
    [KEPT, finished(0, MOVING, 0), TOO_LATE_AT_0],
    [RequestFailed(0, MOVING, "refused, too"), KEPT, TOO_LATE_AT_0],
    [TOO_LATE_AT_0, MOVED, GIVEN_UP_AT_1],
    [MOVED, TOO_LATE_AT_0, GIVEN_UP_AT_1],
    [MOVED, GIVEN_UP_AT_1, TOO_LATE_AT_0],
    [MOVED, TOO_LATE_AT_0, finished(1, MOVING, 0), TOO_LATE_AT_1],
    [MOVED, finished(1, MOVING, 0), TOO_LATE_AT_1, TOO_LATE_AT_0],
    [MOVED, TOO_LATE_AT_0, RequestFailed(1, MOVING, "refused, too"), TOO_LATE_AT_1],
]


def order_of(facts: list[Event]) -> str:
    return ", ".join(f"{type(f).__name__} {getattr(f, 'engine', '')}".strip() for f in facts)


@pytest.mark.parametrize("facts", FAILED, ids=order_of)
def test_the_move_of_a_request_that_is_given_up_leaves_no_row_behind(
    run: Stations, facts: list[Event]
) -> None:
    orders = run.tell(RequestFailed(0, STAYING, "refused"))
    assert orders == [Abort(0, (MOVING,)), Fail(STAYING.group, "refused")]
    run.pending.clear()
    tell_all(run, facts)
    assert_all_rows_are_free(run)
    ends_at_1 = MOVED in facts
    assert run.orders(Abort)[1:] == ([Abort(1, (MOVING,))] if ends_at_1 else [])
    assert run.orders(Score) == []
    assert len(run.orders(Fail)) == 1
    assert run.state.num_regenerated_tokens == 0


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_moving_request_that_fails_fails_its_group(run: Stations, is_told_first: bool) -> None:
    if is_told_first:
        run.tell(KEPT)
    orders = run.tell(RequestFailed(0, MOVING, "refused"))
    assert orders == [Abort(0, (STAYING,)), Fail(MOVING.group, "refused")]
    run.tell(RequestsAborted(0, (STAYING,), 50))
    if not is_told_first:
        run.tell(KEPT)
    assert_all_rows_are_free(run)


@pytest.mark.parametrize(("lost", "regenerated"), [(0, {STAYING, MOVING}), (1, set[RequestId]())])
def test_a_move_is_settled_before_one_of_its_engines_is_lost(
    run: Stations, lost: int, regenerated: set[RequestId]
) -> None:
    run.tell(KEPT)
    run.tell(EngineLost(lost, "killed"))
    again = {request for order in run.orders(Generate) for request in order.requests}
    assert again == regenerated
    assert run.state.num_regenerated_tokens == (101 if lost == 0 else 0)


def test_a_request_that_was_taken_survives_the_loss_of_its_source(run: Stations) -> None:
    run.tell(MOVED)
    run.tell(EngineLost(0, "killed"))
    assert MOVING in run.state.engines[1].requests
    again = [request for order in run.orders(Generate) for request in order.requests]
    assert again == [STAYING]


ORDERED, GIVEN = "the move was ordered", "an engine finishes only what it was given"
ILLEGAL: list[tuple[list[Event], Event, str]] = [
    ([], EngineLost(0, "killed"), "moves are settled before an engine is lost"),
    ([], EngineLost(1, "killed"), "moves are settled before an engine is lost"),
    ([], replace(MOVED, source=1, destination=0), ORDERED),
    ([], replace(MOVED, request=STAYING), ORDERED),
    ([], replace(KEPT, destination=0), ORDERED),
    ([], finished(1, MOVING, 0), GIVEN),
    ([MOVED], MOVED, ORDERED),
    ([MOVED], KEPT, ORDERED),
    ([KEPT], MOVED, ORDERED),
    ([MOVED], finished(0, MOVING, 0), GIVEN),
    ([finished(0, MOVING, 0)], MOVED, "it was unfinished"),
    ([RequestFailed(0, STAYING, "refused"), RequestsAborted(0, (MOVING,), 51)], MOVED, "it was unfinished"),
]


@pytest.mark.parametrize(("before", "fact", "rule"), ILLEGAL)
def test_what_cannot_be_true_of_a_move_is_refused_and_changes_nothing(
    run: Stations, before: list[Event], fact: Event, rule: str
) -> None:
    tell_all(run, before)
    state = snapshot.to_json(run.state)
    with pytest.raises(ProtocolError, match=rule):
        run.core.handle(fact, run.now)
    assert snapshot.to_json(run.state) == state
    assert invariants.check(run.state) == []


def test_a_version_is_kept_for_a_request_that_is_on_its_way() -> None:
    """Engine 1 could drop version 0 for the newest, were nothing to come."""
    bounds = limits(num_steps=20, batch_size=4, max_staleness=2)
    state = midway(bounds, newest=1)
    engine(state, 0, rows=4, held={0}, is_leaving=True)
    engine(state, 1, rows=1, held={0})
    running(state, 0, 0, 1)
    running(state, 1, 0, 2)
    run = Stations(bounds, state=state)
    run.finish(RequestId(0, 2, 0).group)
    run.now = 1.0
    run.tell(Woken())
    assert run.orders(Migrate) == [Migrate(RequestId(0, 1, 0), 0, 1, 0, "leave")]
    run.tell(finished(0, RequestId(0, 1, 0), 0))
    assert run.state.engines[1].held == {0}
    run.settle(but=lambda fact: not isinstance(fact, MigrationFailed))
    assert run.state.engines[1].loading == 1


def test_a_group_whose_requests_moved_is_trained_as_any_other(run: Stations) -> None:
    tell_all(run, [MOVED, finished(1, MOVING, 0), finished(0, STAYING, 0)])
    orders = run.tell(GroupScored(MOVING.group, (0.0, 1.0)))
    assert Commit(MOVING.group, 0) in orders
    assert not [fact for fact in run.pending if isinstance(fact, RequestFinished)]
