"""Event handlers: how each event changes the state.

An event that contradicts the state raises ProtocolError. A handler returns only the actions that follow from
its event alone (score, fail, publish); the rules that `orchestrator` runs afterwards decide everything else.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dora.core import evaluation, events, recovery, weight_sync
from dora.core.actions import Abort, Action, Fail, Filter, RejectDrain, Score, SkipPrompts, Train
from dora.core.index import decrement
from dora.core.state import EngineRecord, GroupRecord, State
from dora.core.types import ProtocolError, RequestId, require


def handle(state: State, event: events.Event) -> list[Action]:
    """Apply one event; returns the actions that follow from it alone. Raises ProtocolError."""
    handler = HANDLERS.get(type(event))
    if handler is None:
        raise ProtocolError(f"{event!r} is not an event; expected one of {[c.__name__ for c in HANDLERS]}")
    return handler(state, event)


# Engines


def _on_engine_joined(state: State, event: events.EngineJoined) -> list[Action]:
    """A colocated engine starts paused."""
    require(event.engine not in state.engines, event, "an engine can join only once", event.engine)
    has_room = event.max_num_seqs > 0 and event.version_slots > 0
    require(has_room, event, "max_num_seqs and version_slots must be at least 1", event)
    require(event.replaces not in state.engines, event, "the replaced engine must be lost", event.replaces)
    engine = EngineRecord(
        event.engine,
        event.max_num_seqs,
        event.version_slots,
        state.limits.num_queued,
        event.is_colocated,
        is_paused=event.is_colocated,
    )
    state.add_engine(engine)
    state.is_rebalance_due = True
    return []


def _on_engine_lost(state: State, event: events.EngineLost) -> list[Action]:
    engine = _engine_of(state, event)
    migrating = [r for r, m in state.migrations.items() if event.engine in (m.source, m.destination)]
    require(not migrating, event, "the engine's migrations must have ended before", migrating)
    state.remove_engine(engine)
    state.restart_requests(engine, dict(event.kept_tokens))
    state.is_rebalance_due = True
    return _cancel_drains_if_all_drain(state)


def _on_drain_requested(state: State, event: events.DrainRequested) -> list[Action]:
    engine = _engine_of(state, event)
    if engine.is_draining:
        return []
    if all(e.is_draining for e in state.engines.values() if e is not engine):
        return [RejectDrain(engine.id, "it is the only engine that is not draining")]
    engine.is_draining = state.is_rebalance_due = True
    engine.next_load = engine.evicting = None
    state.draining[engine.id] = None
    state.mark_dirty(engine)
    return []


def _on_engine_removed(state: State, event: events.EngineRemoved) -> list[Action]:
    engine = _engine_of(state, event)
    require(engine.is_removing, event, "RemoveEngine must have been sent", engine)
    state.remove_engine(engine)
    state.is_rebalance_due = True
    return []


def _on_engine_paused(state: State, event: events.EnginePaused) -> list[Action]:
    engine = _engine_of(state, event)
    require(engine.is_pausing, event, "PauseEngine must have been sent", engine.is_paused)
    engine.is_pausing, engine.is_paused = False, True
    state.mark_dirty(engine)
    return []


def _on_progress_reported(state: State, event: events.ProgressReported) -> list[Action]:
    engine = _engine_of(state, event)
    for request, num_tokens in event.lengths:
        version = engine.requests.get(request)
        if version is not None:  # else aborted or migrated while the report was in flight
            record = state.requests[request]
            engine.kv_tokens[version] += num_tokens - record.num_tokens
            record.num_tokens = num_tokens
            record.num_kept = 0 if num_tokens else record.num_kept
    if event.row_tokens_per_s > 0:
        engine.row_tokens_per_s = event.row_tokens_per_s
        if engine.lag:
            state.slowest_rate = None
    is_newly_short = engine.kv_usage <= state.limits.kv_watermark < event.kv_usage
    state.is_rebalance_due |= is_newly_short and "pressure" not in state.limits.ablations
    engine.kv_usage = event.kv_usage
    return []


def _on_loaded(state: State, event: events.Loaded) -> list[Action]:
    engine = _engine_of(state, event)
    require(event.version == engine.loading, event, "the engine must be loading this version", engine.loading)
    stored = state.stored_versions.get(event.version)
    require(event.digest == stored, event, "the digest must be the published one (C1)", stored)
    engine.loading = None
    engine.loaded.add(event.version)
    state.costs.observe_load(state.now_s - engine.load_started_s)
    if state.draining or state.limits.balance_running:
        state.is_rebalance_due = True
    if state.limits.breaks_c1:
        weight_sync.update_running_requests(state, engine, event.version)
        state.load_candidates.update(dict.fromkeys(state.engines))  # others may have to follow
    state.mark_dirty(engine)
    return []


def _on_load_failed(state: State, event: events.LoadFailed) -> list[Action]:
    """The rules order the load again, on this engine or another."""
    engine = _engine_of(state, event)
    require(event.version == engine.loading, event, "the engine must be loading this version", engine.loading)
    engine.loading = None
    state.mark_dirty(engine)
    return []


# Migrations


def _on_migrated(state: State, event: events.Migrated) -> list[Action]:
    """The destination owns the request, also if its group has failed meanwhile: then it is aborted there."""
    request = event.request
    source, destination = _ends_of_migration(state, event)
    is_aborting = request in source.aborting
    is_unfinished = is_aborting or request in source.requests
    require(is_unfinished, event, "the request must be unfinished", source.requests.keys())
    version = _end_migration(state, request, destination)
    if is_aborting:
        del source.aborting[request]
        decrement(source.rows_by_version, version)
        destination.aborting[request] = version
        destination.rows_by_version[version] += 1
    else:
        state.release(request, source)
        record = state.requests[request]
        record.num_tokens, record.num_kept = event.num_tokens, 0
        state.assign(request, destination, version)
    if event.num_bytes or event.num_prefilled:  # else not measured: the destination was lost right afterwards
        state.costs.observe_migration(event.num_tokens, event.num_bytes, event.copy_s, event.stop_s)
    state.mark_dirty(source)
    state.mark_dirty(destination)
    return [Abort(destination.id, (request,))] if is_aborting else []


def _on_migration_failed(state: State, event: events.MigrationFailed) -> list[Action]:
    source, destination = _ends_of_migration(state, event)
    _end_migration(state, event.request, destination)
    if event.request in state.requests:
        state.requests[event.request].migration_failed_s = state.now_s
    state.mark_dirty(source)
    state.mark_dirty(destination)
    return []


# Prompts, requests and groups


def _on_outputs_lost(state: State, event: events.OutputsLost) -> list[Action]:
    """Change counts only: the requests are queued, or run from their first token."""
    for request in event.requests:
        if (record := state.requests.get(request)) is not None and record.num_kept:
            state.count_kept(record, 0)
    return []


def _on_prompts_fetched(state: State, event: events.PromptsFetched) -> list[Action]:
    is_next = event.first_index == state.next_index
    require(is_next, event, "prompts must arrive in the dataset's order, without a gap", state.next_index)
    is_requested = len(event.groups) <= state.num_fetching
    require(is_requested, event, "only requested prompts may arrive", state.num_fetching)
    fetched = {group for _, group in state.prompts}
    known = [g for g in event.groups if g in state.groups or g in fetched]
    is_new = not known and len(set(event.groups)) == len(event.groups)
    require(is_new, event, "a group id can be used only once", known)
    state.next_index += len(event.groups)
    state.num_fetching -= len(event.groups)
    skipped = []
    for index, group in enumerate(event.groups, event.first_index):
        if group.epoch <= state.skipped_until.get(group.row, -1):
            skipped.append(group)
        else:
            state.prompts.append((index, group))
    state.num_skipped += len(skipped)
    return [SkipPrompts(tuple(skipped))] if skipped else []


def _on_request_finished(state: State, event: events.RequestFinished) -> list[Action]:
    engine = _engine_of(state, event)
    if _free_aborting_row(state, engine, event.request):
        return []
    version = engine.requests.get(event.request)
    require(version is not None, event, "the engine must be running the request", engine.requests)
    require(event.version == version, event, "a request must finish on its own version (C1)", version)
    _check_chunks(state, event)
    if event.request.is_held_out:
        return _end_held_out_request(state, engine, event.request)
    group = _end_request(state, engine, event.request)
    group.finished_tokens += event.num_tokens
    group.longest_tokens = max(group.longest_tokens, event.num_tokens)
    state.costs.observe_response(event.num_tokens)
    return [] if group.unfinished else [Score(group.id)]


def _on_request_failed(state: State, event: events.RequestFailed) -> list[Action]:
    """The request starts again, or its group fails."""
    engine = _engine_of(state, event)
    if _free_aborting_row(state, engine, event.request):
        return []
    is_running = event.request in engine.requests
    require(is_running, event, "the engine must be running the request", engine.requests)
    if (record := state.requests[event.request]).num_kept:
        state.count_kept(record, 0)
    if event.request.is_held_out:
        return _end_held_out_request(state, engine, event.request, is_failed=True)
    if _may_retry(state, event):
        _release_rows(state, engine, event.request)
        record.num_retries += 1
        state.num_retries += 1
        state.restart_request(record)
        return []
    return _fail_group(state, _end_request(state, engine, event.request), event.reason)


def _may_retry(state: State, event: events.RequestFailed) -> bool:
    """Whether the request is generated again, with the same seed and on its version.

    What an engine rejects, it would reject again. A migration of the request must have ended before another
    engine may get it.
    """
    is_transient = event.cause == "environment" and event.request not in state.migrations
    return is_transient and state.requests[event.request].num_retries < state.limits.max_retries


def _on_requests_aborted(state: State, event: events.RequestsAborted) -> list[Action]:
    engine = _engine_of(state, event)
    is_expected = engine.aborting.keys() >= {*event.requests}
    require(is_expected, event, "Abort must have been sent for every request", engine.aborting)
    for request in event.requests:
        _free_aborting_row(state, engine, request)
    state.num_aborted_tokens += event.num_tokens
    return []


def _on_group_scored(state: State, event: events.GroupScored) -> list[Action]:
    if event.group.is_held_out:
        return _on_held_out_scored(state, event)
    group = _group_being_scored(state, event)
    require(
        len(event.rewards) == state.limits.group_size, event, "every sibling must have a reward", group.id
    )
    _update_curriculum(state, event)
    if state.limits.filter_groups and len(set(event.rewards)) == 1:
        _end_group(state, group)
        state.num_filtered += 1
        return [Filter(group.id, "zero_variance")]
    group.is_scored = True
    state.remove_unscored(group)
    bisect.insort(state.ready_groups, (group.deadline, group.index, group.id))
    return []


def _update_curriculum(state: State, event: events.GroupScored) -> None:
    """Skip the prompt of an easy or hard group in the epochs after that of the group."""
    rule, (epoch, row) = state.limits.curriculum, event.group
    if rule is not None and rule.skips_after(event.rewards, state.limits.pass_threshold):
        state.skipped_until[row] = max(epoch + rule.skip_epochs, state.skipped_until.get(row, 0))


def _on_scoring_failed(state: State, event: events.ScoringFailed) -> list[Action]:
    if event.group.is_held_out:
        return _on_held_out_scored(state, event)
    return _fail_group(state, _group_being_scored(state, event), event.reason)


def _on_held_out_scored(state: State, event: events.GroupScored | events.ScoringFailed) -> list[Action]:
    is_scoring = state.evaluation is not None and event.group in state.evaluation.scoring_prompts
    require(is_scoring, event, "the held-out prompt must be awaiting its score", state.evaluation)
    rule = state.limits.evaluation
    if isinstance(event, events.GroupScored) and rule is not None:
        is_complete = len(event.rewards) == rule.num_answers
        require(is_complete, event, "every response must have a reward", rule.num_answers)
    return evaluation.finish_scoring(state, event.group)


# Training


def _on_trained(state: State, event: events.Trained) -> list[Action]:
    is_training = event.step == state.training_step
    require(is_training, event, "the step must be in training", state.training_step)
    state.training_step = None
    if state.redo_batches.pop(event.step, None) is not None:
        return recovery.publish_or_report_digest(state, event.step + 1)
    groups = [state.groups.pop(group) for group in state.batches.pop(event.step)]
    oldest = event.step - min(group.version for group in groups)
    state.admissible_cache.clear()  # the effective staleness may change
    state.adaptive_staleness.update(state.limits, event.step, oldest, event.ess, event.kl)
    state.divergence.update(state.limits, event.step, event.kls)
    state.num_trained += state.limits.batch_size
    return recovery.publish_or_report_digest(state, event.step + 1)


def _on_step_failed(state: State, event: events.StepFailed) -> list[Action]:
    """Repeat the step with the same batch."""
    is_training = event.step == state.training_step
    require(is_training, event, "the step must be in training", state.training_step)
    return [Train(event.step, state.redo_batches.get(event.step) or state.batches[event.step])]


def _on_published(state: State, event: events.Published) -> list[Action]:
    is_due = event.version == state.publishing_version and not recovery.is_published(state, event.version)
    require(is_due, event, "the publication of this version must be due", state.publishing_version)
    state.newest_published, state.publishing_version = event.version, None
    state.stored_versions[event.version] = event.digest
    state.load_candidates.update(dict.fromkeys(state.engines))
    state.is_rebalance_due |= "update" not in state.limits.ablations
    return [*weight_sync.skip_similar_version(state), *evaluation.start_if_due(state)]


def _on_timer_fired(state: State, event: events.TimerFired) -> list[Action]:
    return []


# Parts of handlers


def _engine_of(state: State, event: Any) -> EngineRecord:
    engine = state.engines.get(event.engine)
    if engine is None:
        raise ProtocolError(
            f"{event}: the engine must have joined; the state has engines {sorted(state.engines)}"
        )
    return engine


def _cancel_drains_if_all_drain(state: State) -> list[Action]:
    """Keep the draining engines that are not yet being removed, if no other is left."""
    if any(not e.is_draining for e in state.engines.values()):
        return []
    actions: list[Action] = []
    for engine in state.engines.values():
        if not engine.is_removing:
            engine.is_draining = False
            del state.draining[engine.id]
            state.mark_dirty(engine)
            actions.append(RejectDrain(engine.id, "no other engine is left"))
    return actions


def _ends_of_migration(
    state: State, event: events.Migrated | events.MigrationFailed
) -> tuple[EngineRecord, EngineRecord]:
    """Source and destination."""
    migration = state.migrations.get(event.request)
    ends = None if migration is None else (migration.source, migration.destination)
    require(ends == (event.source, event.destination), event, "the migration must be in flight", migration)
    return state.engines[event.source], state.engines[event.destination]


def _end_migration(state: State, request: RequestId, destination: EngineRecord) -> int:
    """Free the row reserved at the destination; returns the request's version."""
    del state.migrations[request]
    version = destination.incoming.pop(request)
    decrement(destination.rows_by_version, version)
    return version


def _check_chunks(state: State, event: events.RequestFinished) -> None:
    """C1: one version. Policies that break C1: at least increasing versions, with published bytes."""
    if not state.limits.breaks_c1 or event.request.is_held_out:
        sources = {(c.version, c.digest) for c in event.chunks}
        published = {(event.version, state.stored_versions[event.version])}
        require(
            sources == published, event, "every chunk must come from the published weights (C1)", published
        )
        return
    admitted = state.groups[event.request.group].version
    versions = [c.version for c in event.chunks]
    is_increasing = all(a < b for a, b in pairwise([admitted - 1, *versions, event.version + 1]))
    require(is_increasing, event, "chunk versions must increase from the group's version on", admitted)
    wrong = [c for c in event.chunks if state.stored_versions.get(c.version, c.digest) != c.digest]
    require(not wrong, event, "every chunk must come from published weights", wrong)


def _free_aborting_row(state: State, engine: EngineRecord, request: RequestId) -> bool:
    """Free the row of a request whose abort was ordered, however it ended; returns whether there was one."""
    version = engine.aborting.pop(request, None)
    if version is None:
        return False
    decrement(engine.rows_by_version, version)
    state.mark_dirty(engine)
    return True


def _end_request(state: State, engine: EngineRecord, request: RequestId) -> GroupRecord:
    """Free the row of a finished or failed request; returns its group."""
    _release_rows(state, engine, request)
    return _remove_request(state, request)


def _release_rows(state: State, engine: EngineRecord, request: RequestId) -> None:
    if state.release(request, engine) in engine.rows_by_version:
        state.mark_rows_dirty(engine)
    else:
        state.mark_dirty(engine)


def _end_held_out_request(
    state: State, engine: EngineRecord, request: RequestId, *, is_failed: bool = False
) -> list[Action]:
    state.release(request, engine)
    state.mark_dirty(engine)
    return evaluation.finish_request(state, request, is_failed=is_failed)


def _remove_request(state: State, request: RequestId) -> GroupRecord:
    state.unpin(state.requests.pop(request).version)
    group = state.groups[request.group]
    group.unfinished.discard(request)
    return group


def _group_being_scored(state: State, event: events.GroupScored | events.ScoringFailed) -> GroupRecord:
    group = state.groups.get(event.group)
    if group is None or group.unfinished or group.is_scored:
        raise ProtocolError(f"{event}: the group must be awaiting its score; the state has {group}")
    return group


def _fail_group(state: State, group: GroupRecord, reason: str) -> list[Action]:
    """One failed sibling fails its group; abort the others, wherever they are."""
    aborts: dict[int, list[RequestId]] = {}
    for request_id in sorted(group.unfinished):
        engine_id = state.requests[request_id].engine
        if engine_id is None:
            state.dequeue(request_id, state.requests[request_id].version)
        else:
            engine = state.engines[engine_id]
            engine.aborting[request_id] = version = state.release(request_id, engine)
            engine.rows_by_version[version] += 1  # until the abort is confirmed
            state.mark_dirty(engine)
            aborts.setdefault(engine_id, []).append(request_id)
        _remove_request(state, request_id)
    _end_group(state, group)
    state.num_failed += 1
    actions: list[Action] = [Abort(engine_id, tuple(ids)) for engine_id, ids in sorted(aborts.items())]
    return [*actions, Fail(group.id, reason)]


def _end_group(state: State, group: GroupRecord) -> None:
    """The group ends untrained; its place in the bound is free again."""
    del state.groups[group.id]
    state.close_group(group)
    if group.version == state.admission_version:
        state.num_admitted_at_version -= 1  # another group may be admitted instead


HANDLERS: dict[type, Callable[[State, Any], list[Action]]] = {
    events.EngineJoined: _on_engine_joined,
    events.EngineLost: _on_engine_lost,
    events.DrainRequested: _on_drain_requested,
    events.EngineRemoved: _on_engine_removed,
    events.EnginePaused: _on_engine_paused,
    events.PromptsFetched: _on_prompts_fetched,
    events.ProgressReported: _on_progress_reported,
    events.RequestFinished: _on_request_finished,
    events.RequestFailed: _on_request_failed,
    events.RequestsAborted: _on_requests_aborted,
    events.Migrated: _on_migrated,
    events.OutputsLost: _on_outputs_lost,
    events.MigrationFailed: _on_migration_failed,
    events.GroupScored: _on_group_scored,
    events.ScoringFailed: _on_scoring_failed,
    events.Trained: _on_trained,
    events.StepFailed: _on_step_failed,
    events.Published: _on_published,
    events.TrainerLost: recovery.on_trainer_lost,
    events.TrainerReplaced: recovery.on_trainer_replaced,
    events.DigestReported: recovery.on_digest_reported,
    events.Loaded: _on_loaded,
    events.LoadFailed: _on_load_failed,
    events.Resumed: recovery.on_resumed,
    events.TimerFired: _on_timer_fired,
}
