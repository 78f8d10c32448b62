"""Steps and loads that fail are ordered again; nothing is lost by them."""

from __future__ import annotations

from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Commit, Drop, Generate, Load, Publish, Train
from dora.core.events import Loaded, LoadFailed, StepFailed, Trained


def test_a_failed_step_is_repeated_with_the_same_batch() -> None:
    run = Stations(limits())
    run.join(0, rows=4, slots=1)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    first = run.orders(Train)
    assert len(first) == 1
    for _ in range(3):
        assert run.tell(StepFailed(0, "no memory")) == first
    assert len(run.orders(Commit)) == 2, "nothing is committed twice"
    run.settle(but=lambda fact: fact == Trained(1))
    assert run.orders(Publish) == [Publish(0), Publish(1)]
    run.settle(but=lambda fact: not isinstance(fact, Trained))
    assert run.state.num_trained == 4


def test_a_failed_load_is_ordered_again() -> None:
    run = Stations(limits())
    run.join(0, rows=4, slots=1)
    run.settle(but=lambda fact: isinstance(fact, Loaded))
    assert run.tell(LoadFailed(0, 0, "no memory")) == [Load(0, 0)]
    run.settle()
    assert run.core.done


def test_the_slot_of_a_failed_load_is_empty() -> None:
    """Version 0 was dropped for version 1; the engine holds nothing until it has come."""
    state = midway(limits(num_steps=9, max_staleness=2), newest=1)
    engine(state, 0, rows=4, held={0})
    run = Stations(state.limits, state=state)
    run.join(1, rows=1, slots=1)
    assert run.orders(Drop) == [Drop(0, 0)]
    run.tell(LoadFailed(0, 1, "no memory"))
    assert run.state.engines[0].held == set()
    assert [order for order in run.orders(Load) if order.engine == 0] == [Load(0, 1), Load(0, 1)]


def test_where_a_load_fails_requests_wait_and_begin_once() -> None:
    state = midway(limits(num_steps=9, max_staleness=2), newest=1)
    engine(state, 0, rows=4, slots=2, held={1})
    running(state, 0, 1, 4)
    waiting(state, 0, 3)
    run = Stations(state.limits, state=state)
    run.join(1, rows=4, slots=1)
    orphan = next(order for order in run.orders(Load) if order.version == 0)
    for _ in range(2):
        orders = run.tell(LoadFailed(orphan.engine, 0, "no memory"))
        orphan = next(o for o in orders if isinstance(o, Load) and o.version == 0)
    run.settle(but=is_work)
    begun = [(o.engine, r.row) for o in run.orders(Generate) for r in o.requests if r.row == 3]
    assert begun == [(orphan.engine, 3)]
