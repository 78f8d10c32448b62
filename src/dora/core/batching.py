"""Which scored groups form a batch, and when the trainer runs.

Groups are committed one by one in deadline order, and only while every other open group keeps
a place before its own deadline: a straggler is passed only while a place is kept for it.
"""

from __future__ import annotations

from dora.core.actions import Action, Commit, ReportStall, Stop, Train
from dora.core.records import GroupId
from dora.core.state import State, bound_holds


def commit(state: State) -> list[Action]:
    """Commit ready groups to step n; a full batch moves n on at once."""
    orders: list[Action] = []
    while state.ready and state.next_step < state.limits.num_steps and _may_commit(state):
        deadline, _, group = state.ready.pop(0)
        state.close(deadline)
        staleness = state.next_step - state.groups[group].version
        assert 0 <= staleness <= state.limits.max_staleness, f"C3: {group} has staleness {staleness}"
        state.committed.append(group)
        orders.append(Commit(group, state.next_step))
        if len(state.committed) == state.limits.batch_size:
            state.batches[state.next_step] = tuple(state.committed)
            state.committed = []
            state.next_step += 1
    return orders


def train(state: State) -> list[Action]:
    """Start the next step once its batch is complete and its version published; stop after the last."""
    if state.training is not None or state.publishing is not None or state.newest is None:
        return []
    if state.newest == state.limits.num_steps:
        already, state.stopped = state.stopped, True
        return [] if already else [Stop()]
    batch = state.batches.get(state.newest)
    if batch is None:
        return []
    state.training = state.newest
    return [Train(state.newest, batch)]


def watch_stall(state: State, now: float) -> list[Action]:
    """Keep `stall_s`: the time in which an idle trainer waits for a group at its deadline."""
    group = _straggler(state)
    orders: list[Action] = []
    if state.stall_group is not None and group != state.stall_group:
        state.stall_s += now - state.stall_since_s
        state.is_stall_reported = False
    if group is not None and group != state.stall_group:
        state.stall_since_s = now
    state.stall_group = group
    is_due = now >= state.stall_since_s + state.limits.stall_report_s  # the sum next_wakeup() names
    if group is not None and not state.is_stall_reported and is_due:
        state.is_stall_reported = True
        requests = tuple(sorted(state.groups[group].unfinished))
        orders.append(ReportStall(state.next_step, group, requests, state.stall_since_s))
    return orders


def _may_commit(state: State) -> bool:
    opened = state.open.copy()
    opened[state.ready[0][0]] -= 1
    return bound_holds(opened, state.next_step, len(state.committed) + 1, state.limits)


def _straggler(state: State) -> GroupId | None:
    """The first open group that step n must contain, while the trainer has nothing to do."""
    idle = state.training is None and state.publishing is None and state.newest == state.next_step
    if not idle or state.next_step >= state.limits.num_steps:
        return None
    if not any(d <= state.next_step for d in state.open):
        return None
    at_deadline = (g for g in state.groups.values() if g.deadline <= state.next_step and not g.scored)
    first = min(at_deadline, key=lambda g: g.index, default=None)
    return first.id if first else None
