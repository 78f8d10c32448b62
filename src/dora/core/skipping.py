"""Which engines leave a new version out: those whose own hardly differs from it, and may still be begun with.

Decided once for every version, when it is published. A version that is left out is loaded all the
same where the bound asks for it, or where what the engine holds is let go of (`versions.load`).
"""

from __future__ import annotations

from dora.core.actions import Action, Skip
from dora.core.bound import admissible, deadline_at
from dora.core.state import State


def skip(state: State) -> list[Action]:
    """The newest version has just been published."""
    newest, limits = state.newest, state.limits
    if limits.skip_below_kl is None or limits.batches_per_version is not None or newest is None:
        return []
    engines = [e for e in state.engines.values() if e.wanted is None and not e.is_leaving]
    near = {top for top in {e.top for e in engines} if top >= 0 and _is_good_enough(state, top, newest)}
    orders: list[Action] = []
    for engine in [e for e in engines if e.top in near]:
        engine.skipped = newest
        orders.append(Skip(engine.id, newest))
    return orders


def _is_good_enough(state: State, version: int, newest: int) -> bool:
    """Whether the bound still admits groups at `version`, and the newest says nearly the same."""
    is_later = version in state.store and deadline_at(state, version) > state.next_step
    if not is_later or admissible(state, version) == 0 or state.is_trained:
        return False
    return state.divergence.is_small(state.limits, newest - version)
