"""Which engine holds which version, and how long the store keeps one."""

from __future__ import annotations

from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, is_work, limits

from dora.core import versions
from dora.core.actions import Admit, Drop, Load, Retire
from dora.core.events import EngineLost, Loaded, Trained
from dora.core.records import GroupId
from dora.core.state import State


def test_every_engine_loads_every_new_version_it_has_a_slot_for() -> None:
    run = Stations(limits())
    run.join(0, rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    run.settle()
    for number in (0, 1):
        assert [order.version for order in run.orders(Load) if order.engine == number][:4] == [0, 1, 2, 3]


def test_the_newest_version_comes_beside_one_that_is_still_decoded() -> None:
    run = Stations(limits(max_staleness=1))
    run.join(0, rows=8, slots=2)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    run.tell(Trained(0))
    run.settle(but=is_work)
    on = run.state.engines[0]
    assert on.held == {0, 1}
    assert set(on.requests.values()) == {0, 1}
    assert run.orders(Drop) == []


def test_an_engine_never_drops_a_version_it_decodes() -> None:
    run = Stations(limits(max_staleness=1))
    run.join(0, rows=8, slots=1)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert run.orders(Drop) == []
    run.finish(GroupId(0, 2))
    assert run.orders(Drop) == []
    run.finish(GroupId(0, 3))
    assert run.orders(Drop) == [Drop(0, 0)]
    assert run.orders(Load)[-1] == Load(0, 1)


def test_an_engine_that_must_make_room_admits_nothing_until_it_has() -> None:
    run = Stations(limits(max_staleness=2, num_steps=9))
    run.join(0, rows=4, slots=1)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    num_before = len(run.orders(Admit))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert run.state.engines[0].wanted == 1
    run.finish(GroupId(0, 2))
    assert run.state.engines[0].free_rows > 0
    assert len(run.orders(Admit)) == num_before
    run.settle(but=lambda fact: is_work(fact) and run.state.engines[0].held == {1})
    assert run.orders(Admit)[num_before].version == 1


def pinned_without_rows() -> State:
    """Engine 0 holds the only copy of version 0, which a request of a lost engine needs; 1 is the newest."""
    state = midway(limits(), newest=1)
    engine(state, 0, rows=1, held={0})
    waiting(state, 0, 0)
    return state


def test_an_engine_never_drops_the_last_copy_of_a_pinned_version() -> None:
    assert versions.load(pinned_without_rows()) == []


def test_an_engine_drops_a_pinned_version_that_another_one_holds() -> None:
    state = midway(limits(), newest=1)
    engine(state, 0, rows=1, held={0})
    engine(state, 1, rows=1, slots=2, held={0, 1})
    running(state, 1, 0, 0)
    assert versions.load(state) == [Drop(0, 0), Load(0, 1)]


def test_an_engine_drops_a_version_that_is_not_pinned() -> None:
    state = midway(limits(), newest=1)
    engine(state, 0, rows=1, held={0})
    assert versions.load(state) == [Drop(0, 0), Load(0, 1)]


def test_a_pinned_version_without_holder_is_loaded_before_the_newest() -> None:
    run = Stations(limits(max_staleness=2, num_steps=9))
    run.join(0, rows=4, slots=2)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert run.state.newest == 1
    run.tell(EngineLost(0, "killed"))
    num_before = len(run.orders(Load))
    run.join(1, rows=4, slots=2)
    assert run.orders(Load)[num_before:] == [Load(1, 0)]
    run.tell(Loaded(1, 0, "v0"))
    assert run.orders(Load)[num_before:] == [Load(1, 0), Load(1, 1)]
    assert set(run.state.engines[1].requests.values()) == {0}
    run.settle()
    assert run.core.done


def test_orphans_are_loaded_oldest_first_on_the_engines_with_most_free_rows() -> None:
    state = midway(limits(), newest=2)
    engine(state, 0, rows=2, held=())
    engine(state, 1, rows=9, held=())
    waiting(state, 1, 1)
    waiting(state, 0, 0)
    assert versions.load(state) == [Load(0, 1), Load(1, 0)]


def test_where_no_slot_is_free_for_an_orphan_the_least_busy_engine_clears_one() -> None:
    state = midway(limits(), newest=1)
    engine(state, 0, rows=4, held={1})
    engine(state, 1, rows=4, held={1})
    running(state, 0, 1, 1, 2)
    running(state, 1, 1, 3)
    waiting(state, 0, 0)
    assert versions.load(state) == []
    assert [(e.clearing, e.wanted) for e in state.engines.values()] == [(None, None), (1, 0)]


def test_the_store_keeps_every_pinned_version_and_lets_go_of_the_others() -> None:
    run = Stations(limits(max_staleness=1))
    run.join(0, rows=8, slots=3)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert run.orders(Retire) == []
    assert set(run.state.store) == {0, 1}
    run.finish(GroupId(0, 3))
    assert run.orders(Retire) == [Retire(0)]


def test_the_store_keeps_a_version_that_is_on_its_way_to_an_engine() -> None:
    run = Stations(limits(num_steps=3))
    run.join(0, rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    run.settle(but=lambda fact: isinstance(fact, Loaded) and fact.engine == 1)
    assert run.core.done
    assert sorted(run.state.store) == [0, 2, 3]
