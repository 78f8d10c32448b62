"""Weight sync: which engine holds which version, and how long the weight store keeps one.

An engine never drops a version that it decodes, nor the last copy of a pinned one. The store keeps every
pinned version and the newest, so that the loss of an engine costs a load and no version. Unless the staleness
bound requires the newest version, an engine may load only every n-th one (`weight_sync_interval`), skip one
that hardly differs from its own (`skip_below_kl`), or wait for a free row and its turn (`defers_loads`).
"""

from __future__ import annotations

from dora.core import stragglers
from dora.core.actions import Action, Drop, Load, RemoveEngine, Retire, SkipLoad
from dora.core.bound import cached_num_admissible, deadline_at, sort_by_deadline
from dora.core.index import decrement
from dora.core.state import EngineRecord, State
from dora.core.types import RequestId

ENGINES_PER_LOAD = 4  # with deferred loads, a quarter of the engines may load at a time


def skip_similar_version(state: State) -> list[Action]:
    """Let engines skip the version just published if theirs is within `skip_below_kl` and still admissible.

    The decision is made once per version. An engine still loads a skipped version if the bound requires it,
    or if the store retires the version that the engine holds.
    """
    newest, limits = state.newest_published, state.limits
    if limits.skip_below_kl is None or limits.batches_per_version is not None or newest is None:
        return []
    engines = [e for e in state.engines.values() if e.next_load is None and not e.is_draining]
    versions = {e.newest_version for e in engines}
    similar = {v for v in versions if v >= 0 and _can_replace(state, v, newest)}
    actions: list[Action] = []
    for engine in [e for e in engines if e.newest_version in similar]:
        engine.skipped_version = newest
        actions.append(SkipLoad(engine.id, newest))
    return actions


def newest_loaded(state: State) -> int | None:
    """The newest version that an engine holds and the store keeps."""
    return max(state.holders.keys() & state.stored_versions.keys(), default=None)


def update_running_requests(state: State, engine: EngineRecord, version: int) -> None:
    """Inflight update, if the policy breaks C1: what the engine runs continues on the version just loaded.

    Such a response has segments of several versions; its staleness is that of the first. Its group keeps
    version and deadline, so the bound needs no extra rule. Held-out requests keep their version. The caller
    marks the engine dirty.
    """
    for request, old in engine.requests.items():
        if old < version and not request.is_held_out:
            num_tokens = state.requests[request].num_tokens
            decrement(engine.rows_by_version, old)
            engine.kv_tokens[old] -= num_tokens
            engine.rows_by_version[version] += 1
            engine.kv_tokens[version] += num_tokens
            engine.requests[request] = version
            _change_version(state, request, version)


def update_waiting_requests(state: State) -> None:
    """Inflight update, if the policy breaks C1: waiting requests change to the newest loaded version."""
    newest = newest_loaded(state) if state.limits.breaks_c1 and state.waiting else None
    if newest is None:
        return
    for version in sorted((v for v in state.waiting if v < newest), reverse=True):
        for request in [r for r in reversed(state.waiting[version]) if not r.is_held_out]:
            state.dequeue(request, version)
            _change_version(state, request, newest)
            state.enqueue_first(request, newest)


def update_demand(state: State) -> None:
    """Decide whether the newest version is needed: nothing can, or should, be admitted at the loaded ones."""
    loaded = newest_loaded(state)
    was_needed = state.is_newest_needed
    is_expiring = loaded is not None and deadline_at(state, loaded) <= state.next_step
    state.is_newest_needed = loaded is None or is_expiring or cached_num_admissible(state, loaded) == 0
    if not state.is_newest_needed:
        return
    if not was_needed and not state.limits.loads_eagerly:
        state.load_candidates.update(dict.fromkeys(state.engines))
    newest = state.newest_published
    demand = (-1 if loaded is None else loaded, -1 if newest is None else newest)
    if demand != state.rebalanced_for:
        state.rebalanced_for, state.is_rebalance_due = demand, True


def load_versions(state: State, is_rebalance: bool = True) -> list[Action]:
    """Load pinned versions that no engine holds, nearest deadline first; then the newest, where it is due.

    Whether an engine without a free slot can make room for the newest is examined only in a rebalance.
    """
    _cancel_needless_loads(state)
    for version in _orphaned_versions(state):
        if not state.is_evaluation_only(version):
            _assign_load(state, version, may_wait=True)
    for version in _draining_versions(state):
        _assign_load(state, version, may_wait=False)
    for version in stragglers.versions_without_fast_engine(state):
        _assign_load(state, version, may_wait=False, max_lag=0)
    may_wait = state.is_newest_needed or state.limits.is_static
    newest = state.newest_published
    if newest is not None and (is_rebalance or may_wait) and _needs_holder(state, newest):
        _assign_load(state, newest, may_wait=may_wait)
    return _start_loads(state)


def load_for_evaluation(state: State, is_rebalance: bool) -> list[Action]:
    """Find an engine for held-out requests whose version none holds: with a free slot, or any once overdue.

    The newest version comes first: nothing is loaded while it is about to be used.
    """
    missing = [v for v in _orphaned_versions(state) if state.is_evaluation_only(v)]
    if not missing or _is_newest_about_to_be_used(state):
        return []
    has_unused = any(_is_unused(state.engines[engine]) for engine in state.dirty_engines)
    if not (is_rebalance or has_unused or state.is_training_done):
        return []
    for version in missing:
        _assign_load(state, version, may_wait=_is_evaluation_overdue(state, version))
    return _start_loads(state)


def retire_versions(state: State) -> list[Action]:
    """Delete stored versions that are neither pinned, nor loading, nor open to admission."""
    unused = [v for v in state.stored_versions if v not in state.pending_holders and not state.is_pinned(v)]
    if not unused or unused == [state.newest_published]:
        return []  # as after nearly every event
    newest_held = max(state.holders, default=None)
    evaluated = state.evaluation.version if state.evaluation else None
    actions: list[Action] = []
    for version in sorted({*unused} - {state.newest_published, newest_held, evaluated}):
        del state.stored_versions[version]
        state.load_candidates.update(state.holders.get(version, {}))  # nothing can start on it any more
        actions.append(Retire(version))
    return actions


def remove_drained_engines(state: State) -> list[Action]:
    """Remove draining engines without requests, migrations and loads."""
    actions: list[Action] = []
    for engine in [state.engines[e] for e in sorted(state.draining)]:
        is_source = any(migration.source == engine.id for migration in state.migrations.values())
        if engine.is_empty and not is_source and engine.loading is None and not engine.is_removing:
            engine.is_removing = True
            actions.append(RemoveEngine(engine.id))
    return actions


def _can_replace(state: State, version: int, newest: int) -> bool:
    """Whether the bound still admits groups at `version`, and its policy hardly differs from the newest."""
    is_current = version in state.stored_versions and deadline_at(state, version) > state.next_step
    if not is_current or cached_num_admissible(state, version) == 0 or state.is_training_done:
        return False
    return state.divergence.is_below_threshold(state.limits, newest - version)


def _change_version(state: State, request: RequestId, version: int) -> None:
    record = state.requests[request]
    old, record.version = record.version, version
    state.pin(version, 1)
    state.unpin(old)


def _cancel_needless_loads(state: State) -> None:
    """Cancel assigned loads of versions that no request waits for any more."""
    for engine in [state.engines[e] for e in state.load_candidates]:
        version = engine.next_load
        if version is None or version == state.newest_published or version in state.waiting:
            continue
        if version in state.holders or not state.is_pinned(version):
            engine.next_load = engine.evicting = None
            state.mark_dirty(engine)


def _orphaned_versions(state: State) -> list[int]:
    """Versions with waiting requests that no engine holds or is about to load."""
    if not state.waiting:
        return []  # as after nearly every event
    missing = (v for v in state.waiting if v not in state.holders and v not in state.pending_holders)
    return sort_by_deadline(
        state, (v for v in missing if v in state.stored_versions)
    )  # others are redone first


def _draining_versions(state: State) -> list[int]:
    """Versions of requests that could migrate off draining engines if another engine held them."""
    if state.limits.is_static or not state.draining:
        return []
    found = {v for e in state.draining for v in state.engines[e].requests.values()}
    missing = (v for v in found if v not in state.holders and v not in state.pending_holders)
    return sort_by_deadline(state, missing)


def _needs_holder(state: State, newest: int) -> bool:
    """Whether some engine must make room for the newest version."""
    if newest in state.holders or newest in state.pending_holders or state.is_training_done:
        return False
    return state.limits.loads_eagerly or state.is_newest_needed


def _is_evaluation_overdue(state: State, version: int) -> bool:
    """Whether an engine must make room for an evaluation: the next one is already due."""
    rule = state.limits.evaluation
    newest = state.newest_published or 0
    is_next_due = rule is not None and rule.every > 0 and newest >= version + rule.every
    return state.is_training_done or is_next_due


def _is_unused(engine: EngineRecord) -> bool:
    """Whether an engine decodes nothing, nor is about to."""
    is_idle = engine.is_empty and engine.loading is None and engine.next_load is None
    return is_idle and not engine.is_draining


def _is_newest_about_to_be_used(state: State) -> bool:
    """Whether the first engine is loading the newest, or groups are about to be admitted at it."""
    newest = state.newest_published
    if newest is None or state.is_training_done:
        return False
    is_coming = newest in state.pending_holders and newest not in state.holders
    return is_coming or (state.admission_rows[newest] > 0 and cached_num_admissible(state, newest) > 0)


def _assign_load(state: State, version: int, *, may_wait: bool, max_lag: int | None = None) -> None:
    """Choose an engine with at most `max_lag` to load `version`.

    Best is one with a slot that is free or can be freed at once; then one whose requests can migrate; then,
    if the load `may_wait` for requests to finish, the one with fewest requests.
    """
    idle = [
        e for e in state.engines.values() if e.loading is None and e.next_load is None and not e.is_draining
    ]
    engines = idle if max_lag is None else [e for e in idle if e.lag <= max_lag]
    with_slot = [e for e in engines if len(e.loaded) < e.num_slots or _version_to_drop(state, e) is not None]
    if with_slot:
        engine = min(with_slot, key=lambda e: (e.is_colocated, e.lag, -e.free_rows, e.id))
    else:
        movable = [] if state.limits.is_static else [e for e in engines if _can_move_away(state, e)]
        choice = movable or (engines if may_wait else [])
        if not choice:
            return
        engine = min(choice, key=lambda e: (e.is_colocated, e.lag, len(e.requests), e.id))
        engine.evicting = _version_with_fewest_rows(engine)
        state.is_rebalance_due = True
    engine.next_load = version
    state.mark_dirty(engine)


def _version_with_fewest_rows(engine: EngineRecord) -> int:
    return min(engine.loaded, key=lambda v: (engine.rows_by_version[v], v))


def _can_move_away(state: State, engine: EngineRecord) -> bool:
    """Whether other engines have rows for all requests of the version with fewest rows."""
    version = _version_with_fewest_rows(engine)
    num_rows = 0
    for other in state.available_engines.get(version, ()):
        if other != engine.id and state.can_receive(state.engines[other], version):
            num_rows += state.engines[other].free_rows
            if num_rows >= engine.rows_by_version[version]:
                return not engine.incoming
    return False


def _start_loads(state: State) -> list[Action]:
    """Start loads on engines whose turn has come, and on those that have changed."""
    actions: list[Action] = []
    candidates = sorted(state.load_candidates)
    state.load_candidates.clear()
    while state.load_queue and _may_start_load(state):
        first = next(iter(state.load_queue))
        del state.load_queue[first]
        actions += _start_load(state, state.engines[first])
    for engine in [state.engines[e] for e in candidates]:
        actions += _start_load(state, engine)
    return actions


def _may_start_load(state: State) -> bool:
    """Whether one more engine may load the newest version."""
    if not state.limits.defers_loads:
        return True
    return len(state.loading_engines) < max(1, len(state.engines) // ENGINES_PER_LOAD)


def _start_load(state: State, engine: EngineRecord) -> list[Action]:
    """Load what is due. The newest waits for the engine's turn; a version that requests wait for does not."""
    if engine.loading is not None or engine.is_draining:
        return []
    version = _version_to_load(state, engine) if engine.next_load is None else engine.next_load
    if version is None:
        return []
    if version == state.newest_published and not _may_start_load(state):
        state.load_queue[engine.id] = None
        return []
    return _load_into_slot(state, engine, version)


def _version_to_load(state: State, engine: EngineRecord) -> int | None:
    """The version that an engine without an assigned load should load next; None: none."""
    newest, limits = state.newest_published, state.limits
    if newest is None or newest in engine.loaded:
        return None
    is_evaluated = state.evaluation is not None and state.evaluation.version == newest
    if state.is_training_done or (state.is_only_evaluating and is_evaluated):
        return newest if is_evaluated else None
    if state.is_newest_needed:
        return newest
    if limits.batches_per_version is not None:
        return _live_version_to_load(state, engine)
    if not engine.loaded:
        return newest
    started_on = newest_loaded(state) if limits.breaks_c1 else None
    if started_on is not None and engine.newest_version < started_on and engine.free_places > 0:
        return started_on  # no request starts on an older version
    is_useful = not limits.defers_loads or engine.free_places > 0
    is_skipped = engine.skipped_version == newest and engine.newest_version in state.stored_versions
    is_due = newest - engine.newest_version >= limits.weight_sync_interval
    return newest if is_useful and not is_skipped and is_due else None


def _live_version_to_load(state: State, engine: EngineRecord) -> int | None:
    """With one live version at a time: that version, while it is not yet the newest."""
    live = state.admission_version
    if live is None or live in engine.loaded or live not in state.stored_versions:
        return None
    is_used = state.is_pinned(live) and not state.is_evaluation_only(live)
    return live if is_used or live == max(state.holders, default=None) else None


def _load_into_slot(state: State, engine: EngineRecord, version: int) -> list[Action]:
    """Load if a slot is free or can be freed now; nothing otherwise."""
    actions: list[Action] = []
    if len(engine.loaded) >= engine.num_slots:
        dropped = _version_to_drop(state, engine)
        if dropped is None:
            return []
        engine.loaded.discard(dropped)
        actions.append(Drop(engine.id, dropped))
    engine.loading, engine.load_started_s = version, state.now_s
    engine.next_load = engine.evicting = None
    state.mark_dirty(engine)
    return [*actions, Load(engine.id, version)]


def _version_to_drop(state: State, engine: EngineRecord) -> int | None:
    """The version that an engine can drop: the one it evicts, else the oldest; None: it needs all."""
    droppable = [v for v in engine.loaded if _may_drop(state, engine, v)]
    return min(droppable, key=lambda v: (v != engine.evicting, v), default=None)


def _may_drop(state: State, engine: EngineRecord, version: int) -> bool:
    if engine.rows_by_version[version] > 0 or version in state.waiting:
        return False
    others = (state.engines[e] for e in state.holders.get(version, ()) if e != engine.id)
    is_last_copy = all(other.lag > engine.lag for other in others)  # copies on slower engines do not count
    evaluation = state.evaluation
    is_evaluated = (
        evaluation is not None
        and evaluation.version == version != engine.evicting
        and evaluation.num_not_started > 0
    )
    is_needed = (
        state.is_pinned(version) and not state.limits.breaks_c1
    )  # else any newer version is a valid copy
    return not (is_last_copy and (is_evaluated or is_needed))
