"""Live migration: which running requests move to another engine, with their KV.

A request moves only to an engine that holds its version: a short one to the best fit, a long one to where
most rows are free. Requests leave an engine that drains, pauses or evicts their version in any case, and a
queue for a free row; the tail of a version is gathered on one engine only if that gains more tokens than it
costs.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from dora.core.actions import Migrate
from dora.core.costs import VERSION_OVERHEAD
from dora.core.length_prediction import is_predicted_long, predict_remaining_steps
from dora.core.state import EngineRecord, MigrationRecord, State
from dora.core.types import RequestId


def migrate(state: State) -> list[Migrate]:
    """Start the migrations that are due now, the mandatory ones first."""
    if not state.limits.has_migrations:
        return []
    free_rows = _FreeRows(state)
    actions = _evacuate(state, free_rows)
    actions += _gather_tails(state)
    actions += _relieve_kv(state, free_rows)
    actions += _spread_queued(state, free_rows)
    if state.limits.balance_running:
        actions += _balance(state)
    for destination in {action.destination: None for action in actions}:
        state.mark_dirty(state.engines[destination])  # once, since it may receive many requests
    return actions


def start_migration(
    state: State, request: RequestId, source: EngineRecord, destination: EngineRecord, reason: str
) -> Migrate:
    """Reserve a row at the destination; the caller marks the destination dirty after its last migration.

    The request stays with its source until `Migrated` is reported.
    """
    version = source.requests[request]
    state.migrations[request] = MigrationRecord(source.id, destination.id, version)
    destination.incoming[request] = version
    destination.rows_by_version[version] += 1
    return Migrate(request, source.id, destination.id, version, reason)


class _FreeRows:
    """Free rows by version, on engines that can receive running requests."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._engines: dict[int, list[tuple[int, int]]] = {}  # (free rows, engine), fewest first

    def choose(self, version: int, request: RequestId) -> EngineRecord | None:
        """The engine with fewest free rows, or most for a long request; None if no row is free.

        The caller must use one row of the engine.
        """
        engines = self._of(version)
        end = -1 if is_predicted_long(self._state, request) else 0
        while engines:
            num_free, number = engines.pop(end)
            engine = self._state.engines[number]
            is_current = num_free == engine.free_rows  # else another version has used rows
            num_left = engine.free_rows - is_current
            if num_left > 0:
                insort(engines, (num_left, number))
            if is_current:
                return engine
        return None

    def _of(self, version: int) -> list[tuple[int, int]]:
        if version not in self._engines:
            engines = [self._state.engines[e] for e in self._state.available_engines.get(version, ())]
            fit = [e for e in engines if self._state.can_receive(e, version)]
            self._engines[version] = sorted((e.free_rows, e.id) for e in fit)
        return self._engines[version]


def _evacuate(state: State, free_rows: _FreeRows) -> list[Migrate]:
    """Off engines that drain, pause for the trainer, or evict a version."""
    actions: list[Migrate] = []
    for engine in state.engines.values():
        if engine.is_draining:
            actions += _migrate_all(state, engine, None, free_rows, "leave")
        elif engine.is_pausing or engine.is_paused:
            actions += _migrate_all(state, engine, None, free_rows, "reclaim")
        elif engine.evicting is not None:
            actions += _migrate_all(state, engine, engine.evicting, free_rows, "flip")
    return actions


def _gather_tails(state: State) -> list[Migrate]:
    """Off engines that decode several versions, each of which slows all rows: tails of older versions."""
    actions: list[Migrate] = []
    for engine in state.engines.values():
        if len(engine.rows_by_version) < 2 or not engine.is_active:
            continue
        for version in [v for v in sorted(engine.rows_by_version) if v != state.newest_published]:
            destination = _gathering_engine(state, engine, version)
            if destination is None or not _gains_by_gathering(state, engine, version):
                continue
            requests = _movable_requests(state, engine, version)
            actions += [start_migration(state, r, engine, destination, "gather") for r in requests]
    return actions


def _gathering_engine(state: State, engine: EngineRecord, version: int) -> EngineRecord | None:
    """The engine that decodes most requests of `version`, more than this one, and has rows for these, too."""
    num_requests = engine.rows_by_version[version]
    if version in engine.incoming.values() or version in engine.aborting.values():
        return None
    holders = (state.engines[e] for e in state.holders.get(version, ()))
    fit = [
        e
        for e in holders
        if e is not engine
        and state.can_receive(e, version)
        and e.free_rows >= num_requests
        and (e.rows_by_version[version], -e.id) > (num_requests, -engine.id)
    ]
    return max(fit, key=lambda e: (e.rows_by_version[version], -e.id), default=None)


def _gains_by_gathering(state: State, engine: EngineRecord, version: int) -> bool:
    num_requests = engine.rows_by_version[version]
    num_others = len(engine.requests) - num_requests
    gain = VERSION_OVERHEAD * num_others * predict_remaining_steps(state, engine, version)
    return gain > state.costs.migration_cost(num_requests, engine.kv_tokens[version], engine.row_tokens_per_s)


def _relieve_kv(state: State, free_rows: _FreeRows) -> list[Migrate]:
    """Off each engine above the KV watermark: the request with most KV."""
    actions: list[Migrate] = []
    for engine in state.engines.values():
        if engine.kv_usage <= state.limits.kv_watermark or not engine.is_active:
            continue
        staying = [r for r in engine.requests if r not in state.migrations]
        heaviest = max(staying, key=lambda r: (state.requests[r].num_tokens, r), default=None)
        if heaviest is not None:
            actions += _migrate_one(state, heaviest, engine, free_rows, "kv")
    return actions


def _spread_queued(state: State, free_rows: _FreeRows) -> list[Migrate]:
    """Off the queue of an engine whose rows are all in use: the last requests, if they have no token."""
    actions: list[Migrate] = []
    for engine in state.engines.values():
        if engine.free_rows >= 0 or not engine.is_active:
            continue
        requests = [r for r in _movable_requests(state, engine, None) if not state.requests[r].num_tokens]
        for request in requests[engine.free_rows :]:
            actions += _migrate_one(state, request, engine, free_rows, "queue")
    return actions


def _balance(state: State) -> list[Migrate]:
    """Balance the engines of each version: from the one with most requests to the one with fewest."""
    actions: list[Migrate] = []
    num_leaving = Counter(migration.source for migration in state.migrations.values())
    for version in sorted(state.available_engines):
        holders = [state.engines[e] for e in state.holders.get(version, ())]
        engines = [e for e in holders if e.is_accepting(version)]
        loads = {e.id: len(e.requests) + len(e.incoming) - num_leaving[e.id] for e in engines}
        receivers = [e for e in engines if state.can_receive(e, version)]
        movable = {e.id: _cheapest_last(state, e, version) for e in engines}
        while receivers and loads:
            least = min(receivers, key=lambda e: (loads[e.id], e.id))
            most = max((e for e in loads if movable[e]), key=lambda e: (loads[e], -e), default=least.id)
            if loads[most] - loads[least.id] < 2 or least.free_rows == 0:
                break
            request = movable[most].pop()
            actions.append(start_migration(state, request, state.engines[most], least, "level"))
            loads[most] -= 1
            loads[least.id] += 1
    return actions


def _cheapest_last(state: State, engine: EngineRecord, version: int) -> list[RequestId]:
    """Movable requests by KV, the cheapest to migrate last."""
    requests = _movable_requests(state, engine, version)
    return sorted(requests, key=lambda r: (-state.requests[r].num_tokens, r))


def _movable_requests(state: State, engine: EngineRecord, version: int | None) -> list[RequestId]:
    """Running requests of `version` (None: of all versions) that do not migrate already."""
    return [r for r, v in engine.requests.items() if version in (None, v) and r not in state.migrations]


def _migrate_all(
    state: State, engine: EngineRecord, version: int | None, free_rows: _FreeRows, reason: str
) -> list[Migrate]:
    """Migrate all requests of `version` (None: of all versions) for which rows are free elsewhere."""
    requests = _movable_requests(state, engine, version)
    return [action for r in requests for action in _migrate_one(state, r, engine, free_rows, reason)]


def _migrate_one(
    state: State, request: RequestId, source: EngineRecord, free_rows: _FreeRows, reason: str
) -> list[Migrate]:
    destination = free_rows.choose(source.requests[request], request)
    return [] if destination is None else [start_migration(state, request, source, destination, reason)]
