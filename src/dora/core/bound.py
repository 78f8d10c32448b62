"""How many groups may be admitted: the arithmetic of the bound, proved in docs/bound.md.

Update policies and slack admit less than the bound allows, never more.
"""

from __future__ import annotations

from collections.abc import Mapping

from dora.core.records import Limits
from dora.core.state import State


def bound_holds(opened: Mapping[int, int], next_step: int, num_committed: int, limits: Limits) -> bool:
    """Whether every open group can still be trained by its deadline.

    For every d: #{open groups with deadline <= d} <= max(0, P * (d - n + 1) - c).
    Only deadlines that occur need checking, for the left side grows nowhere else.
    """
    count = 0
    for deadline in sorted(opened):
        count += opened[deadline]
        if count > max(0, limits.batch_size * (deadline - next_step + 1) - num_committed):
            return False
    return True


def deadline_at(state: State, version: int) -> int:
    """Last step that may train what is admitted at `version` now: min(v + effective S, T - 1)."""
    return state.limits.deadline(version, state.aging.lowered)


def num_admissible(state: State, version: int) -> int:
    """Groups that may be admitted at `version` now, were there rows and prompts enough."""
    limits = state.limits
    if state.next_step >= limits.num_steps:
        return 0
    deadline, num_open = deadline_at(state, version), 0
    room = _quota(state, version)
    for other in sorted(state.open.keys() | {deadline}):
        num_open += state.open.get(other, 0)
        if other >= deadline:
            num_places = limits.batch_size * (other - state.next_step + 1) - len(state.committed)
            if num_places - num_open < room:
                room = num_places - num_open
    if limits.slack:  # never below one batch, or that batch could not be completed
        staleness = limits.max_staleness - state.aging.lowered
        most = max(limits.batch_size, (staleness + 1) * limits.batch_size - limits.slack)
        room = min(room, most - num_open - len(state.committed))
    return max(0, room)


def admissible(state: State, version: int) -> int:
    """As `num_admissible`, which is asked again only once a group is admitted, committed or has ended."""
    if state.limits.batches_per_version is not None:
        return num_admissible(state, version)  # unfinished answers count
    known = state.admissible
    if version not in known:
        known[version] = num_admissible(state, version)
    return known[version]


def _quota(state: State, version: int) -> int:
    """Groups that the update policy lets `version` have: with one live version, so many batches.

    Version 0 has as many as the bound allows, so that the trainer works while the next generates.
    """
    limits = state.limits
    if limits.batches_per_version is None:
        return limits.num_steps * limits.batch_size
    most = (limits.batches_per_version if version else limits.max_staleness + 1) * limits.batch_size
    if version == state.current:
        return most - state.num_admitted_current
    is_next = state.current is None or version > state.current
    num_evaluating = 0 if state.evaluation is None else state.evaluation.num_running
    return most if is_next and state.unfinished.total() == num_evaluating else 0
