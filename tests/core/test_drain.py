"""Draining: requests migrate, their version is loaded where needed, and nothing is generated again."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits
from tests.core.midrun import add_engine, add_prompts, add_running, request, state_at

from dora.core.actions import Generate, Load, Migrate, RejectDrain, RemoveEngine
from dora.core.events import (
    DrainRequested,
    EngineLost,
    EngineRemoved,
    Loaded,
    Migrated,
    MigrationFailed,
    PromptsFetched,
    RequestFailed,
    RequestsAborted,
    TimerFired,
)
from dora.core.state import State

BOUNDS = limits(num_steps=20, batch_size=8, max_staleness=2)


def two_engines(slots: int = 1, other: tuple[int, ...] = (0,), rows: int = 4) -> State:
    """Engine 0 decodes requests 1 and 2 of version 0; engine 1 holds `other` versions."""
    state = state_at(BOUNDS, newest=1)
    add_engine(state, 0, rows=4, loaded={0})
    add_engine(state, 1, rows=rows, slots=slots, loaded=other)
    add_running(state, 0, 0, 1, 2, num_tokens=50)
    return state


def test_requests_migrate_to_a_holder_of_their_version_and_the_engine_is_removed() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    assert run.actions(Migrate) == [Migrate(request(row), 0, 1, 0, "leave") for row in (1, 2)]
    run.deliver(Migrated(request(1), 0, 1, 50, 0, 0.0, 0.0))
    assert run.actions(RemoveEngine) == [], "one request is left"
    assert run.deliver(Migrated(request(2), 0, 1, 50, 0, 0.0, 0.0)) == [RemoveEngine(0)]
    run.deliver(EngineRemoved(0))
    assert run.state.engines.keys() == {1}
    assert run.dataset_rows(1) == [1, 2]


def test_a_version_without_another_holder_is_loaded_first() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines(slots=2, other=(1,)))
    assert run.deliver(DrainRequested(0))[:1] == [Load(1, 0)]
    assert run.actions(Migrate) == []
    actions = run.deliver(Loaded(1, 0, "v0"))
    assert [o for o in actions if isinstance(o, Migrate)] == [
        Migrate(request(row), 0, 1, 0, "leave") for row in (1, 2)
    ]


def test_if_no_engine_can_load_the_version_the_requests_finish_where_they_are() -> None:
    state = two_engines(other=(1,))
    add_running(state, 1, 1, 3, 4, 5, 6)
    run = FakeWorkers(BOUNDS, state=state)
    run.deliver(DrainRequested(0))
    run.now = 5.0
    run.deliver(TimerFired())
    assert not run.actions(Migrate)
    assert not run.actions(Load)
    run.finish_group(request(1).group)
    assert run.actions(RemoveEngine) == []
    run.finish_group(request(2).group)
    assert run.actions(RemoveEngine) == [RemoveEngine(0)]


def test_a_request_without_a_free_row_migrates_later() -> None:
    state = two_engines(rows=2)
    add_running(state, 1, 0, 3)
    run = FakeWorkers(BOUNDS, state=state)
    run.deliver(DrainRequested(0))
    assert [action.request for action in run.actions(Migrate)] == [request(1)]
    run.deliver(Migrated(request(1), 0, 1, 50, 0, 0.0, 0.0))
    run.finish_group(request(3).group)
    run.now = 1.0
    run.deliver(TimerFired())
    assert [action.request for action in run.actions(Migrate)] == [request(1), request(2)]


def test_a_draining_engine_gets_nothing_new() -> None:
    state = two_engines(other=(1,))
    add_prompts(state, 3, 8)
    run = FakeWorkers(BOUNDS, state=state)
    run.deliver(DrainRequested(0))
    run.deliver_all(unless=is_work)
    assert run.actions(Generate)
    assert all(action.engine == 1 for action in run.actions(Generate))
    assert all(action.engine == 1 for action in run.actions(Load))


def test_an_empty_engine_is_removed_at_once() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    assert RemoveEngine(1) in run.deliver(DrainRequested(1))


def test_an_engine_is_removed_only_after_its_load_has_ended() -> None:
    state = two_engines(other=())
    state.engines[1].loading = 1
    state.mark_dirty(state.engines[1])
    run = FakeWorkers(BOUNDS, state=state)
    run.checker.fleet.engines[1].loading = 1
    run.deliver(DrainRequested(1))
    assert run.actions(RemoveEngine) == []
    run.deliver(Loaded(1, 1, "v1"))
    assert run.actions(RemoveEngine) == [RemoveEngine(1)]


def test_an_engine_is_removed_only_after_incoming_requests_have_moved_on() -> None:
    """The engine was a destination when its drain was requested; the requests migrate again."""
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    run.join(2, rows=4, slots=2)
    run.deliver_all(unless=lambda event: not isinstance(event, Loaded))
    run.deliver(DrainRequested(1))
    assert run.actions(RemoveEngine) == []
    run.deliver_all(unless=lambda event: is_work(event) or isinstance(event, PromptsFetched))
    assert run.state.engines.keys() == {2}
    assert run.dataset_rows(2) == [1, 2]
    assert run.state.num_regenerated_tokens == 0


def test_an_engine_is_removed_only_after_its_aborts_are_confirmed() -> None:
    bounds = limits(num_steps=20, batch_size=8, max_staleness=2, group_size=2)
    state = state_at(bounds, newest=0)
    add_engine(state, 0, rows=4, loaded={0})
    add_engine(state, 1, rows=1, loaded={0})
    add_running(state, 0, 0, 1)
    run = FakeWorkers(bounds, state=state)
    run.deliver(RequestFailed(0, request(1, 0), "refused"))
    run.deliver(DrainRequested(0))
    assert run.actions(RemoveEngine) == []
    run.deliver(RequestsAborted(0, (request(1, 1),), 5))
    assert run.actions(RemoveEngine) == [RemoveEngine(0)]


def test_the_only_engine_is_not_drained() -> None:
    state = state_at(BOUNDS, newest=0)
    add_engine(state, 0, rows=4, loaded={0})
    run = FakeWorkers(BOUNDS, state=state)
    assert run.deliver(DrainRequested(0))[:1] == [
        RejectDrain(0, "it is the only engine that is not draining")
    ]
    assert not run.state.engines[0].is_draining


def test_the_last_engine_that_does_not_drain_is_not_drained() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    assert run.deliver(DrainRequested(1))[:1] == [
        RejectDrain(1, "it is the only engine that is not draining")
    ]


def test_a_repeated_drain_request_changes_nothing() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    assert run.deliver(DrainRequested(0)) == []


def test_a_drain_is_cancelled_when_all_other_engines_are_lost() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    assert run.deliver(EngineLost(1, "killed"))[:1] == [RejectDrain(0, "no other engine is left")]
    assert not run.state.engines[0].is_draining
    assert run.dataset_rows(0) == [1, 2], "no request was lost with the other engine"
    run.deliver_all()
    assert run.orchestrator.done


def test_an_engine_that_is_being_removed_does_not_return() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(1))
    assert run.actions(RemoveEngine) == [RemoveEngine(1)]
    run.deliver(EngineLost(0, "killed"))
    assert run.actions(RejectDrain) == []
    assert run.deliver(EngineRemoved(1)) == []
    assert list(run.state.waiting[0]) == [request(1), request(2)]


def test_a_failed_migration_is_retried_or_the_request_finishes_where_it_is() -> None:
    run = FakeWorkers(BOUNDS, state=two_engines())
    run.deliver(DrainRequested(0))
    run.pending = [event for event in run.pending if not isinstance(event, Migrated)]
    for row in (1, 2):
        run.deliver(MigrationFailed(request(row), 0, 1, "lease over"))
    run.now = 1.0
    run.deliver(TimerFired())
    assert [action.request.row for action in run.actions(Migrate)] == [1, 2, 1, 2]
    run.finish_group(request(1).group)
    run.deliver_all(unless=is_work)
    assert run.actions(RemoveEngine) == [RemoveEngine(0)]


@pytest.mark.parametrize("slots", [1, 2])
def test_draining_engines_one_by_one_regenerates_nothing(slots: int) -> None:
    run = FakeWorkers(limits(num_steps=8, batch_size=4, max_staleness=2))
    for number in range(4):
        run.join(number, rows=3, slots=slots)
    run.deliver_all(unless=is_work)
    for number in range(3):
        run.deliver(DrainRequested(number))
        run.deliver_all(unless=is_work)
        run.now += 1.0
        for event in [event for event in run.deliverable() if is_work(event)][:3]:
            run.deliver(event)
    run.deliver_all()
    assert run.orchestrator.done
    assert run.state.engines.keys() == {3}
    generated = [r for action in run.actions(Generate) for r in action.requests]
    assert len(generated) == len({*generated}) == 32
