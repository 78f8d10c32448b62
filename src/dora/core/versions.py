"""Which engine holds which version, and how long the weight store keeps one.

An engine never drops a version it decodes, nor the last copy of a pinned one. The store keeps
every pinned version and the newest, so the loss of an engine costs a load and no answer. Unless the
bound asks for it, an engine may take only every n-th version (`load_interval`), leave it out (`skipping`),
or wait until it has a free row, and for its turn (`is_deferred`).
"""

from __future__ import annotations

from dora.core import slowness
from dora.core.actions import Action, Dismiss, Drop, Load, Retire
from dora.core.bound import admissible, deadline_at
from dora.core.deadlines import nearest_first
from dora.core.engines import Engine
from dora.core.renewing import front
from dora.core.state import State

ENGINES_PER_LOAD = 4  # engines for each that may load at a time, where loads are deferred


def listen(state: State) -> None:
    """Whether the newest is needed, for what engines hold may not, or should not, be admitted at."""
    held = front(state)
    was_asked = state.is_newest_asked
    is_late = held is not None and deadline_at(state, held) <= state.next_step
    state.is_newest_asked = held is None or is_late or admissible(state, held) == 0
    asked = (-1 if held is None else held, -1 if state.newest is None else state.newest)
    if state.is_newest_asked and not was_asked and not state.limits.is_eager:
        state.touched.update(dict.fromkeys(state.engines))
    if state.is_newest_asked and asked != state.asked_for:
        state.asked_for, state.is_rebalance_due = asked, True


def load(state: State, is_due: bool = True) -> list[Action]:
    """Pinned versions that no engine has first, nearest deadline first; then the newest, where it is due.

    Whether an engine can give way to the newest is looked at only when a rebalance `is_due`.
    """
    _reconsider(state)
    for version in _orphans(state):
        if not state.is_only_evaluated(version):
            _adopt(state, version, may_clear=True)
    for version in _stranded(state):
        _adopt(state, version, may_clear=False)
    for version in slowness.stranded(state):
        _adopt(state, version, may_clear=False, most_lag=0)
    may_clear = state.is_newest_asked or state.limits.is_static
    if state.newest is not None and (is_due or may_clear) and _must_have(state, state.newest):
        _adopt(state, state.newest, may_clear=may_clear)
    return _load_touched(state)


def lend(state: State, is_due: bool) -> list[Action]:
    """An engine for held-out requests whose version none has: one with room, or any if they are overdue.

    Not while the newest, which comes first, is about to be used.
    """
    lacking = [v for v in _orphans(state) if state.is_only_evaluated(v)]
    if not lacking or _is_newest_next(state):
        return []
    has_room = any(_is_unused(state.engines[engine]) for engine in state.changed)
    if not (is_due or has_room or state.is_trained):
        return []
    for version in lacking:
        _adopt(state, version, may_clear=_is_overdue(state, version))
    return _load_touched(state)


def _is_unused(engine: Engine) -> bool:
    """Whether an engine decodes nothing, nor is about to."""
    return engine.is_empty and engine.loading is None and engine.wanted is None and not engine.is_leaving


def _is_newest_next(state: State) -> bool:
    """Whether the newest is on its way to its first engine, or groups are about to be admitted at it."""
    newest = state.newest
    if newest is None or state.is_trained:
        return False
    is_coming = newest in state.coming and newest not in state.holders
    return is_coming or (state.fresh_rows[newest] > 0 and admissible(state, newest) > 0)


def _load_touched(state: State) -> list[Action]:
    """Orders to engines that have changed, and may load now."""
    orders: list[Action] = []
    touched = sorted(state.touched)
    state.touched.clear()
    while state.line and _is_turn(state):
        first = next(iter(state.line))
        del state.line[first]
        orders += _load_due(state, state.engines[first])
    for engine in [state.engines[e] for e in touched]:
        orders += _load_due(state, engine)
    return orders


def _load_due(state: State, engine: Engine) -> list[Action]:
    """Load what is due; the newest waits for the engine's turn, what requests wait for does not."""
    if engine.loading is not None or engine.is_leaving:
        return []
    due = _due(state, engine) if engine.wanted is None else engine.wanted
    if due is None:
        return []
    if due == state.newest and not _is_turn(state):
        state.line[engine.id] = None
        return []
    return _load_into(state, engine, due)


def _is_turn(state: State) -> bool:
    """Whether one more engine may begin to load: a quarter of them at a time, so that others decode on."""
    return not state.limits.is_deferred or len(state.loaders) < max(1, len(state.engines) // ENGINES_PER_LOAD)


def retire(state: State) -> list[Action]:
    """Let go of stored versions that are neither pinned, nor coming, nor open to admission."""
    loose = [v for v in state.store if v not in state.coming and not state.is_pinned(v)]
    if not loose or loose == [state.newest]:
        return []  # as after nearly every fact
    newest_held = max(state.holders, default=None)
    evaluated = state.evaluation.version if state.evaluation else None
    orders: list[Action] = []
    for version in sorted({*loose} - {state.newest, newest_held, evaluated}):
        del state.store[version]
        state.touched.update(state.holders.get(version, {}))  # nothing can be begun with it any more
        orders.append(Retire(version))
    return orders


def dismiss(state: State) -> list[Action]:
    """Engines that leave may go once nothing is on them, and nothing is on its way."""
    orders: list[Action] = []
    for engine in [state.engines[e] for e in sorted(state.leaving)]:
        is_source = any(move.source == engine.id for move in state.moves.values())
        if engine.is_empty and not is_source and engine.loading is None and not engine.is_dismissed:
            engine.is_dismissed = True
            orders.append(Dismiss(engine.id))
    return orders


def _orphans(state: State) -> list[int]:
    """Versions with waiting requests that no engine holds or is to hold."""
    if not state.waiting:
        return []  # as after nearly every fact
    lacking = (v for v in state.waiting if v not in state.holders and v not in state.coming)
    return nearest_first(state, (v for v in lacking if v in state.store))  # others are redone first


def _is_overdue(state: State, version: int) -> bool:
    """Whether an engine must make room for an evaluation: it should be over when the next one is due."""
    rule = state.limits.evaluation
    return state.is_trained or (rule is not None and (state.newest or 0) >= version + rule.every)


def _stranded(state: State) -> list[int]:
    """Versions that only engines on their way out decode, where requests can move."""
    if state.limits.is_static or not state.leaving:
        return []
    found = {v for e in state.leaving for v in state.engines[e].requests.values()}
    return nearest_first(state, (v for v in found if v not in state.holders and v not in state.coming))


def _must_have(state: State, newest: int) -> bool:
    """Whether some engine must give way to the newest version, for none has room for it."""
    if newest in state.holders or newest in state.coming or state.is_trained:
        return False
    return state.limits.is_eager or state.is_newest_asked


def _due(state: State, engine: Engine) -> int | None:
    """The version an engine should take next; None where it has what it should."""
    newest, limits = state.newest, state.limits
    if newest is None or newest in engine.held or state.is_trained:
        return None
    if state.is_newest_asked:
        return newest
    if limits.batches_per_version is not None:  # the one live version, not yet the newest
        current = state.current
        if current is None or current in engine.held or current not in state.store:
            return None
        is_used = state.is_pinned(current) and not state.is_only_evaluated(current)
        return current if is_used or current == max(state.holders, default=None) else None
    if not engine.held:
        return newest
    begun = front(state) if limits.breaks_c1 else None
    if begun is not None and engine.top < begun and engine.free_rows > 0:
        return begun  # nothing else is begun any more
    is_useful = not limits.is_deferred or engine.free_rows > 0
    is_left_out = engine.skipped == newest and engine.top in state.store
    return newest if is_useful and not is_left_out and newest - engine.top >= limits.load_interval else None


def _reconsider(state: State) -> None:
    """Let engines forget what they cleared a slot for in vain: nobody waits for it any more."""
    for engine in [state.engines[e] for e in state.touched]:
        version = engine.wanted
        if version is None or version == state.newest or version in state.waiting:
            continue
        if version in state.holders or not state.is_pinned(version):
            engine.wanted = engine.clearing = None
            state.touch(engine)


def _adopt(state: State, version: int, *, may_clear: bool, most_lag: int | None = None) -> None:
    """Choose an engine, which lags at most so, for a version that no such one has: one with room, else one
    that can move its requests elsewhere, else, if it `may_clear`, one that waits for them."""
    free = [e for e in state.engines.values() if e.loading is None and e.wanted is None and not e.is_leaving]
    free = free if most_lag is None else [e for e in free if e.lag <= most_lag]
    roomy = [e for e in free if len(e.held) < e.slots or _victim(state, e) is not None]
    if roomy:
        engine = min(roomy, key=lambda e: (e.is_colocated, e.lag, -e.free_rows, e.id))
    else:
        movable = [] if state.limits.is_static else [e for e in free if _can_move(state, e)]
        choice = movable or (free if may_clear else [])
        if not choice:
            return
        engine = min(choice, key=lambda e: (e.is_colocated, e.lag, len(e.requests), e.id))
        engine.clearing = _cheapest(engine)
        state.is_rebalance_due = True
    engine.wanted = version
    state.touch(engine)


def _cheapest(engine: Engine) -> int:
    """The version an engine has least to do for."""
    return min(engine.held, key=lambda v: (engine.running[v], v))


def _can_move(state: State, engine: Engine) -> bool:
    """Whether other engines have rows for what it runs of its cheapest version."""
    version = _cheapest(engine)
    num_rows = 0
    for other in state.takers.get(version, ()):
        if other != engine.id and state.may_receive(state.engines[other], version):
            num_rows += state.engines[other].free_rows
            if num_rows >= engine.running[version]:
                return not engine.arriving
    return False


def _load_into(state: State, engine: Engine, version: int) -> list[Action]:
    """Load if a slot is, or can be made, empty; nothing otherwise."""
    orders: list[Action] = []
    if len(engine.held) >= engine.slots:
        victim = _victim(state, engine)
        if victim is None:
            return []
        engine.held.discard(victim)
        orders.append(Drop(engine.id, victim))
    engine.loading, engine.load_since_s = version, state.now_s
    engine.wanted = engine.clearing = None
    state.touch(engine)
    return [*orders, Load(engine.id, version)]


def _victim(state: State, engine: Engine) -> int | None:
    """The version an engine can drop with the least regret: the one it clears, else the oldest."""
    droppable = [v for v in engine.held if _may_drop(state, engine, v)]
    return min(droppable, key=lambda v: (v != engine.clearing, v), default=None)


def _may_drop(state: State, engine: Engine, version: int) -> bool:
    if engine.running[version] > 0 or version in state.waiting:
        return False
    others = (state.engines[e] for e in state.holders.get(version, ()) if e != engine.id)
    is_last_copy = all(other.lag > engine.lag for other in others)
    run = state.evaluation
    is_kept = run is not None and run.version == version != engine.clearing and run.num_left > 0
    is_needed = state.is_pinned(version) and not state.limits.breaks_c1  # else who needs it has it
    return not (is_last_copy and (is_kept or is_needed))
