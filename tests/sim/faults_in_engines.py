"""Deliberate faults in placement, migration, keeping, draining and pausing, and how each shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.breaking import Fault, after_hearing, before_hearing, instead_of_hearing, without

from dora.core import deadlines, hearing, migration, moving, placement, sharing, versions
from dora.core.actions import Abort, Action, Migrate, Resume, Rush
from dora.core.engines import Engine
from dora.core.events import (
    DrainAsked,
    EngineLost,
    Event,
    LoadFailed,
    Migrated,
    MigrationFailed,
)
from dora.core.group import Group
from dora.core.records import RequestId
from dora.core.state import State


def versions_are_dropped_under_running_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_may_drop", lambda state, engine, version: True)


def slots_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def load_into(state: State, engine: Engine, version: int) -> list[Action]:
        slots, engine.slots = engine.slots, 1000
        try:
            return right(state, engine, version)
        finally:
            engine.slots = slots

    right = versions._load_into
    patch.setattr(versions, "_load_into", load_into)


def pinned_versions_are_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "is_pinned", lambda self, version: False)


def versions_are_retired_while_they_are_loaded(patch: pytest.MonkeyPatch) -> None:
    right = versions.retire

    def retire(state: State) -> list[Action]:
        coming, state.coming = state.coming, {}
        orders = right(state)
        state.coming = coming
        return orders

    patch.setattr(versions, "retire", retire)


def orphans_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_orphans", lambda state: [])


def a_failed_load_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    instead_of_hearing(patch, LoadFailed, lambda state, event: [])


def requests_of_a_lost_engine_are_lost(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event) -> None:
        if isinstance(event, EngineLost):
            for request in list(state.engines[event.engine].requests):
                del state.engines[event.engine].requests[request]

    before_hearing(patch, forget)


def requests_of_a_lost_engine_take_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    def move(state: State, event: Event, orders: list[Action]) -> list[Action]:
        newest = state.newest
        if isinstance(event, EngineLost) and newest is not None:
            for request in [r for waiting in state.waiting.values() for r in waiting]:
                state.wait_no_more(request, state.requests[request].version)
                state.unfinished.subtract([state.requests[request].version])
                state.unfinished.update([newest])
                state.wait(request, newest)
                state.requests[request].version = newest
        return orders

    after_hearing(patch, move)


def requests_are_placed_twice(patch: pytest.MonkeyPatch) -> None:
    right = placement._fill

    def fill(state: State, engine: Engine, version: int) -> list[RequestId]:
        taken = right(state, engine, version)
        if state.requests[taken[0]].num_tokens == 0:
            state.requests[taken[0]].num_tokens = 1
            state.wait(taken[0], version)
        return taken

    patch.setattr(placement, "_fill", fill)


def aborts_free_their_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    right = hearing._fail

    def fail(state: State, group: Group, reason: str) -> list[Action]:
        orders = right(state, group, reason)
        for engine in state.engines.values():
            for version in engine.aborting.values():
                engine.running[version] -= 1
            engine.aborting.clear()
        return orders

    patch.setattr(hearing, "_fail", fail)


def no_row_is_kept_for_a_moving_request(patch: pytest.MonkeyPatch) -> None:
    right = moving.begin

    def move(state: State, request: RequestId, source: Engine, destination: Engine, reason: str) -> Migrate:
        order = right(state, request, source, destination, reason)
        destination.rows += 1
        state.touch(destination)
        return order

    patch.setattr(moving, "begin", move)


def a_request_moves_to_an_engine_without_its_version(patch: pytest.MonkeyPatch) -> None:
    right = moving.begin

    def move(state: State, request: RequestId, source: Engine, destination: Engine, reason: str) -> Migrate:
        version = source.requests[request]
        lacking = [e for e in state.engines.values() if version not in e.held and e.free_rows > 0]
        return right(state, request, source, lacking[0] if lacking else destination, reason)

    patch.setattr(moving, "begin", move)


def a_request_moves_twice_at_a_time(patch: pytest.MonkeyPatch) -> None:
    right = migration.migrate

    def migrate(state: State) -> list[Action]:
        moves, state.moves = state.moves, {}
        orders = right(state)
        state.moves = moves | state.moves
        return [*orders]

    patch.setattr(migration, "migrate", migrate)


def a_moved_request_stays_in_the_books_of_its_source(patch: pytest.MonkeyPatch) -> None:
    def mishear(state: State, event: Event) -> Event | None:
        if not isinstance(event, Migrated):
            return None
        return MigrationFailed(event.request, event.source, event.destination, "misheard")

    before_hearing(patch, mishear)


def a_failed_move_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    def mishear(state: State, event: Event) -> Event | None:
        if not isinstance(event, MigrationFailed):
            return None
        return Migrated(event.request, event.source, event.destination, 1, 1, 1.0, 1.0)

    before_hearing(patch, mishear)


def a_request_that_moved_too_late_decodes_on_for_nothing(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        return [o for o in orders if not (isinstance(event, Migrated) and isinstance(o, Abort))]

    after_hearing(patch, forget)


def a_static_world_moves_its_requests(patch: pytest.MonkeyPatch) -> None:
    right = migration.migrate

    def migrate(state: State) -> list[Action]:
        moving = replace(state.limits, is_static=False, breaks_c1=False)
        limits, state.limits = state.limits, moving
        orders = right(state)
        state.limits = limits
        return [*orders]

    patch.setattr(migration, "migrate", migrate)


def a_version_is_dropped_under_an_arriving_request(patch: pytest.MonkeyPatch) -> None:
    def may_drop(state: State, engine: Engine, version: int) -> bool:
        is_used = version in engine.requests.values() or version in engine.aborting.values()
        return not is_used and len(state.holders.get(version, ())) > 1

    right = versions._may_drop
    patch.setattr(versions, "_may_drop", lambda *arguments: right(*arguments) or may_drop(*arguments))


def a_rush_is_never_lifted(patch: pytest.MonkeyPatch) -> None:
    right = deadlines.rush

    def rush(state: State) -> list[Action]:
        return [order for order in right(state) if not isinstance(order, Rush) or order.requests]

    patch.setattr(deadlines, "rush", rush)


def a_rush_names_requests_of_other_engines(patch: pytest.MonkeyPatch) -> None:
    def urgent(state: State, engine: Engine) -> tuple[RequestId, ...]:
        late = state.next_step
        running = (r for r in state.requests.values() if r.engine is not None)
        return tuple(sorted(r.id for r in running if state.groups[r.id.group].deadline <= late))

    patch.setattr(deadlines, "_urgent", urgent)


def the_trainer_does_not_wait_for_the_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "is_device_free", True)


def engines_decode_on_while_the_trainer_trains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sharing, "_trainer_needs_device", lambda state: state.training is None and bool(state.batches)
    )


def paused_engines_are_never_resumed(patch: pytest.MonkeyPatch) -> None:
    without(patch, sharing, "share", Resume)


def an_engine_that_drains_gets_new_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "is_working", property(lambda self: not (self.is_pausing or self.is_paused)))


def an_engine_is_dismissed_with_its_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "is_empty", True)


def the_last_engine_is_drained(patch: pytest.MonkeyPatch) -> None:
    def agree(state: State, event: DrainAsked) -> list[Action]:
        engine = state.engines[event.engine]
        engine.is_leaving = True
        state.leaving[engine.id] = None
        state.touch(engine)
        return []

    instead_of_hearing(patch, DrainAsked, agree)


def a_drain_begins_its_requests_again(patch: pytest.MonkeyPatch) -> None:
    def throw_away(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, DrainAsked) and state.engines[event.engine].is_leaving:
            engine = state.engines[event.engine]
            for request in [r for r in engine.requests if r not in state.moves]:
                version = state.unseat(request, engine)
                state.requests[request].engine = None
                state.wait(request, version)
            state.touch(engine)
        return orders

    after_hearing(patch, throw_away)


def an_empty_engine_is_not_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "dismiss", lambda state: [])


def one_waiting_request_is_placed_per_fact(patch: pytest.MonkeyPatch) -> None:
    right = placement.place

    def place(state: State) -> list[Action]:
        waiting, state.waiting = state.waiting, dict(list(state.waiting.items())[:1])
        orders = right(state)
        state.waiting = state.waiting | {v: w for v, w in waiting.items() if w}
        return orders

    patch.setattr(placement, "place", place)


FAULTS: list[tuple[Fault, str]] = [
    (versions_are_dropped_under_running_requests, "under"),
    (slots_are_not_counted, "slots"),
    (pinned_versions_are_retired, "is retired under"),
    (versions_are_retired_while_they_are_loaded, "load it"),
    (orphans_are_not_loaded, "deadlock"),
    (a_failed_load_is_not_tried_again, "deadlock"),
    (requests_of_a_lost_engine_are_lost, "a request has no owner, or two"),
    (requests_of_a_lost_engine_take_the_newest_version, "changes its version"),
    (requests_are_placed_twice, "has two owners"),
    (aborts_free_their_rows_at_once, "more than its rows"),
    (no_row_is_kept_for_a_moving_request, "more than its rows"),
    (a_request_moves_to_an_engine_without_its_version, "moves to engine"),
    (a_request_moves_twice_at_a_time, "is in two moves"),
    (a_moved_request_stays_in_the_books_of_its_source, "ProtocolError"),
    (a_failed_move_counts_as_done, "ProtocolError"),
    (a_request_that_moved_too_late_decodes_on_for_nothing, "are not given up there"),
    (a_static_world_moves_its_requests, "is_static = true"),
    (a_version_is_dropped_under_an_arriving_request, "under its requests"),
    (a_rush_is_never_lifted, "deadlock"),
    (a_rush_names_requests_of_other_engines, "rushes requests it has not"),
    (the_trainer_does_not_wait_for_the_pause, "decodes during a step"),
    (engines_decode_on_while_the_trainer_trains, "during a step"),
    (paused_engines_are_never_resumed, "deadlock"),
    (an_engine_that_drains_gets_new_requests, "while it drains"),
    (an_engine_is_dismissed_with_its_requests, "is dismissed with its requests"),
    (the_last_engine_is_drained, "the last engine"),
    (a_drain_begins_its_requests_again, "has two owners"),
    (an_empty_engine_is_not_let_go, "is not dismissed"),
    (one_waiting_request_is_placed_per_fact, "has free rows"),
]
