"""Slow engines are known by what they report: they get requests last, and keep no straggler."""

from __future__ import annotations

import pytest
from tests.core import midway
from tests.core.stations import Stations, limits

from dora.core import slowness
from dora.core.actions import Drop, Generate, Load, Migrate
from dora.core.events import MigrationFailed, Progressed, Woken
from dora.core.records import RequestId

LATE = RequestId(0, 0, 0)
FAST, SLOW = 0, 1


def waiting(*, fast_holds: tuple[int, ...] = (0, 1), pace: float = 10.0, stop_s: float = 0.1) -> Stations:
    """The trainer waits for a request of version 0; its engine makes `pace` tokens a second, not 100."""
    state = midway.midway(limits(max_staleness=1, batch_size=1, num_steps=6), newest=1)
    midway.engine(state, FAST, rows=2, held=fast_holds, slots=2, row_tokens_per_s=100.0)
    midway.engine(state, SLOW, rows=2, held=(0, 1), slots=2, row_tokens_per_s=pace)
    midway.running(state, SLOW, 0, 0, num_tokens=20)
    state.costs.answer_tokens = 60.0
    state.costs.stop_s = stop_s
    state.is_rebalance_due = True
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    run.tell(Woken())
    assert run.state.stall_group == LATE.group
    return run


@pytest.mark.parametrize(("pace", "lag"), [(100.0, 0), (60.0, 0), (40.0, 1), (10.0, 3), (0.0, 0)])
def test_an_engine_lags_by_the_halvings_of_its_pace(pace: float, lag: int) -> None:
    state = midway.midway(limits(), newest=0)
    midway.engine(state, FAST, rows=1, held=(0,), row_tokens_per_s=100.0)
    slow = midway.engine(state, SLOW, rows=1, held=(0,), row_tokens_per_s=pace)
    slowness.measure(state)
    assert slow.lag == lag


def test_a_lag_is_another_only_once_it_is_well_beyond_a_doubling() -> None:
    state = midway.midway(limits(), newest=0)
    midway.engine(state, FAST, rows=1, held=(0,), row_tokens_per_s=100.0)
    slow = midway.engine(state, SLOW, rows=1, held=(0,), row_tokens_per_s=45.0)
    for pace, lag in ((45.0, 0), (30.0, 1), (55.0, 1), (70.0, 0)):
        slow.row_tokens_per_s = pace
        slowness.measure(state)
        assert slow.lag == lag, pace


def test_an_engine_drops_its_copy_once_that_of_another_is_as_fast() -> None:
    """While the other lags it is the last copy of a pinned version. No fact is about the engine itself."""
    state = midway.midway(limits(max_staleness=3, batch_size=1, num_steps=9), newest=2)
    midway.engine(state, FAST, rows=4, held=(0, 1), slots=2, row_tokens_per_s=100.0)
    midway.engine(state, SLOW, rows=4, held=(0, 2), slots=2, row_tokens_per_s=40.0)
    for version, engine in ((0, SLOW), (1, FAST), (2, SLOW)):
        midway.running(state, engine, version, version)
    state.next_step, state.training, state.batches, state.is_rebalance_due = 3, 2, {2: ()}, True
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    assert (state.engines[FAST].wanted, state.engines[FAST].clearing) == (2, 0)
    run.now += 2.0
    assert run.tell(Progressed(SLOW, (), 100.0)) == [Drop(FAST, 0), Load(FAST, 2)]


def test_new_requests_go_to_a_slow_engine_last() -> None:
    state = midway.midway(limits(max_staleness=4, batch_size=4), newest=0)
    midway.engine(state, FAST, rows=2, held=(0,), row_tokens_per_s=100.0)
    midway.engine(state, SLOW, rows=6, held=(0,), row_tokens_per_s=10.0)
    midway.prompts(state, first=0, count=3)
    state.is_rebalance_due = True
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    assert {order.engine: len(order.requests) for order in run.orders(Generate)} == {FAST: 2, SLOW: 1}


def test_what_the_trainer_waits_for_leaves_a_slow_engine() -> None:
    assert waiting().orders(Migrate) == [Migrate(LATE, SLOW, FAST, 0, "slow")]


@pytest.mark.parametrize(
    ("stop_s", "pace"), [(10.0, 10.0), (0.1, 70.0)], ids=["a move takes too long", "it is not slow"]
)
def test_it_stays_where_a_move_gains_too_little(stop_s: float, pace: float) -> None:
    assert waiting(stop_s=stop_s, pace=pace).orders(Migrate) == []


def test_after_a_move_that_failed_it_waits_for_the_next_rebalance() -> None:
    run = waiting()
    run.now += 0.01
    run.tell(MigrationFailed(LATE, SLOW, FAST, "no room"))
    run.tell(Woken())
    assert len(run.orders(Migrate)) == 1
    run.now += run.state.limits.rebalance_interval_s
    run.tell(Woken())
    assert len(run.orders(Migrate)) == 2


def test_a_version_that_only_slow_engines_have_is_loaded_by_another() -> None:
    run = waiting(fast_holds=(1,))
    assert Load(FAST, 0) in run.orders(Load)
    run.settle(but=lambda fact: not hasattr(fact, "digest"))
    assert Migrate(LATE, SLOW, FAST, 0, "slow") in run.orders(Migrate)


def test_what_an_engine_reports_makes_it_slow() -> None:
    run = waiting(pace=100.0)
    assert run.orders(Migrate) == []
    run.now += 1.0
    run.tell(Progressed(SLOW, (), 8.0, 0.1))
    assert run.orders(Migrate) == [Migrate(LATE, SLOW, FAST, 0, "slow")]
