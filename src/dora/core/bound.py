"""How many groups may be admitted: the arithmetic of the staleness bound, proved in docs/staleness.md.

Update policies and slack admit fewer than the bound allows, never more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dora.core.state import State
from dora.core.types import Limits


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
    """Last step that may train a group admitted at `version` now: min(v + effective S, T - 1)."""
    return state.limits.deadline(version, state.adaptive_staleness.reduction)


def num_admissible(state: State, version: int) -> int:
    """Groups that may be admitted at `version` now, given enough rows and prompts."""
    limits = state.limits
    if state.next_step >= limits.num_steps:
        return 0
    deadline, num_open = deadline_at(state, version), 0
    room = _quota(state, version)
    for other in sorted(state.num_open.keys() | {deadline}):
        num_open += state.num_open.get(other, 0)
        if other >= deadline:
            num_places = limits.batch_size * (other - state.next_step + 1) - len(state.committed)
            if num_places - num_open < room:
                room = num_places - num_open
    if limits.slack:  # never below one batch, or that batch could not be completed
        staleness = limits.max_staleness - state.adaptive_staleness.reduction
        most = max(limits.batch_size, (staleness + 1) * limits.batch_size - limits.slack)
        room = min(room, most - num_open - len(state.committed))
    return max(0, room)


def cached_num_admissible(state: State, version: int) -> int:
    """`num_admissible` from a cache, which every admission, commit and end of a group clears."""
    if state.limits.batches_per_version is not None:
        return num_admissible(state, version)  # depends on unfinished requests, too
    cache = state.admissible_cache
    if version not in cache:
        cache[version] = num_admissible(state, version)
    return cache[version]


def sort_by_deadline(state: State, versions: Iterable[int]) -> list[int]:
    """Versions by the nearest deadline of their unscored groups; versions without any come last.

    With a fixed bound, the older version has the nearer deadline.
    """
    by_age = sorted(versions)
    if state.limits.adaptive_staleness is None or len(by_age) < 2:
        return by_age
    nearest: dict[int, int] = {}
    for deadline, version in state.unscored:
        nearest[version] = min(deadline, nearest.get(version, deadline))
    return sorted(by_age, key=lambda v: nearest.get(v, state.limits.num_steps))


def _quota(state: State, version: int) -> int:
    """Groups that the update policy allows `version`: `batches_per_version` batches at one live version.

    Version 0 gets as many as the bound allows, so that the trainer works while the next version generates.
    """
    limits = state.limits
    if limits.batches_per_version is None:
        return limits.num_steps * limits.batch_size
    most = (limits.batches_per_version if version else limits.max_staleness + 1) * limits.batch_size
    if version == state.admission_version:
        return most - state.num_admitted_at_version
    is_next = state.admission_version is None or version > state.admission_version
    num_evaluating = 0 if state.evaluation is None else state.evaluation.num_unfinished
    return most if is_next and state.num_unfinished.total() == num_evaluating else 0
