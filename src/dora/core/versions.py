"""Which engine holds which version, and how long the weight store keeps one.

An engine never drops a version it decodes, nor the last copy of a pinned one. The store keeps
every pinned version and the newest, so the loss of an engine costs a load and no answer.
"""

from __future__ import annotations

from dora.core.actions import Action, Drop, Load, Retire
from dora.core.state import Engine, State


def load(state: State) -> list[Action]:
    """Pinned versions that no engine holds first, oldest first; then the newest for everyone."""
    orders: list[Action] = []
    for version in _orphans(state):
        candidates = sorted(state.engines.values(), key=lambda e: (-e.free_rows, e.id))
        orders += next(filter(None, (_load_into(state, e, version) for e in candidates)), [])
    if state.newest is not None:
        for engine in state.engines.values():
            if state.newest not in engine.held:
                orders += _load_into(state, engine, state.newest)
    _drain(state)
    return orders


def retire(state: State) -> list[Action]:
    """Let go of stored versions that are neither pinned, nor being loaded, nor open to admission."""
    kept = {state.newest, *(e.loading for e in state.engines.values())}
    kept.add(max((v for e in state.engines.values() for v in e.held), default=None))  # may yet admit
    orders: list[Action] = []
    for version in sorted(state.store):
        if version not in kept and not state.is_pinned(version):
            del state.store[version]
            orders.append(Retire(version))
    return orders


def _covered(state: State) -> set[int | None]:
    """Versions that some engine holds or is loading."""
    return {v for e in state.engines.values() for v in (*e.held, e.loading)}


def _orphans(state: State) -> list[int]:
    """Versions with waiting requests that no engine holds or loads."""
    covered = _covered(state)
    return sorted(v for v, waiting in state.waiting.items() if waiting and v not in covered)


def _load_into(state: State, engine: Engine, version: int) -> list[Action]:
    """Load if the engine is free to and a slot is, or can be made, empty; nothing otherwise."""
    if engine.loading is not None or engine.draining_for not in (None, version):
        return []
    orders: list[Action] = []
    if len(engine.held) >= engine.slots:
        victim = min((v for v in engine.held if _may_drop(state, engine, v)), default=None)
        if victim is None:
            return []
        engine.held.discard(victim)
        orders.append(Drop(engine.id, victim))
    engine.loading = version
    return [*orders, Load(engine.id, version)]


def _may_drop(state: State, engine: Engine, version: int) -> bool:
    if engine.running[version] > 0:
        return False
    is_last_copy = sum(version in e.held for e in state.engines.values()) == 1
    return not (is_last_copy and state.is_pinned(version))


def _drain(state: State) -> None:
    """For each version that found no place, the engine with the fewest requests admits nothing."""
    wanted = _orphans(state)
    if state.newest is not None and state.newest not in _covered(state):
        wanted.append(state.newest)
    for engine in state.engines.values():
        if engine.draining_for not in wanted:
            engine.draining_for = None
    draining = {e.draining_for for e in state.engines.values()}
    for version in wanted:
        free = [e for e in state.engines.values() if e.loading is None and e.draining_for is None]
        if version not in draining and free:
            min(free, key=lambda e: (len(e.requests), e.id)).draining_for = version
