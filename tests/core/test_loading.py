"""Deferred loads: when it suits an engine, one engine after another, and always where the bound asks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, is_work, limits

from dora.core import versions
from dora.core.actions import Action, Drop, Generate, Load
from dora.core.events import EngineLost, Loaded, LoadFailed, Trained, Woken
from dora.core.records import GroupId
from dora.core.state import State


def fleet(num_engines: int, *, rows: int = 2, **changes: Any) -> State:
    """Engines of two slots; each decodes one request of version 1, and version 2 has just come."""
    settings = {"num_steps": 9, "batch_size": 20, "max_staleness": 4, "is_deferred": True}
    state = midway(limits(**(settings | changes)), newest=2)
    for number in range(num_engines):
        engine(state, number, rows=rows, slots=2, held={1})
        running(state, number, 1, number)
    return state


def loads(orders: list[Action]) -> list[int]:
    """Engines that are told to load version 2."""
    return [order.engine for order in orders if isinstance(order, Load) and order.version == 2]


@pytest.mark.parametrize(("num_engines", "num_at_a_time"), [(2, 1), (7, 1), (8, 2), (13, 3)])
def test_engines_load_one_after_another_and_many_a_quarter_at_a_time(
    num_engines: int, num_at_a_time: int
) -> None:
    state = fleet(num_engines)
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    order = loads(run.given)
    assert order == [*range(num_at_a_time)]
    while len(order) < num_engines:
        done = next(number for number in order if run.state.engines[number].loading == 2)
        order += loads(run.tell(Loaded(done, 2, "v2")))
    assert order == [*range(num_engines)]


def test_all_of_them_load_at_once_where_nothing_is_deferred() -> None:
    assert loads(versions.load(fleet(3, is_deferred=False))) == [0, 1, 2]


def test_engines_that_decode_nothing_wait_for_their_turn_too() -> None:
    state = midway(limits(num_steps=9, is_deferred=True), newest=2)
    for number in (0, 1):
        engine(state, number, rows=2, held={1})
    assert versions.load(state) == [Drop(0, 1), Load(0, 2)]


@pytest.mark.parametrize("kind", [LoadFailed, EngineLost])
def test_a_load_that_comes_to_nothing_gives_way_to_the_next_engine(kind: type) -> None:
    state = fleet(3, rows=4)
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    assert loads(run.given) == [0]
    orders = run.tell(LoadFailed(0, 2, "damaged") if kind is LoadFailed else EngineLost(0, "killed"))
    assert loads(orders) == [1]
    run.settle()
    assert run.core.done


def test_an_engine_without_a_free_row_has_no_use_for_the_newest_yet() -> None:
    state = fleet(1, rows=1)
    run = Stations(state.limits, state=state)
    assert loads(run.tell(Woken())) == []
    run.settle(but=lambda fact: loads(run.given) != [])
    assert loads(run.given) == [0]


def test_where_the_bound_asks_an_engine_takes_the_newest_without_a_free_row() -> None:
    """Whatever is admitted at version 1 from here on would be too old."""
    state = fleet(1, rows=1, max_staleness=1)
    versions.listen(state)
    assert state.is_newest_asked
    assert versions.load(state) == [Load(0, 2)]


def test_a_pinned_version_without_an_engine_waits_for_nobody() -> None:
    state = fleet(2)
    engine(state, 2, rows=4, slots=2, held={1}, loading=2)
    waiting(state, 0, 7)
    assert Load(0, 0) in versions.load(state)


def test_engines_go_on_with_what_they_hold_while_they_wait_for_their_turn() -> None:
    """Both are full when version 1 comes; then one row ends on each."""
    run = Stations(limits(num_steps=9, batch_size=2, max_staleness=3, is_deferred=True))
    for number in (0, 1):
        run.join(number, rows=2, slots=3)
    run.settle(but=is_work)
    for row in (0, 1):
        run.finish(GroupId(0, row))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert [order.version for order in run.orders(Load)] == [0, 0]
    for number in (0, 1):
        run.finish(GroupId(0, run.rows(number)[0]))
    assert run.orders(Load)[2:] == [Load(0, 1)]
    assert (run.orders(Generate)[-1].engine, run.orders(Generate)[-1].version) == (1, 0)
    run.settle()
    assert run.core.done
