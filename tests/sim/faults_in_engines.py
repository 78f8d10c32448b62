"""Deliberate faults in placement, migration, weight sync, draining and pausing, and the message of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.fault_tools import (
    Function,
    add_fault,
    after_handling,
    before_handling,
    instead_of_handling,
    replaces,
)

from dora.core import colocation, event_handlers, migration, placement, stragglers, weight_sync
from dora.core.actions import Abort, Action, DecodeOnly, ResumeEngine
from dora.core.events import DrainRequested, EngineLost, LoadFailed, Migrated, MigrationFailed
from dora.core.state import EngineRecord, GroupRecord, RequestRecord, State
from dora.core.types import RequestId

add_fault(
    "versions_are_dropped_under_running_requests",
    "under",
    (weight_sync, "_may_drop", lambda state, engine, version: True),
)
add_fault(
    "pinned_versions_are_retired", "is retired under", (State, "is_pinned", lambda self, version: False)
)
add_fault(
    "versions_that_no_engine_holds_are_not_loaded",
    "deadlock",
    (weight_sync, "_orphaned_versions", lambda state: []),
)
add_fault("the_trainer_does_not_wait_for_the_pause", "decodes during a step", (State, "is_device_free", True))
add_fault(
    "engines_decode_during_a_step",
    "during a step",
    (colocation, "_trainer_needs_device", lambda state: state.training_step is None and bool(state.batches)),
)
add_fault(
    "a_draining_engine_gets_new_requests",
    "while it drains",
    (EngineRecord, "is_active", property(lambda self: not (self.is_pausing or self.is_paused))),
)
add_fault(
    "an_engine_is_removed_with_its_requests", "is removed with its requests", (EngineRecord, "is_empty", True)
)
add_fault(
    "a_drained_engine_is_not_removed",
    "is not removed",
    (weight_sync, "remove_drained_engines", lambda state: []),
)


@replaces("is removed with its requests", weight_sync, "remove_drained_engines")
def a_drained_engine_is_removed_during_its_migrations(original: Function, state: State) -> Any:
    migrations, state.migrations = state.migrations, {}
    try:
        return original(state)
    finally:
        state.migrations = migrations


@replaces("slots", weight_sync, "_load_into_slot")
def slots_are_not_counted(original: Function, state: State, engine: EngineRecord, version: int) -> Any:
    slots, engine.num_slots = engine.num_slots, 1000
    try:
        return original(state, engine, version)
    finally:
        engine.num_slots = slots


@replaces("load it", weight_sync, "retire_versions")
def versions_are_retired_while_they_are_loaded(original: Function, state: State) -> Any:
    pending, state.pending_holders = state.pending_holders, {}
    actions = original(state)
    state.pending_holders = pending
    return actions


@instead_of_handling("deadlock", LoadFailed)
def a_failed_load_is_not_repeated(state: State, event: LoadFailed) -> list[Action]:
    return []


@before_handling("a request has no owner, or two", EngineLost)
def requests_of_a_lost_engine_are_lost(state: State, event: EngineLost) -> None:
    state.engines[event.engine].requests.clear()


@after_handling("is generated on version", EngineLost)
def requests_of_a_lost_engine_take_the_newest_version(
    state: State, event: EngineLost, actions: list[Action]
) -> None:
    newest = state.newest_published
    if newest is None:
        return
    for request in [r for waiting in state.waiting.values() for r in waiting]:
        state.dequeue(request, state.requests[request].version)
        state.num_unfinished.subtract([state.requests[request].version])
        state.num_unfinished.update([newest])
        state.enqueue(request, newest)
        state.requests[request].version = newest


@replaces("its owner is engine", placement, "_place_siblings")
def requests_are_placed_twice(
    original: Function, state: State, engine: EngineRecord, version: int
) -> list[RequestId]:
    placed: list[RequestId] = original(state, engine, version)
    if state.requests[placed[0]].num_tokens == 0:
        state.requests[placed[0]].num_tokens = 1
        state.enqueue(placed[0], version)
    return placed


@replaces("more than its rows", event_handlers, "_fail_group")
def aborts_free_their_rows_at_once(original: Function, state: State, group: GroupRecord, reason: str) -> Any:
    actions = original(state, group, reason)
    for engine in state.engines.values():
        for version in engine.aborting.values():
            engine.rows_by_version[version] -= 1
        engine.aborting.clear()
    return actions


@replaces("more than its rows", migration, "start_migration")
def no_row_is_reserved_for_a_migrating_request(
    original: Function,
    state: State,
    request: RequestId,
    source: EngineRecord,
    destination: EngineRecord,
    reason: str,
) -> Any:
    action = original(state, request, source, destination, reason)
    destination.num_rows += 1
    state.mark_dirty(destination)
    return action


@replaces("migrates to engine", migration, "start_migration")
def a_request_migrates_to_an_engine_without_its_version(
    original: Function,
    state: State,
    request: RequestId,
    source: EngineRecord,
    destination: EngineRecord,
    reason: str,
) -> Any:
    version = source.requests[request]
    lacking = [e for e in state.engines.values() if version not in e.loaded and e.free_rows > 0]
    return original(state, request, source, lacking[0] if lacking else destination, reason)


@replaces("is in two migrations at once", migration, "migrate")
def a_request_has_two_migrations_at_once(original: Function, state: State) -> Any:
    running, state.migrations = state.migrations, {}
    actions = original(state)
    state.migrations = running | state.migrations
    return actions


@before_handling("ProtocolError", Migrated)
def a_completed_migration_counts_as_failed(state: State, event: Migrated) -> MigrationFailed:
    return MigrationFailed(event.request, event.source, event.destination, "inverted")


@before_handling("ProtocolError", MigrationFailed)
def a_failed_migration_counts_as_completed(state: State, event: MigrationFailed) -> Migrated:
    return Migrated(event.request, event.source, event.destination, 1, 1, 1.0, 1.0)


@after_handling("are not aborted again", Migrated)
def a_request_that_migrated_during_its_abort_is_not_aborted_again(
    state: State, event: Migrated, actions: list[Action]
) -> list[Action]:
    return [action for action in actions if not isinstance(action, Abort)]


@replaces("is_static = true", migration, "migrate")
def requests_migrate_with_is_static(original: Function, state: State) -> Any:
    limits, state.limits = state.limits, replace(state.limits, is_static=False, breaks_c1=False)
    actions = original(state)
    state.limits = limits
    return actions


@replaces("under its requests", weight_sync, "_may_drop")
def a_version_is_dropped_under_an_incoming_request(
    original: Function, state: State, engine: EngineRecord, version: int
) -> Any:
    is_used = version in engine.requests.values() or version in engine.aborting.values()
    is_held_twice = len(state.holders.get(version, ())) > 1
    return original(state, engine, version) or (is_held_twice and not is_used)


@replaces("deadlock", stragglers, "decode_stragglers_only")
def decoding_of_stragglers_alone_never_ends(original: Function, state: State) -> list[Action]:
    return [action for action in original(state) if not isinstance(action, DecodeOnly) or action.requests]


@replaces("which it does not run", stragglers, "_stragglers_to_prioritize")
def decode_only_names_requests_of_other_engines(
    original: Function, state: State, engine: EngineRecord
) -> tuple[RequestId, ...]:
    step = state.next_step
    running = (r for r in state.requests.values() if r.engine is not None)
    return tuple(sorted(r.id for r in running if state.groups[r.id.group].deadline <= step))


@replaces("deadlock", colocation, "pause_or_resume")
def paused_engines_are_never_resumed(original: Function, state: State) -> list[Action]:
    return [action for action in original(state) if not isinstance(action, ResumeEngine)]


@instead_of_handling("the last engine", DrainRequested)
def the_last_engine_is_drained(state: State, event: DrainRequested) -> list[Action]:
    engine = state.engines[event.engine]
    engine.is_draining = True
    state.draining[engine.id] = None
    state.mark_dirty(engine)
    return []


@after_handling("its owner is engine", DrainRequested)
def a_drain_restarts_its_requests(state: State, event: DrainRequested, actions: list[Action]) -> None:
    engine = state.engines[event.engine]
    if engine.is_draining:
        for request in [r for r in engine.requests if r not in state.migrations]:
            version = state.release(request, engine)
            state.requests[request].engine = None
            state.enqueue(request, version)
        state.mark_dirty(engine)


@replaces("has free rows", placement, "place_waiting")
def requests_of_one_version_are_placed_per_event(original: Function, state: State) -> Any:
    waiting, state.waiting = state.waiting, dict(list(state.waiting.items())[:1])
    actions = original(state)
    state.waiting = state.waiting | {v: w for v, w in waiting.items() if w}
    return actions


@replaces("kept tokens, the audit", State, "count_kept")
def kept_tokens_of_a_second_loss_are_counted_again(
    original: Function, self: State, request: RequestRecord, num_kept: int
) -> None:
    request.num_kept = 0
    original(self, request, num_kept)
