"""Engines on the trainer's device and the trainer itself take turns.

Such an engine decodes only while the trainer has nothing to train. Before a step it stands
still, with its versions, requests and KV, and what can move to other engines does.
"""

from __future__ import annotations

from dora.core.actions import Action, Pause, Resume
from dora.core.engines import Engine
from dora.core.state import State


def share(state: State) -> list[Action]:
    """Give the device to whom it belongs now."""
    orders: list[Action] = []
    if not state.colocated:
        return orders
    is_needed = _trainer_needs_device(state)
    for engine in [e for e in _colocated(state) if not e.is_dismissed]:
        if is_needed and not (engine.is_pausing or engine.is_paused):
            engine.is_pausing = state.is_rebalance_due = True
            orders.append(Pause(engine.id))
        elif not is_needed and engine.is_paused:
            engine.is_paused = False
            orders.append(Resume(engine.id))
        else:
            continue
        state.touch(engine)
    return orders


def _trainer_needs_device(state: State) -> bool:
    is_busy = state.training is not None or state.publishing is not None or bool(state.redo)
    if state.is_trainer_lost:
        return False
    return is_busy or (state.newest is not None and state.newest in state.batches)


def _colocated(state: State) -> list[Engine]:
    return [state.engines[engine] for engine in state.colocated]
