"""Repartition: when engines change their version, which ones, and whether it pays off."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_running, add_waiting, state_at, state_with_tail

from dora.core import actions, events, weight_sync
from dora.core.migration import migrate
from dora.core.placement import repartition
from dora.core.state import State
from dora.core.types import RequestId

BOUNDS = limits(num_steps=20, batch_size=8, max_staleness=2)


def evictions(state: State) -> dict[int, tuple[int | None, int | None]]:
    """Engine -> (evicted version, next load), for engines that flip."""
    return {e.id: (e.evicting, e.next_load) for e in state.engines.values() if e.next_load is not None}


def test_the_engine_with_least_kv_evicts_its_version() -> None:
    state = state_with_tail()
    repartition(state)
    assert evictions(state) == {0: (0, 1)}


def test_its_request_migrates_and_then_it_loads() -> None:
    run = FakeWorkers(BOUNDS, state=state_with_tail())
    run.now = 1.0
    assert run.deliver(events.TimerFired())[0] == actions.Migrate(RequestId(0, 0, 0), 0, 1, 0, "flip")
    run.deliver_all(unless=lambda event: not hasattr(event, "destination"))
    assert run.actions(actions.Drop) == [actions.Drop(0, 0)]
    assert run.actions(actions.Load) == [actions.Load(0, 1)]
    assert run.dataset_rows(1) == [0, 1]


@pytest.mark.parametrize(("load_s", "is_worth_it"), [(7.4, True), (7.5, False)])
def test_an_engine_flips_only_if_that_gains_more_than_it_costs(load_s: float, is_worth_it: bool) -> None:
    """Gain: 3 empty rows for 100 more tokens: 300.

    Cost: one row at 10 tokens/s while 100 tokens of 1 kB move at 1 MB/s (0.1 s) and for a pause of 0.05 s:
    1.5; and all four rows while the version loads.
    """
    state = state_with_tail()
    state.costs.migrated_bytes, state.costs.migrated_tokens = 1000, 1
    state.costs.copy_bytes_per_s, state.costs.stop_s = 1e6, 0.05
    state.costs.load_s = load_s
    repartition(state)
    assert bool(evictions(state)) == is_worth_it


def test_an_engine_does_not_flip_if_its_requests_have_no_rows_elsewhere() -> None:
    state = state_with_tail()
    add_running(state, 1, 0, 6, 7, 8)
    repartition(state)
    assert evictions(state) == {}


def test_an_empty_engine_flips_at_any_cost() -> None:
    state = state_at(BOUNDS, newest=1)
    for number in range(2):
        add_engine(state, number, rows=4, loaded={0}, row_tokens_per_s=10.0)
    add_running(state, 1, 0, 1)
    state.costs.load_s = 1e9
    repartition(state)
    assert evictions(state) == {0: (0, 1)}


def test_the_last_copy_of_a_pinned_version_is_not_evicted_for_the_newest() -> None:
    """The request of version 0 runs on a draining engine; only engine 1 could receive it."""
    state = state_at(BOUNDS, newest=2)
    add_engine(state, 0, rows=4, loaded={0})
    add_running(state, 0, 0, 0)
    add_engine(state, 1, rows=4, slots=2, loaded={0, 1})
    state.engines[0].is_draining = True
    state.mark_dirty(state.engines[0])
    repartition(state)
    assert evictions(state) == {1: (1, 2)}


def test_versions_without_rows_get_engines_in_deadline_order() -> None:
    """Requests of versions 0 and 1 wait for an engine each; one of three engines keeps version 2."""
    state = state_at(BOUNDS, newest=2)
    for number in range(3):
        add_engine(state, number, rows=2, loaded={2})
    add_running(state, 2, 2, 9)
    add_waiting(state, 1, 1)
    add_waiting(state, 0, 0)
    repartition(state)
    assert evictions(state) == {0: (2, 0), 1: (2, 1)}


def test_a_static_run_is_not_repartitioned() -> None:
    state = state_with_tail(is_static=True)
    repartition(state)
    assert evictions(state) == {}


@pytest.mark.parametrize(
    ("rates", "evicting_engines"),
    [((10.0, 10.0, 10.0, 10.0), {0, 1, 2}), ((30.0, 10.0, 10.0, 10.0), {0, 1})],
    ids=["equal engines", "one of three times the speed"],
)
def test_shares_follow_throughput(rates: tuple[float, ...], evicting_engines: set[int]) -> None:
    """R = {0: 4, 1: 12}. Of four equal engines, three load version 1.

    A fast engine counts for three: of six units, the four for version 1 are the fast engine and another one.
    """
    state = state_at(limits(num_steps=20, batch_size=8, max_staleness=2), newest=1)
    for number, rate in enumerate(rates):
        add_engine(state, number, rows=4, loaded={0}, row_tokens_per_s=rate)
        add_running(state, number, 0, number, num_tokens=10 * number)
    state.costs.mean_response_tokens = 100.0
    repartition(state)
    assert evictions(state).keys() == evicting_engines


def test_a_share_too_small_for_a_fast_engine_gets_a_slow_one() -> None:
    """R = {0: 10, 1: 3}: one of six units is for version 1; the engine with least KV counts for three."""
    state = state_at(limits(num_steps=20, batch_size=4, max_staleness=3), newest=1)
    for number, (rows, rate, busy) in enumerate(((3, 30.0, 3), (3, 10.0, 1), (4, 10.0, 3), (3, 10.0, 3))):
        add_engine(state, number, rows, loaded={0}, row_tokens_per_s=rate)
        add_running(state, number, 0, *range(10 * number, 10 * number + busy), num_tokens=1 + 10 * number)
    state.costs.mean_response_tokens = 100.0
    repartition(state)
    assert evictions(state) == {1: (0, 1)}


def test_an_unmeasured_engine_counts_as_average() -> None:
    state = state_at(BOUNDS, newest=1)
    for number, rate in enumerate((0.0, 10.0, 10.0, 10.0)):
        add_engine(state, number, rows=4, loaded={0}, row_tokens_per_s=rate)
        add_running(state, number, 0, number, num_tokens=10 * number)
    state.costs.mean_response_tokens = 100.0
    repartition(state)
    assert evictions(state).keys() == {0, 1, 2}


@pytest.mark.parametrize(("interval", "is_flipped"), [(1, True), (2, False)])
def test_an_engine_skips_versions_between_weight_syncs(interval: int, is_flipped: bool) -> None:
    state = state_with_tail(weight_sync_interval=interval)
    repartition(state)
    assert bool(evictions(state)) == is_flipped


def test_engines_of_several_slots_evict_the_version_with_least_kv_and_may_exchange_requests() -> None:
    state = state_at(BOUNDS, newest=2)
    add_engine(state, 0, rows=4, slots=2, loaded={0, 1})
    add_running(state, 0, 0, 0, num_tokens=100)
    add_running(state, 0, 1, 1, num_tokens=20)
    add_engine(state, 1, rows=4, slots=2, loaded={0, 1})
    add_running(state, 1, 0, 2, num_tokens=100)
    add_running(state, 1, 1, 3, num_tokens=300)
    repartition(state)
    assert evictions(state) == {0: (1, 2), 1: (0, 2)}
    ends = {(action.source, action.destination, action.version) for action in migrate(state)}
    assert ends == {(0, 1, 1), (1, 0, 0)}


@pytest.mark.parametrize(
    "trigger",
    [
        events.EngineJoined(3, 4, 1),
        events.DrainRequested(2),
        events.EngineLost(2, "killed"),
        events.ProgressReported(2, (), kv_usage=0.95),
        events.Published(2, "v2"),
    ],
)
def test_these_events_trigger_a_rebalance(trigger: events.Event) -> None:
    state = state_with_tail()
    state.publishing_version, state.next_step = 2, 2
    run = FakeWorkers(BOUNDS, state=state)
    run.deliver(trigger)
    assert actions.Migrate(RequestId(0, 0, 0), 0, 1, 0, "flip") in run.actions(actions.Migrate)


@pytest.mark.parametrize(
    "event",
    [
        events.TimerFired(),
        events.ProgressReported(2, (), 20.0, kv_usage=0.5),
        events.ProgressReported(0, ((RequestId(0, 0, 0), 110),)),
    ],
)
def test_other_events_trigger_a_rebalance_only_after_the_interval(event: events.Event) -> None:
    run = FakeWorkers(BOUNDS, state=state_with_tail())
    run.now = 0.9
    run.deliver(event)
    assert run.actions(actions.Migrate) == []
    run.now = 1.0
    run.deliver(event)
    assert len(run.actions(actions.Migrate)) == 1


def test_a_needless_load_is_cancelled() -> None:
    """Engine 0 was to load version 0 for a request that runs on engine 1 meanwhile."""
    state = state_at(BOUNDS, newest=1)
    add_engine(state, 0, rows=2, loaded={1}, evicting=1, next_load=0)
    add_running(state, 0, 1, 3)
    add_engine(state, 1, rows=2, loaded={0})
    add_running(state, 1, 0, 0)
    assert weight_sync.load_versions(state) == []
    assert evictions(state) == {}


def test_rows_of_colocated_engines_do_not_allow_a_flip() -> None:
    state = state_with_tail()
    state.engines[1].is_colocated = True
    state.colocated[1] = None
    state.mark_dirty(state.engines[1])
    repartition(state)
    assert 0 not in evictions(state)


def test_a_full_engine_does_not_reduce_the_free_kv_of_others() -> None:
    state = state_at(BOUNDS, newest=2)
    for number, other in ((0, 1), (1, 2)):
        add_engine(state, number, rows=4, slots=2, loaded={0, other}, row_tokens_per_s=10.0)
    add_running(state, 0, 0, 0, num_tokens=100)
    add_running(state, 0, 1, 1, 2, 3, num_tokens=100)
    state.costs.mean_response_tokens = 2000.0
    state.engines[0].kv_usage, state.engines[1].kv_usage = 0.3, 0.5
    repartition(state)
    assert evictions(state) == {0: (0, 2)}
