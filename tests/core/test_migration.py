"""Migration: which running requests move where, because they must or because it pays off."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_running, add_waiting, request, state_at

from dora.core.actions import Generate, Migrate
from dora.core.events import Migrated, ProgressReported, TimerFired
from dora.core.migration import migrate
from dora.core.placement import repartition
from dora.core.state import State
from dora.core.types import GroupId


def new_state(newest: int = 0, **changes: Any) -> State:
    """A run whose responses have 100 tokens on average."""
    state = state_at(limits(**({"num_steps": 20, "batch_size": 16, "max_staleness": 2} | changes)), newest)
    state.costs.mean_response_tokens = 100.0
    return state


def state_with_draining_engine(**changes: Any) -> State:
    """Engine 0 drains; engine 1 has one free row for its version, engine 2 has three."""
    state = new_state(**changes)
    add_engine(state, 0, rows=4, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=2, loaded={0})
    add_engine(state, 2, rows=4, loaded={0})
    add_running(state, 1, 0, 1)
    add_running(state, 2, 0, 2)
    return state


def due_migrations(state: State) -> list[tuple[int, int, int, str]]:
    """(row, source, destination, reason) of the migrations that are due."""
    return [(m.request.row, m.source, m.destination, m.reason) for m in migrate(state)]


def test_a_queued_request_migrates_to_a_free_row() -> None:
    state = new_state(num_queued=2)
    add_engine(state, 0, rows=1, loaded={0}, num_queued=2)
    add_engine(state, 1, rows=1, loaded={0}, num_queued=2)
    add_running(state, 0, 0, 1, num_tokens=3)
    add_running(state, 0, 0, 2, 3)
    assert due_migrations(state) == [(2, 0, 1, "queue")]


def test_a_place_in_a_queue_is_no_row_for_a_running_request() -> None:
    state = new_state(num_queued=2)
    add_engine(state, 0, rows=2, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=1, loaded={0}, num_queued=2)
    add_running(state, 0, 0, 1, num_tokens=3)
    add_running(state, 1, 0, 2, num_tokens=3)
    assert due_migrations(state) == []


def finish_sibling(state: State, row: int, num_tokens: int) -> None:
    """The first sibling of the group has finished with `num_tokens`."""
    group = state.groups[GroupId(0, row)]
    group.finished_tokens = group.longest_tokens = num_tokens


def test_a_short_request_migrates_to_the_best_fit() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7, num_tokens=60)
    assert due_migrations(state) == [(7, 0, 1, "leave")]


def test_a_long_request_migrates_to_the_engine_with_most_free_rows() -> None:
    state = state_with_draining_engine(group_size=2)
    add_running(state, 0, 0, 7, num_tokens=60, siblings=[1])
    finish_sibling(state, 7, 1_000)
    assert due_migrations(state) == [(7, 0, 2, "leave")]


def test_long_requests_are_spread() -> None:
    state = new_state(group_size=2)
    add_engine(state, 0, rows=8, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=4, loaded={0})
    add_engine(state, 2, rows=4, loaded={0})
    for row in (5, 6, 7, 8):
        add_running(state, 0, 0, row, num_tokens=60, siblings=[1])
        finish_sibling(state, row, 1_000)
    assert sorted(destination for _, _, destination, _ in due_migrations(state)) == [1, 1, 2, 2]


def test_the_best_fit_follows_the_migrations_before() -> None:
    """The long request reserves a row on one of two equal engines, which then has fewer free rows."""
    state = new_state(group_size=2)
    add_engine(state, 0, rows=8, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=3, loaded={0})
    add_engine(state, 2, rows=3, loaded={0})
    for row, length in ((5, 1_000), (6, 100)):
        add_running(state, 0, 0, row, num_tokens=60, siblings=[1])
        finish_sibling(state, row, length)
    assert len({destination for _, _, destination, _ in due_migrations(state)}) == 1


def test_no_more_requests_migrate_than_rows_are_free() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 5, 6, 7, 8, num_tokens=9)
    add_waiting(state, 0, 9)
    assert due_migrations(state) == [
        (5, 0, 1, "leave"),
        (6, 0, 2, "leave"),
        (7, 0, 2, "leave"),
        (8, 0, 2, "leave"),
    ]
    assert state.engines[1].free_rows == state.engines[2].free_rows == 0


def test_an_engine_short_of_kv_receives_no_request() -> None:
    state = state_with_draining_engine(kv_watermark=0.8)
    add_running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].kv_usage = 0.8
    assert due_migrations(state) == [(7, 0, 2, "leave")]


def test_a_colocated_engine_receives_no_running_request() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].is_colocated = True
    assert due_migrations(state) == [(7, 0, 2, "leave")]


def test_an_engine_that_evicts_the_version_receives_no_running_request() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].evicting, state.engines[1].next_load = 0, 1
    assert (7, 0, 2, "leave") in due_migrations(state)


def test_a_request_is_never_in_two_migrations() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7, num_tokens=60)
    assert len(due_migrations(state)) == 1
    assert due_migrations(state) == []


def test_a_static_run_migrates_nothing() -> None:
    state = state_with_draining_engine(is_static=True)
    add_running(state, 0, 0, 7)
    assert due_migrations(state) == []


def test_an_engine_short_of_kv_loses_its_largest_request_one_at_a_time() -> None:
    state = new_state()
    add_engine(state, 0, rows=4, loaded={0})
    add_engine(state, 1, rows=4, loaded={0})
    for row, num_tokens in ((5, 60), (6, 90), (7, 30)):
        add_running(state, 0, 0, row, num_tokens=num_tokens)
    run = FakeWorkers(state.limits, state=state)
    assert Migrate(request(6), 0, 1, 0, "kv") in run.deliver(ProgressReported(0, (), 10.0, kv_usage=0.91))
    assert run.deliver(ProgressReported(0, (), 10.0, kv_usage=0.93)) == [], (
        "the next one only after the interval"
    )
    run.now = 1.0
    assert run.deliver(TimerFired()) == [Migrate(request(5), 0, 1, 0, "kv")]
    run.now = 2.0
    assert run.deliver(ProgressReported(0, (), 10.0, kv_usage=0.89)) == []


def state_with_tail(stop_s: float, **changes: Any) -> State:
    """Engine 0 decodes one request of version 0 beside five of version 1; engine 1 decodes three of 0."""
    state = new_state(newest=1, **changes)
    add_engine(state, 0, rows=8, slots=2, loaded={0, 1}, row_tokens_per_s=10.0)
    add_engine(state, 1, rows=4, slots=2, loaded={0, 1}, row_tokens_per_s=10.0)
    add_running(state, 0, 0, 0, num_tokens=50)
    add_running(state, 0, 1, 5, 6, 7, 8, 9)
    add_running(state, 1, 0, 1, 2, 3, num_tokens=50)
    state.costs.migrated_bytes, state.costs.migrated_tokens = 1000, 1
    state.costs.copy_bytes_per_s, state.costs.stop_s = 1e6, stop_s
    return state


@pytest.mark.parametrize(("stop_s", "is_worth_it"), [(2.9, True), (3.0, False)])
def test_a_tail_is_gathered_if_that_gains_more_than_it_costs(stop_s: float, is_worth_it: bool) -> None:
    """Gain: five rows are 12 % faster for 50 more tokens each: 30 tokens.

    Cost: one row at 10 tokens/s, while 50 tokens of 1 kB move at 1 MB/s (0.05 s) and for the pause.
    """
    state = state_with_tail(stop_s)
    repartition(state)
    assert due_migrations(state) == ([(0, 0, 1, "gather")] if is_worth_it else [])


def test_a_tail_stays_if_no_engine_has_rows_for_all_of_it() -> None:
    state = state_with_tail(0.0)
    add_running(state, 0, 0, 10, num_tokens=50)
    assert due_migrations(state) == []


def test_a_tail_stays_on_an_engine_that_decodes_nothing_else() -> None:
    state = new_state(newest=1)
    for number in (0, 1):
        add_engine(state, number, rows=4, slots=2, loaded={0, 1})
    add_running(state, 0, 0, 0)
    add_running(state, 1, 0, 1, 2)
    assert due_migrations(state) == []


def test_the_newest_version_is_not_gathered() -> None:
    """All engines are filled with it."""
    state = new_state(newest=1)
    add_engine(state, 0, rows=8, slots=2, loaded={0, 1})
    add_engine(state, 1, rows=8, slots=2, loaded={0, 1})
    add_running(state, 0, 1, 5)
    add_running(state, 0, 0, 1, 2, 3)
    add_running(state, 1, 1, 6, 7, 8)
    assert due_migrations(state) == []


@pytest.mark.parametrize("balance_running", [True, False])
def test_balance_running_migrates_the_cheapest_requests_first(balance_running: bool) -> None:
    state = new_state(balance_running=balance_running)
    add_engine(state, 0, rows=6, loaded={0})
    add_engine(state, 1, rows=6, loaded={0})
    for row, num_tokens in ((1, 90), (2, 20), (3, 50), (4, 30), (5, 70)):
        add_running(state, 0, 0, row, num_tokens=num_tokens)
    add_running(state, 1, 0, 9)
    expected = [(2, 0, 1, "level"), (4, 0, 1, "level")]
    assert due_migrations(state) == (expected if balance_running else [])


def test_a_difference_of_one_is_balanced() -> None:
    state = new_state(balance_running=True)
    add_engine(state, 0, rows=6, loaded={0})
    add_engine(state, 1, rows=6, loaded={0})
    add_running(state, 0, 0, 1, 2)
    add_running(state, 1, 0, 3)
    assert due_migrations(state) == []


def test_a_migrated_request_keeps_its_tokens_and_its_version() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7, num_tokens=60)
    run = FakeWorkers(state.limits, state=state)
    run.now = 1.0
    run.deliver(TimerFired())
    run.deliver(ProgressReported(0, ((request(7), 70),)))
    run.deliver(Migrated(request(7), 0, 1, 75, 75_000, 0.1, 0.02))
    migrated = run.state.requests[request(7)]
    assert (migrated.engine, migrated.version, migrated.num_tokens) == (1, 0, 75)
    assert run.state.engines[1].kv_tokens[0] == 75
    assert run.state.engines[0].kv_tokens[0] == 0
    assert run.state.num_regenerated_tokens == 0
    assert run.actions(Generate) == []
    assert run.state.costs.kv_bytes_per_token == 1_000


def test_a_row_is_reserved_at_both_ends_until_the_migration_ends() -> None:
    state = state_with_draining_engine()
    add_running(state, 0, 0, 7)
    run = FakeWorkers(state.limits, state=state)
    run.now = 1.0
    run.deliver(TimerFired())
    assert (state.engines[0].free_rows, state.engines[1].free_rows) == (3, 0)
    run.deliver(Migrated(request(7), 0, 1, 0, 0, 0.0, 0.0))
    assert (state.engines[0].free_rows, state.engines[1].free_rows) == (4, 0)


def test_requests_in_flight_are_not_balanced_again() -> None:
    state = new_state(balance_running=True)
    add_engine(state, 0, rows=6, loaded={0})
    add_engine(state, 1, rows=6, loaded={0})
    add_running(state, 0, 0, 1, 2, 3, 4, 5, 6)
    assert len(due_migrations(state)) == 3
    assert due_migrations(state) == []


@pytest.mark.parametrize("is_other_colocated", [True, False])
def test_a_colocated_engine_receives_requests_only_if_all_are_colocated(is_other_colocated: bool) -> None:
    state = new_state()
    add_engine(state, 0, rows=4, loaded={0}, is_colocated=is_other_colocated, is_draining=True)
    add_engine(state, 1, rows=4, loaded={0}, is_colocated=True)
    add_running(state, 0, 0, 7)
    assert due_migrations(state) == ([(7, 0, 1, "leave")] if is_other_colocated else [])
