"""Deliberate faults in placement, migration, weight sync, draining and pausing, and the message of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.fault_tools import (
    Fault,
    after_handling,
    before_handling,
    drop_actions,
    instead_of_handling,
)

from dora.core import colocation, event_handlers, migration, placement, stragglers, weight_sync
from dora.core.actions import Abort, Action, DecodeOnly, Migrate, ResumeEngine
from dora.core.events import (
    DrainRequested,
    EngineLost,
    Event,
    LoadFailed,
    Migrated,
    MigrationFailed,
)
from dora.core.state import EngineRecord, GroupRecord, RequestRecord, State
from dora.core.types import RequestId


def versions_are_dropped_under_running_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "_may_drop", lambda state, engine, version: True)


def slots_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def load_into_slot(state: State, engine: EngineRecord, version: int) -> list[Action]:
        slots, engine.num_slots = engine.num_slots, 1000
        try:
            return original(state, engine, version)
        finally:
            engine.num_slots = slots

    original = weight_sync._load_into_slot
    patch.setattr(weight_sync, "_load_into_slot", load_into_slot)


def pinned_versions_are_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "is_pinned", lambda self, version: False)


def versions_are_retired_while_they_are_loaded(patch: pytest.MonkeyPatch) -> None:
    original = weight_sync.retire_versions

    def retire_versions(state: State) -> list[Action]:
        pending, state.pending_holders = state.pending_holders, {}
        actions = original(state)
        state.pending_holders = pending
        return actions

    patch.setattr(weight_sync, "retire_versions", retire_versions)


def versions_that_no_engine_holds_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "_orphaned_versions", lambda state: [])


def a_failed_load_is_not_repeated(patch: pytest.MonkeyPatch) -> None:
    instead_of_handling(patch, LoadFailed, lambda state, event: [])


def requests_of_a_lost_engine_are_lost(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event) -> None:
        if isinstance(event, EngineLost):
            for request in list(state.engines[event.engine].requests):
                del state.engines[event.engine].requests[request]

    before_handling(patch, forget)


def requests_of_a_lost_engine_take_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    def change_version(state: State, event: Event, actions: list[Action]) -> list[Action]:
        newest = state.newest_published
        if isinstance(event, EngineLost) and newest is not None:
            for request in [r for waiting in state.waiting.values() for r in waiting]:
                state.dequeue(request, state.requests[request].version)
                state.num_unfinished.subtract([state.requests[request].version])
                state.num_unfinished.update([newest])
                state.enqueue(request, newest)
                state.requests[request].version = newest
        return actions

    after_handling(patch, change_version)


def requests_are_placed_twice(patch: pytest.MonkeyPatch) -> None:
    original = placement._place_siblings

    def place_siblings(state: State, engine: EngineRecord, version: int) -> list[RequestId]:
        placed = original(state, engine, version)
        if state.requests[placed[0]].num_tokens == 0:
            state.requests[placed[0]].num_tokens = 1
            state.enqueue(placed[0], version)
        return placed

    patch.setattr(placement, "_place_siblings", place_siblings)


def aborts_free_their_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    original = event_handlers._fail_group

    def fail_group(state: State, group: GroupRecord, reason: str) -> list[Action]:
        actions = original(state, group, reason)
        for engine in state.engines.values():
            for version in engine.aborting.values():
                engine.rows_by_version[version] -= 1
            engine.aborting.clear()
        return actions

    patch.setattr(event_handlers, "_fail_group", fail_group)


def no_row_is_reserved_for_a_migrating_request(patch: pytest.MonkeyPatch) -> None:
    original = migration.start_migration

    def start_migration(
        state: State, request: RequestId, source: EngineRecord, destination: EngineRecord, reason: str
    ) -> Migrate:
        action = original(state, request, source, destination, reason)
        destination.num_rows += 1
        state.mark_dirty(destination)
        return action

    patch.setattr(migration, "start_migration", start_migration)


def a_request_migrates_to_an_engine_without_its_version(patch: pytest.MonkeyPatch) -> None:
    original = migration.start_migration

    def start_migration(
        state: State, request: RequestId, source: EngineRecord, destination: EngineRecord, reason: str
    ) -> Migrate:
        version = source.requests[request]
        lacking = [e for e in state.engines.values() if version not in e.loaded and e.free_rows > 0]
        return original(state, request, source, lacking[0] if lacking else destination, reason)

    patch.setattr(migration, "start_migration", start_migration)


def a_request_has_two_migrations_at_once(patch: pytest.MonkeyPatch) -> None:
    original = migration.migrate

    def migrate(state: State) -> list[Action]:
        running, state.migrations = state.migrations, {}
        actions = original(state)
        state.migrations = running | state.migrations
        return [*actions]

    patch.setattr(migration, "migrate", migrate)


def a_completed_migration_counts_as_failed(patch: pytest.MonkeyPatch) -> None:
    def invert(state: State, event: Event) -> Event | None:
        if not isinstance(event, Migrated):
            return None
        return MigrationFailed(event.request, event.source, event.destination, "inverted")

    before_handling(patch, invert)


def a_failed_migration_counts_as_completed(patch: pytest.MonkeyPatch) -> None:
    def invert(state: State, event: Event) -> Event | None:
        if not isinstance(event, MigrationFailed):
            return None
        return Migrated(event.request, event.source, event.destination, 1, 1, 1.0, 1.0)

    before_handling(patch, invert)


def a_request_that_migrated_during_its_abort_is_not_aborted_again(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        return [o for o in actions if not (isinstance(event, Migrated) and isinstance(o, Abort))]

    after_handling(patch, forget)


def requests_migrate_with_is_static(patch: pytest.MonkeyPatch) -> None:
    original = migration.migrate

    def migrate(state: State) -> list[Action]:
        limits, state.limits = state.limits, replace(state.limits, is_static=False, breaks_c1=False)
        actions = original(state)
        state.limits = limits
        return [*actions]

    patch.setattr(migration, "migrate", migrate)


def a_version_is_dropped_under_an_incoming_request(patch: pytest.MonkeyPatch) -> None:
    def may_drop(state: State, engine: EngineRecord, version: int) -> bool:
        is_used = version in engine.requests.values() or version in engine.aborting.values()
        return not is_used and len(state.holders.get(version, ())) > 1

    original = weight_sync._may_drop
    patch.setattr(weight_sync, "_may_drop", lambda *arguments: original(*arguments) or may_drop(*arguments))


def decoding_of_stragglers_alone_never_ends(patch: pytest.MonkeyPatch) -> None:
    original = stragglers.decode_stragglers_only

    def decode_stragglers_only(state: State) -> list[Action]:
        return [action for action in original(state) if not isinstance(action, DecodeOnly) or action.requests]

    patch.setattr(stragglers, "decode_stragglers_only", decode_stragglers_only)


def decode_only_names_requests_of_other_engines(patch: pytest.MonkeyPatch) -> None:
    def stragglers_of_all_engines(state: State, engine: EngineRecord) -> tuple[RequestId, ...]:
        step = state.next_step
        running = (r for r in state.requests.values() if r.engine is not None)
        return tuple(sorted(r.id for r in running if state.groups[r.id.group].deadline <= step))

    patch.setattr(stragglers, "_stragglers_to_prioritize", stragglers_of_all_engines)


def the_trainer_does_not_wait_for_the_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "is_device_free", True)


def engines_decode_during_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        colocation, "_trainer_needs_device", lambda state: state.training_step is None and bool(state.batches)
    )


def paused_engines_are_never_resumed(patch: pytest.MonkeyPatch) -> None:
    drop_actions(patch, colocation, "pause_or_resume", ResumeEngine)


def a_draining_engine_gets_new_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineRecord, "is_active", property(lambda self: not (self.is_pausing or self.is_paused)))


def an_engine_is_removed_with_its_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineRecord, "is_empty", True)


def the_last_engine_is_drained(patch: pytest.MonkeyPatch) -> None:
    def accept(state: State, event: DrainRequested) -> list[Action]:
        engine = state.engines[event.engine]
        engine.is_draining = True
        state.draining[engine.id] = None
        state.mark_dirty(engine)
        return []

    instead_of_handling(patch, DrainRequested, accept)


def a_drain_restarts_its_requests(patch: pytest.MonkeyPatch) -> None:
    def restart(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, DrainRequested) and state.engines[event.engine].is_draining:
            engine = state.engines[event.engine]
            for request in [r for r in engine.requests if r not in state.migrations]:
                version = state.release(request, engine)
                state.requests[request].engine = None
                state.enqueue(request, version)
            state.mark_dirty(engine)
        return actions

    after_handling(patch, restart)


def a_drained_engine_is_not_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "remove_drained_engines", lambda state: [])


def requests_of_one_version_are_placed_per_event(patch: pytest.MonkeyPatch) -> None:
    original = placement.place_waiting

    def place_waiting(state: State) -> list[Action]:
        waiting, state.waiting = state.waiting, dict(list(state.waiting.items())[:1])
        actions = original(state)
        state.waiting = state.waiting | {v: w for v, w in waiting.items() if w}
        return actions

    patch.setattr(placement, "place_waiting", place_waiting)


def kept_tokens_of_a_second_loss_are_counted_again(patch: pytest.MonkeyPatch) -> None:
    def count_kept(self: State, request: RequestRecord, num_kept: int) -> None:
        request.num_kept = 0
        original(self, request, num_kept)

    original = State.count_kept
    patch.setattr(State, "count_kept", count_kept)


FAULTS: list[tuple[Fault, str]] = [
    (versions_are_dropped_under_running_requests, "under"),
    (slots_are_not_counted, "slots"),
    (pinned_versions_are_retired, "is retired under"),
    (versions_are_retired_while_they_are_loaded, "load it"),
    (versions_that_no_engine_holds_are_not_loaded, "deadlock"),
    (a_failed_load_is_not_repeated, "deadlock"),
    (requests_of_a_lost_engine_are_lost, "a request has no owner, or two"),
    (requests_of_a_lost_engine_take_the_newest_version, "is generated on version"),
    (requests_are_placed_twice, "its owner is engine"),
    (aborts_free_their_rows_at_once, "more than its rows"),
    (no_row_is_reserved_for_a_migrating_request, "more than its rows"),
    (a_request_migrates_to_an_engine_without_its_version, "migrates to engine"),
    (a_request_has_two_migrations_at_once, "is in two migrations at once"),
    (a_completed_migration_counts_as_failed, "ProtocolError"),
    (a_failed_migration_counts_as_completed, "ProtocolError"),
    (a_request_that_migrated_during_its_abort_is_not_aborted_again, "are not aborted again"),
    (requests_migrate_with_is_static, "is_static = true"),
    (a_version_is_dropped_under_an_incoming_request, "under its requests"),
    (decoding_of_stragglers_alone_never_ends, "deadlock"),
    (decode_only_names_requests_of_other_engines, "which it does not run"),
    (the_trainer_does_not_wait_for_the_pause, "decodes during a step"),
    (engines_decode_during_a_step, "during a step"),
    (paused_engines_are_never_resumed, "deadlock"),
    (kept_tokens_of_a_second_loss_are_counted_again, "kept tokens, the audit"),
    (a_draining_engine_gets_new_requests, "while it drains"),
    (an_engine_is_removed_with_its_requests, "is removed with its requests"),
    (the_last_engine_is_drained, "the last engine"),
    (a_drain_restarts_its_requests, "its owner is engine"),
    (a_drained_engine_is_not_removed, "is not removed"),
    (requests_of_one_version_are_placed_per_event, "has free rows"),
]
