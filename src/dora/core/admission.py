"""Admission: which prompt is generated at which version, and when.

Prompts are admitted in dataset order, as soon as rows are free for them: later admission would leave rows
empty, and earlier admission would only make samples staler. The newest version comes first; older versions
get only rows of engines that keep them.
"""

from __future__ import annotations

from dora.core.actions import Action, Admit, FetchPrompts
from dora.core.bound import cached_num_admissible, deadline_at
from dora.core.state import GroupRecord, RequestRecord, State
from dora.core.types import RequestId
from dora.core.weight_sync import newest_loaded


def admit(state: State) -> list[Action]:
    """Admit groups while rows are free and the staleness bound holds."""
    if state.next_step >= state.limits.num_steps or not state.prompts:
        return []
    if state.is_redoing_steps or state.is_only_evaluating:
        return []
    actions: list[Action] = []
    group_size = state.limits.group_size
    for version in sorted(state.admission_rows, reverse=True):
        if not _may_admit_at(state, version):
            continue
        num_rows = state.admission_rows[version] - state.num_waiting(version)
        if num_rows <= 0:
            continue
        num_groups = min(cached_num_admissible(state, version), -(-num_rows // group_size))
        for _ in range(min(num_groups, len(state.prompts))):
            actions.append(_admit_next(state, version))
    return actions


def fetch_prompts(state: State) -> list[Action]:
    """Keep between half a batch and one batch of prompts available."""
    if state.next_step >= state.limits.num_steps:
        return []
    count = state.limits.batch_size - len(state.prompts) - state.num_fetching
    if 2 * count < state.limits.batch_size or count == 0:
        return []
    state.num_fetching += count
    return [FetchPrompts(count)]


def _may_admit_at(state: State, version: int) -> bool:
    """Whether new groups may start on `version`, rows and bound permitting."""
    if version not in state.stored_versions:
        return False
    if state.limits.breaks_c1 and version != newest_loaded(state):
        return False
    return not _is_kept_beside_newest(state, version) or _may_fill(state, version)


def _is_kept_beside_newest(state: State, version: int) -> bool:
    """Whether an engine keeps this older version while others hold, or load, the newest.

    While the first engine is still loading the newest version, no older version is filled, so that the next
    groups start on the newest.
    """
    newest = state.newest_published
    return version != newest and (newest in state.holders or newest in state.pending_holders)


def _may_fill(state: State, version: int) -> bool:
    """Whether free rows of an engine that keeps an older version may be filled with it; not if it expires."""
    limits = state.limits
    is_later = deadline_at(state, version) > state.next_step
    return is_later and not (limits.is_static or "fill" in limits.ablations or limits.batches_per_version)


def _admit_next(state: State, version: int) -> Action:
    index, group_id = state.prompts.popleft()
    deadline = deadline_at(state, version)
    siblings = [RequestId(*group_id, k) for k in range(state.limits.group_size)]
    group = state.groups[group_id] = GroupRecord(group_id, index, version, deadline, set(siblings))
    for request in siblings:
        state.requests[request] = RequestRecord(request, version)
        state.enqueue(request, version)
    state.num_open[deadline] += 1
    state.admissible_cache.clear()
    state.unscored.setdefault(group.cohort, {})[group_id] = None
    state.pin(version, len(siblings))
    state.num_admitted += 1
    if version != state.admission_version:
        state.admission_version, state.num_admitted_at_version = version, 0
        if state.limits.batches_per_version is not None:  # the one live version, for all engines
            state.load_candidates.update(dict.fromkeys(state.engines))
    state.num_admitted_at_version += 1
    return Admit(group_id, index, version, deadline)
