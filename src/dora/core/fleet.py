"""What facts about engines change in the state.

Engines join, load, pause, leave and die, and requests move among them.
"""

from __future__ import annotations

from typing import Protocol

from dora.core import renewing
from dora.core.actions import Abort, Action, RefuseDrain
from dora.core.engines import Engine
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Paused,
    Progressed,
)
from dora.core.indexes import take_one
from dora.core.records import ProtocolError, RequestId
from dora.core.state import State


def require(condition: bool, event: object, rule: str, found: object) -> None:
    """Raise ProtocolError unless the fact can be true."""
    if not condition:
        raise ProtocolError(f"{event}: {rule}; the state says {found!r}")


class _OfEngine(Protocol):
    @property
    def engine(self) -> int: ...


def engine_of(state: State, event: _OfEngine) -> Engine:
    """The engine a fact is about. Raises ProtocolError if it is not there."""
    engine = state.engines.get(event.engine)
    if engine is None:
        raise ProtocolError(f"{event}: the engine must have joined; the state knows {sorted(state.engines)}")
    return engine


def joined(event: EngineJoined, state: State) -> list[Action]:
    """One on the trainer's device stands still until it is told to decode."""
    require(event.engine not in state.engines, event, "an engine joins once", event.engine)
    require(event.rows > 0 and event.slots > 0, event, "an engine has rows and version slots", event)
    require(event.replaces not in state.engines, event, "only a lost engine is replaced", event.replaces)
    engine = Engine(event.engine, event.rows, event.slots, event.is_colocated, is_paused=event.is_colocated)
    state.add(engine)
    state.is_rebalance_due = True
    return []


def lost(event: EngineLost, state: State) -> list[Action]:
    """Its requests begin again on their version, before all others that wait for it."""
    engine = engine_of(state, event)
    moving = [r for r, m in state.moves.items() if event.engine in (m.source, m.destination)]
    require(not moving, event, "moves are settled before an engine is lost", moving)
    state.remove(engine)
    for request_id in reversed(engine.requests):
        request = state.requests[request_id]
        state.num_regenerated_tokens += request.num_tokens
        request.engine, request.num_tokens = None, 0
        state.wait_first(request_id, request.version)
    state.is_rebalance_due = True
    return _stay(state)


def drain_asked(event: DrainAsked, state: State) -> list[Action]:
    """It leaves once it is empty; the only one stays."""
    engine = engine_of(state, event)
    if engine.is_leaving:
        return []
    if all(e.is_leaving for e in state.engines.values() if e is not engine):
        return [RefuseDrain(engine.id, "it is the only engine that stays")]
    engine.is_leaving = state.is_rebalance_due = True
    engine.wanted = engine.clearing = None
    state.leaving[engine.id] = None
    state.touch(engine)
    return []


def left(event: EngineLeft, state: State) -> list[Action]:
    engine = engine_of(state, event)
    require(engine.is_dismissed, event, "an engine leaves when it is dismissed", engine)
    state.remove(engine)
    state.is_rebalance_due = True
    return []


def paused(event: Paused, state: State) -> list[Action]:
    engine = engine_of(state, event)
    require(engine.is_pausing, event, "the pause was ordered", engine.is_paused)
    engine.is_pausing, engine.is_paused = False, True
    state.touch(engine)
    return []


def progressed(event: Progressed, state: State) -> list[Action]:
    engine = engine_of(state, event)
    for request, num_tokens in event.lengths:
        version = engine.requests.get(request)
        if version is not None:  # others were aborted or moved while the report was under way
            record = state.requests[request]
            engine.kv_tokens[version] += num_tokens - record.num_tokens
            record.num_tokens = num_tokens
    if event.row_tokens_per_s > 0:
        engine.row_tokens_per_s = event.row_tokens_per_s
        if engine.lag:
            state.least_pace = None
    is_short = engine.kv_share <= state.limits.kv_watermark < event.kv_share
    state.is_rebalance_due |= is_short and "pressure" not in state.limits.without
    engine.kv_share = event.kv_share
    return []


def migrated(event: Migrated, state: State) -> list[Action]:
    """The request goes on at its destination, also when its group has failed meanwhile."""
    request = event.request
    source, destination = _ends(event, state)
    is_dead = request in source.aborting
    require(is_dead or request in source.requests, event, "it was unfinished", source.requests.keys())
    version = _settle(request, destination, state)
    if is_dead:
        del source.aborting[request]
        take_one(source.running, version)
        destination.aborting[request] = version
        destination.running[version] += 1
    else:
        state.unseat(request, source)
        state.requests[request].num_tokens = event.num_tokens
        state.seat(request, destination, version)
    if event.num_bytes or event.num_prefilled:  # nobody has measured a move whose destination died at once
        state.costs.heard_move(event.num_tokens, event.num_bytes, event.copy_s, event.stop_s)
    state.touch(source)
    state.touch(destination)
    return [Abort(destination.id, (request,))] if is_dead else []


def migration_failed(event: MigrationFailed, state: State) -> list[Action]:
    source, destination = _ends(event, state)
    _settle(event.request, destination, state)
    if event.request in state.requests:
        state.requests[event.request].stuck_s = state.now_s
    state.touch(source)
    state.touch(destination)
    return []


def loaded(event: Loaded, state: State) -> list[Action]:
    engine = engine_of(state, event)
    require(event.version == engine.loading, event, "the load was ordered", engine.loading)
    stored = state.store.get(event.version)
    require(event.digest == stored, event, "an engine holds the bytes that were published (C1)", stored)
    engine.loading = None
    engine.held.add(event.version)
    state.costs.heard_load(state.now_s - engine.load_since_s)
    if state.leaving or state.limits.level_running:
        state.is_rebalance_due = True
    if state.limits.breaks_c1:
        renewing.renew(state, engine, event.version)
        state.touched.update(dict.fromkeys(state.engines))  # others may have to follow
    state.touch(engine)
    return []


def load_failed(event: LoadFailed, state: State) -> list[Action]:
    """The rules order it again, here or elsewhere."""
    engine = engine_of(state, event)
    require(event.version == engine.loading, event, "the load was ordered", engine.loading)
    engine.loading = None
    state.touch(engine)
    return []


def _ends(event: Migrated | MigrationFailed, state: State) -> tuple[Engine, Engine]:
    """Source and destination of a move that was ordered."""
    move = state.moves.get(event.request)
    is_known = move is not None and (move.source, move.destination) == (event.source, event.destination)
    require(is_known, event, "the move was ordered", move)
    return state.engines[event.source], state.engines[event.destination]


def _settle(request: RequestId, destination: Engine, state: State) -> int:
    """The move is over, either way; its place at the destination is free again. Returns the version."""
    del state.moves[request]
    version = destination.arriving.pop(request)
    take_one(destination.running, version)
    return version


def _stay(state: State) -> list[Action]:
    """Where only engines are left that were asked to leave, those not yet dismissed stay."""
    if any(not e.is_leaving for e in state.engines.values()):
        return []
    orders: list[Action] = []
    for engine in state.engines.values():
        if not engine.is_dismissed:
            engine.is_leaving = False
            del state.leaving[engine.id]
            state.touch(engine)
            orders.append(RefuseDrain(engine.id, "it has become the only engine"))
    return orders
