"""Migrations in a simulated world keep their contract, whichever engine crashes and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.journal.recorded_runs import world_config

from dora.core.actions import Abort, Generate, Load, Migrate
from dora.core.events import EngineLost, Event, Migrated, MigrationFailed, RequestFinished, RequestsAborted
from dora.core.types import RequestId
from dora.sim.ground_truth import Violation
from dora.sim.random_config import FaultConfig
from dora.sim.world import World

LONG, QUEUED, LAST = (RequestId(0, row, 0) for row in range(3))
MIGRATE = Migrate(LONG, 0, 1, 0, "test")
NO_FAULTS = {
    "request_failure_rate": 0.0,
    "engine_loss_interval_s": None,
    "max_length": 64,
    "length_family": "constant",
}


def make_world(
    kv_copy_s: float, kv_stop_s: float, faults: FaultConfig | None = None, num_queued: int = 0
) -> World:
    """Two engines of one row that hold version 0; the first runs a request of 4 tokens, 40 ms."""
    config = world_config(
        **NO_FAULTS, engines=((1, 1), (1, 1)), seconds_per_token=(0.01, 0.01), report_interval_s=100.0
    )
    config = replace(config, limits=replace(config.limits, num_queued=num_queued))
    world = World(
        replace(config, kv_copy_s=kv_copy_s, kv_stop_s=kv_stop_s, faults=faults or FaultConfig()), seed=0
    )
    events_within(world, 1.0)
    for engine in (0, 1):
        world.execute(Load(engine, 0))
    events_within(world, 1.0)
    world.execute(Generate(0, 0, (LONG,)))
    return world


def events_within(world: World, seconds: float) -> list[Event]:
    """All events of so many seconds."""
    until = world.now + seconds
    events = []
    while (event := world.next_event(until)) is not None:
        events.append(event)
    return events


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_migrated_request_continues_at_its_destination_with_its_tokens() -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001)
    world.execute(MIGRATE)
    migrated, finished = events_within(world, 1.0)
    assert isinstance(migrated, Migrated)
    assert isinstance(finished, RequestFinished)
    assert 0 < migrated.num_tokens <= finished.num_tokens
    assert (migrated.source, migrated.destination, finished.engine) == (0, 1, 1)
    assert 2.04 < world.now <= 3.1


def test_a_request_that_finishes_first_is_reported_before_its_failed_migration() -> None:
    world = make_world(kv_copy_s=10.0, kv_stop_s=0.001)
    world.execute(MIGRATE)
    assert kinds(events_within(world, 1.0)) == ["RequestFinished", "MigrationFailed"]


def test_an_aborted_request_is_reported_before_its_failed_migration() -> None:
    world = make_world(kv_copy_s=10.0, kv_stop_s=0.001)
    world.execute(MIGRATE)
    world.execute(Abort(0, (LONG,)))
    aborted, failed = events_within(world, 1.0)
    assert isinstance(aborted, RequestsAborted)
    assert aborted.requests == (LONG,)
    assert failed == MigrationFailed(LONG, 0, 1, "the request was aborted")


def test_an_abort_after_a_migration_aborts_nothing() -> None:
    world = make_world(kv_copy_s=0.0, kv_stop_s=0.02)
    world.execute(MIGRATE)
    while world.truth.owner[LONG].id == 0:
        assert events_within(world, 0.0005) == []
    world.execute(Abort(0, (LONG,)))
    events = events_within(world, 1.0)
    assert [event.requests for event in events if isinstance(event, RequestsAborted)] == [()]
    assert kinds([event for event in events if not isinstance(event, RequestsAborted)]) == [
        "Migrated",
        "RequestFinished",
    ]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_that_crashes_during_the_copy_leaves_one_owner_or_none(lost: int) -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001)
    world.execute(MIGRATE)
    world.crash_engine(world.truth.engines[lost])
    events = events_within(world, 0.005)
    assert events == [
        MigrationFailed(LONG, 0, 1, f"engine {lost} is lost"),
        EngineLost(lost, "simulated loss"),
    ]
    assert (LONG in world.truth.owner) == (lost == 1)


def test_a_stopped_request_survives_its_source() -> None:
    world = make_world(
        kv_copy_s=0.0, kv_stop_s=0.02, faults=FaultConfig(loss_detection_s=1.0, engine_restart_rate=0.0)
    )
    world.execute(MIGRATE)
    assert events_within(world, 0.001) == []
    world.crash_engine(world.truth.engines[0])
    assert kinds(events_within(world, 5.0)) == ["Migrated", "RequestFinished", "EngineLost"]


def test_a_request_has_one_owner() -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001)
    with pytest.raises(Violation, match="has two owners: engine 0 and engine 1"):
        world.execute(Generate(1, 0, (LONG,)))


def test_a_destination_without_a_free_row_is_a_violation() -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001)
    world.execute(Generate(1, 0, (RequestId(0, 1, 0),)))
    with pytest.raises(Violation, match="more than its 1 rows"):
        world.execute(MIGRATE)


def finish_times_ms(world: World) -> dict[RequestId, int]:
    """How long after now each request finishes."""
    started_s, found = world.now, {}
    while (event := world.next_event(started_s + 1.0)) is not None:
        if isinstance(event, RequestFinished):
            found[event.request] = int(1e3 * (world.now - started_s) + 1e-6)
    return found


def test_queued_requests_start_in_order_when_the_row_is_free() -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001, num_queued=2)
    world.execute(Generate(0, 0, (QUEUED, LAST)))
    assert finish_times_ms(world) == {LONG: 40, QUEUED: 80, LAST: 120}


def test_a_queued_request_starts_when_the_running_one_has_left() -> None:
    world = make_world(kv_copy_s=0.0, kv_stop_s=0.002, num_queued=1)
    world.execute(Generate(0, 0, (QUEUED,)))
    world.execute(MIGRATE)
    assert finish_times_ms(world) == {LONG: 42, QUEUED: 42}


def test_a_queued_request_leaves_a_reserved_row_to_the_migration() -> None:
    world = make_world(kv_copy_s=0.0, kv_stop_s=0.002, num_queued=1)
    world.execute(MIGRATE)
    world.execute(Generate(1, 0, (QUEUED,)))
    assert finish_times_ms(world) == {LONG: 42, QUEUED: 82}


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_queued_request_gets_the_reserved_row_of_a_failed_migration(is_aborted: bool) -> None:
    world = make_world(kv_copy_s=0.02, kv_stop_s=0.001, num_queued=1)
    world.execute(MIGRATE)
    world.execute(Generate(1, 0, (QUEUED,)))
    if is_aborted:
        world.execute(Abort(0, (LONG,)))
    else:
        world.crash_engine(world.truth.engines[0])
    assert finish_times_ms(world).keys() == {QUEUED}
