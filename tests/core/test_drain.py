"""An engine that is asked to leave: its requests move, the version follows them, nothing begins again."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, prompts, running
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Dismiss, Generate, Load, Migrate, RefuseDrain
from dora.core.events import (
    DrainAsked,
    EngineLeft,
    EngineLost,
    Loaded,
    Migrated,
    MigrationFailed,
    PromptsFetched,
    RequestFailed,
    RequestsAborted,
    Woken,
)
from dora.core.records import RequestId
from dora.core.state import State

BOUNDS = limits(num_steps=20, batch_size=8, max_staleness=2)


def request(row: int, sibling: int = 0) -> RequestId:
    return RequestId(0, row, sibling)


def two_engines(slots: int = 1, other: tuple[int, ...] = (0,), rows: int = 4) -> State:
    """Engine 0 decodes requests 1 and 2 of version 0; engine 1 holds `other` versions."""
    state = midway(BOUNDS, newest=1)
    engine(state, 0, rows=4, held={0})
    engine(state, 1, rows=rows, slots=slots, held=other)
    running(state, 0, 0, 1, 2, num_tokens=50)
    return state


def test_requests_move_to_where_their_version_is_and_then_the_engine_goes() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    assert run.orders(Migrate) == [Migrate(request(row), 0, 1, 0, "leave") for row in (1, 2)]
    run.tell(Migrated(request(1), 0, 1, 50, 0, 0.0, 0.0))
    assert run.orders(Dismiss) == [], "one is left"
    assert run.tell(Migrated(request(2), 0, 1, 50, 0, 0.0, 0.0)) == [Dismiss(0)]
    run.tell(EngineLeft(0))
    assert run.state.engines.keys() == {1}
    assert run.rows(1) == [1, 2]


def test_where_no_other_engine_has_the_version_it_is_loaded_there_first() -> None:
    run = Stations(BOUNDS, state=two_engines(slots=2, other=(1,)))
    assert run.tell(DrainAsked(0))[:1] == [Load(1, 0)]
    assert run.orders(Migrate) == []
    orders = run.tell(Loaded(1, 0, "v0"))
    assert [o for o in orders if isinstance(o, Migrate)] == [
        Migrate(request(row), 0, 1, 0, "leave") for row in (1, 2)
    ]


def test_where_it_can_be_loaded_nowhere_the_engine_ends_its_requests_itself() -> None:
    state = two_engines(other=(1,))
    running(state, 1, 1, 3, 4, 5, 6)
    run = Stations(BOUNDS, state=state)
    run.tell(DrainAsked(0))
    run.now = 5.0
    run.tell(Woken())
    assert not run.orders(Migrate)
    assert not run.orders(Load)
    run.finish(request(1).group)
    assert run.orders(Dismiss) == []
    run.finish(request(2).group)
    assert run.orders(Dismiss) == [Dismiss(0)]


def test_what_finds_no_row_moves_when_one_comes_free() -> None:
    state = two_engines(rows=2)
    running(state, 1, 0, 3)
    run = Stations(BOUNDS, state=state)
    run.tell(DrainAsked(0))
    assert [order.request for order in run.orders(Migrate)] == [request(1)]
    run.tell(Migrated(request(1), 0, 1, 50, 0, 0.0, 0.0))
    run.finish(request(3).group)
    run.now = 1.0
    run.tell(Woken())
    assert [order.request for order in run.orders(Migrate)] == [request(1), request(2)]


def test_an_engine_that_leaves_gets_nothing_new() -> None:
    state = two_engines(other=(1,))
    prompts(state, 3, 8)
    run = Stations(BOUNDS, state=state)
    run.tell(DrainAsked(0))
    run.settle(but=is_work)
    assert run.orders(Generate)
    assert all(order.engine == 1 for order in run.orders(Generate))
    assert all(order.engine == 1 for order in run.orders(Load))


def test_an_empty_engine_goes_at_once() -> None:
    run = Stations(BOUNDS, state=two_engines())
    assert Dismiss(1) in run.tell(DrainAsked(1))


def test_an_engine_goes_only_after_what_it_loads_has_come() -> None:
    state = two_engines(other=())
    state.engines[1].loading = 1
    state.touch(state.engines[1])
    run = Stations(BOUNDS, state=state)
    run.ledger.seats.engines[1].loading = 1
    run.tell(DrainAsked(1))
    assert run.orders(Dismiss) == []
    run.tell(Loaded(1, 1, "v1"))
    assert run.orders(Dismiss) == [Dismiss(1)]


def test_an_engine_goes_only_after_a_request_on_its_way_to_it_has_come_and_gone() -> None:
    """It was a destination when it was asked to leave; the requests move on."""
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    run.join(2, rows=4, slots=2)
    run.settle(but=lambda fact: not isinstance(fact, Loaded))
    run.tell(DrainAsked(1))
    assert run.orders(Dismiss) == []
    run.settle(but=lambda fact: is_work(fact) or isinstance(fact, PromptsFetched))
    assert run.state.engines.keys() == {2}
    assert run.rows(2) == [1, 2]
    assert run.state.num_regenerated_tokens == 0


def test_an_engine_goes_only_after_its_aborts_are_confirmed() -> None:
    bounds = limits(num_steps=20, batch_size=8, max_staleness=2, group_size=2)
    state = midway(bounds, newest=0)
    engine(state, 0, rows=4, held={0})
    engine(state, 1, rows=1, held={0})
    running(state, 0, 0, 1)
    run = Stations(bounds, state=state)
    run.tell(RequestFailed(0, request(1, 0), "refused"))
    run.tell(DrainAsked(0))
    assert run.orders(Dismiss) == []
    run.tell(RequestsAborted(0, (request(1, 1),), 5))
    assert run.orders(Dismiss) == [Dismiss(0)]


def test_the_only_engine_is_refused() -> None:
    state = midway(BOUNDS, newest=0)
    engine(state, 0, rows=4, held={0})
    run = Stations(BOUNDS, state=state)
    assert run.tell(DrainAsked(0))[:1] == [RefuseDrain(0, "it is the only engine that stays")]
    assert not run.state.engines[0].is_leaving


def test_the_last_that_stays_is_refused() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    assert run.tell(DrainAsked(1))[:1] == [RefuseDrain(1, "it is the only engine that stays")]


def test_to_ask_twice_is_to_ask_once() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    assert run.tell(DrainAsked(0)) == []


def test_an_engine_that_has_become_the_only_one_stays_after_all() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    assert run.tell(EngineLost(1, "killed"))[:1] == [RefuseDrain(0, "it has become the only engine")]
    assert not run.state.engines[0].is_leaving
    assert run.rows(0) == [1, 2], "nothing was lost with the other"
    run.settle()
    assert run.core.done


def test_an_engine_that_was_dismissed_already_does_not_come_back() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(1))
    assert run.orders(Dismiss) == [Dismiss(1)]
    run.tell(EngineLost(0, "killed"))
    assert run.orders(RefuseDrain) == []
    assert run.tell(EngineLeft(1)) == []
    assert list(run.state.waiting[0]) == [request(1), request(2)]


def test_a_move_that_fails_is_tried_again_or_the_request_ends_where_it_is() -> None:
    run = Stations(BOUNDS, state=two_engines())
    run.tell(DrainAsked(0))
    run.pending = [fact for fact in run.pending if not isinstance(fact, Migrated)]
    for row in (1, 2):
        run.tell(MigrationFailed(request(row), 0, 1, "lease over"))
    run.now = 1.0
    run.tell(Woken())
    assert [order.request.row for order in run.orders(Migrate)] == [1, 2, 1, 2]
    run.finish(request(1).group)
    run.settle(but=is_work)
    assert run.orders(Dismiss) == [Dismiss(0)]


@pytest.mark.parametrize("slots", [1, 2])
def test_engines_that_leave_one_after_the_other_cost_no_answer(slots: int) -> None:
    run = Stations(limits(num_steps=8, batch_size=4, max_staleness=2))
    for number in range(4):
        run.join(number, rows=3, slots=slots)
    run.settle(but=is_work)
    for number in range(3):
        run.tell(DrainAsked(number))
        run.settle(but=is_work)
        run.now += 1.0
        for fact in [fact for fact in run.possible() if is_work(fact)][:3]:
            run.tell(fact)
    run.settle()
    assert run.core.done
    assert run.state.engines.keys() == {3}
    generated = [r for order in run.orders(Generate) for r in order.requests]
    assert len(generated) == len({*generated}) == 32
