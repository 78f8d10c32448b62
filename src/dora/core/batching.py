"""Batching: which scored groups form a batch, and when a training step starts.

Groups are committed one by one in deadline order, each only if every other open group keeps a place in a
batch before its own deadline. A straggler is therefore passed only while a place is reserved for it.
"""

from __future__ import annotations

from dora.core.actions import Action, Commit, Stop, Train
from dora.core.bound import bound_holds
from dora.core.state import State


def commit(state: State) -> list[Action]:
    """Commit scored groups to step n; n grows as soon as its batch is full."""
    actions: list[Action] = []
    while state.ready_groups and state.next_step < state.limits.num_steps and _may_commit(state):
        _, _, group = state.ready_groups.pop(0)
        state.close_group(state.groups[group])
        staleness = state.next_step - state.groups[group].version
        assert 0 <= staleness <= state.limits.max_staleness, f"C3: {group} has staleness {staleness}"
        state.committed.append(group)
        actions.append(Commit(group, state.next_step))
        if len(state.committed) == state.limits.batch_size:
            state.batches[state.next_step] = tuple(state.committed)
            state.committed = []
            state.next_step += 1
    if actions:
        state.admissible_cache.clear()
    return actions


def train(state: State) -> list[Action]:
    """Start the next step once its batch is complete and its version published; stop after the last one
    and its evaluation.
    """
    is_busy = state.training_step is not None or state.publishing_version is not None
    if is_busy or state.is_trainer_lost or state.newest_published is None:
        return []
    if state.is_training_done and not state.redo_batches:
        if state.evaluation is not None or state.is_stopped:
            return []
        state.is_stopped = True
        return [Stop()]
    step = next(iter(state.redo_batches), state.newest_published)
    batch = state.redo_batches.get(step) or state.batches.get(step)
    if batch is None or not state.is_device_free:
        return []
    state.training_step = step
    return [Train(step, batch)]


def _may_commit(state: State) -> bool:
    nearest, _, _ = state.ready_groups[0]
    opened = {**state.num_open, nearest: state.num_open[nearest] - 1}
    return bound_holds(opened, state.next_step, len(state.committed) + 1, state.limits)
