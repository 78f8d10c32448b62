"""Which scored groups form a batch, and when the trainer runs.

Groups are committed one by one in deadline order, and only while every other open group keeps
a place before its own deadline: a straggler is passed only while a place is kept for it.
"""

from __future__ import annotations

from dora.core.actions import Action, Commit, Stop, Train
from dora.core.bound import bound_holds
from dora.core.state import State


def commit(state: State) -> list[Action]:
    """Commit ready groups to step n; a full batch moves n on at once."""
    orders: list[Action] = []
    while state.ready and state.next_step < state.limits.num_steps and _may_commit(state):
        _, _, group = state.ready.pop(0)
        state.close(state.groups[group])
        staleness = state.next_step - state.groups[group].version
        assert 0 <= staleness <= state.limits.max_staleness, f"C3: {group} has staleness {staleness}"
        state.committed.append(group)
        orders.append(Commit(group, state.next_step))
        if len(state.committed) == state.limits.batch_size:
            state.batches[state.next_step] = tuple(state.committed)
            state.committed = []
            state.next_step += 1
    if orders:
        state.admissible.clear()
    return orders


def train(state: State) -> list[Action]:
    """Start the next step once its batch is complete and its version published; stop after the last."""
    is_busy = state.training is not None or state.publishing is not None
    if is_busy or state.is_trainer_lost or state.newest is None:
        return []
    step = next(iter(state.redo), state.newest)
    if state.is_trained and not state.redo:
        if state.evaluation is not None:
            return []  # the run waits for it
        already, state.stopped = state.stopped, True
        return [] if already else [Stop()]
    batch = state.redo.get(step) or state.batches.get(step)
    if batch is None or not state.is_device_free:
        return []
    state.training = step
    return [Train(step, batch)]


def _may_commit(state: State) -> bool:
    nearest, _, _ = state.ready[0]
    opened = {**state.open, nearest: state.open[nearest] - 1}
    return bound_holds(opened, state.next_step, len(state.committed) + 1, state.limits)
