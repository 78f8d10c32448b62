"""Slow engines, measured by their reports, get requests last and lose their stragglers."""

from __future__ import annotations

import pytest
from tests.core import midrun
from tests.core.fake_workers import FakeWorkers, limits

from dora.core import stragglers
from dora.core.actions import Drop, Generate, Load, Migrate
from dora.core.events import MigrationFailed, ProgressReported, TimerFired
from dora.core.types import RequestId

STRAGGLER = RequestId(0, 0, 0)
FAST, SLOW = 0, 1


def run_with_stall(
    *,
    fast_loaded: tuple[int, ...] = (0, 1),
    rate: float = 10.0,
    stop_s: float = 0.1,
    ablations: tuple[str, ...] = (),
) -> FakeWorkers:
    """The trainer waits for a request of version 0, whose engine decodes `rate` tokens/s instead of 100."""
    rules = limits(max_staleness=1, batch_size=1, num_steps=6, ablations=ablations)
    state = midrun.state_at(rules, newest=1)
    midrun.add_engine(state, FAST, rows=2, loaded=fast_loaded, slots=2, row_tokens_per_s=100.0)
    midrun.add_engine(state, SLOW, rows=2, loaded=(0, 1), slots=2, row_tokens_per_s=rate)
    midrun.add_running(state, SLOW, 0, 0, num_tokens=20)
    state.costs.mean_response_tokens = 60.0
    state.costs.stop_s = stop_s
    state.is_rebalance_due = True
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    run.deliver(TimerFired())
    assert run.state.stall_group == STRAGGLER.group
    return run


@pytest.mark.parametrize(("rate", "lag"), [(100.0, 0), (60.0, 0), (40.0, 1), (10.0, 3), (0.0, 0)])
def test_lag_is_log2_of_the_slowdown(rate: float, lag: int) -> None:
    state = midrun.state_at(limits(), newest=0)
    midrun.add_engine(state, FAST, rows=1, loaded=(0,), row_tokens_per_s=100.0)
    slow = midrun.add_engine(state, SLOW, rows=1, loaded=(0,), row_tokens_per_s=rate)
    stragglers.update_lags(state)
    assert slow.lag == lag


def test_lag_changes_with_hysteresis() -> None:
    state = midrun.state_at(limits(), newest=0)
    midrun.add_engine(state, FAST, rows=1, loaded=(0,), row_tokens_per_s=100.0)
    slow = midrun.add_engine(state, SLOW, rows=1, loaded=(0,), row_tokens_per_s=45.0)
    for rate, lag in ((45.0, 0), (30.0, 1), (55.0, 1), (70.0, 0)):
        slow.row_tokens_per_s = rate
        stragglers.update_lags(state)
        assert slow.lag == lag, rate


def test_an_engine_drops_its_copy_once_another_holder_is_as_fast() -> None:
    """While the other holder lags, this is the last copy of a pinned version. No event is about it."""
    state = midrun.state_at(limits(max_staleness=3, batch_size=1, num_steps=9), newest=2)
    midrun.add_engine(state, FAST, rows=4, loaded=(0, 1), slots=2, row_tokens_per_s=100.0)
    midrun.add_engine(state, SLOW, rows=4, loaded=(0, 2), slots=2, row_tokens_per_s=40.0)
    for version, engine in ((0, SLOW), (1, FAST), (2, SLOW)):
        midrun.add_running(state, engine, version, version)
    state.next_step, state.training_step, state.batches, state.is_rebalance_due = 3, 2, {2: ()}, True
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    assert (state.engines[FAST].next_load, state.engines[FAST].evicting) == (2, 0)
    run.now += 2.0
    assert run.deliver(ProgressReported(SLOW, (), 100.0)) == [Drop(FAST, 0), Load(FAST, 2)]


def test_new_requests_are_placed_on_slow_engines_last() -> None:
    state = midrun.state_at(limits(max_staleness=4, batch_size=4), newest=0)
    midrun.add_engine(state, FAST, rows=2, loaded=(0,), row_tokens_per_s=100.0)
    midrun.add_engine(state, SLOW, rows=6, loaded=(0,), row_tokens_per_s=10.0)
    midrun.add_prompts(state, first=0, count=3)
    state.is_rebalance_due = True
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    assert {action.engine: len(action.requests) for action in run.actions(Generate)} == {FAST: 2, SLOW: 1}


def test_a_straggler_migrates_off_a_slow_engine() -> None:
    assert run_with_stall().actions(Migrate) == [Migrate(STRAGGLER, SLOW, FAST, 0, "slow")]


def test_without_live_migration_no_straggler_migrates() -> None:
    assert run_with_stall(ablations=("moves",)).actions(Migrate) == []


@pytest.mark.parametrize(
    ("stop_s", "rate"),
    [(10.0, 10.0), (0.1, 70.0)],
    ids=["the migration takes too long", "the engine is not slow"],
)
def test_a_straggler_stays_if_a_migration_gains_too_little(stop_s: float, rate: float) -> None:
    assert run_with_stall(stop_s=stop_s, rate=rate).actions(Migrate) == []


def test_after_a_failed_migration_a_straggler_waits_for_the_interval() -> None:
    run = run_with_stall()
    run.now += 0.01
    run.deliver(MigrationFailed(STRAGGLER, SLOW, FAST, "no room"))
    run.deliver(TimerFired())
    assert len(run.actions(Migrate)) == 1
    run.now += run.state.limits.rebalance_interval_s
    run.deliver(TimerFired())
    assert len(run.actions(Migrate)) == 2


def test_a_straggler_version_held_by_slow_engines_only_is_loaded_on_another() -> None:
    run = run_with_stall(fast_loaded=(1,))
    assert Load(FAST, 0) in run.actions(Load)
    run.deliver_all(unless=lambda event: not hasattr(event, "digest"))
    assert Migrate(STRAGGLER, SLOW, FAST, 0, "slow") in run.actions(Migrate)


def test_reported_throughput_makes_an_engine_slow() -> None:
    run = run_with_stall(rate=100.0)
    assert run.actions(Migrate) == []
    run.now += 1.0
    run.deliver(ProgressReported(SLOW, (), 8.0, 0.1))
    assert run.actions(Migrate) == [Migrate(STRAGGLER, SLOW, FAST, 0, "slow")]
