"""Colocated engines share a device with the trainer: they pause before a training step and resume after it.

A paused engine keeps its versions, requests and KV; requests that can migrate to other engines do.
"""

from __future__ import annotations

from dora.core.actions import Action, PauseEngine, ResumeEngine
from dora.core.state import State


def pause_or_resume(state: State) -> list[Action]:
    """Pause colocated engines when the trainer needs the device, and resume them when it does not."""
    if not state.colocated:
        return []
    actions: list[Action] = []
    is_needed = _trainer_needs_device(state)
    for engine in [state.engines[number] for number in state.colocated]:
        if engine.is_removing:
            continue
        if is_needed and not (engine.is_pausing or engine.is_paused):
            engine.is_pausing = state.is_rebalance_due = True
            actions.append(PauseEngine(engine.id))
        elif not is_needed and engine.is_paused:
            engine.is_paused = False
            actions.append(ResumeEngine(engine.id))
        else:
            continue
        state.mark_dirty(engine)
    return actions


def _trainer_needs_device(state: State) -> bool:
    if state.is_trainer_lost:
        return False
    if state.training_step is not None or state.publishing_version is not None or state.redo_batches:
        return True
    return state.newest_published is not None and state.newest_published in state.batches
