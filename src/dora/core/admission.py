"""Which prompt gets which version, and when: a group is admitted only if the bound still holds.

Prompts are admitted in dataset order, as many as there are rows to start them (later would
leave rows empty, earlier would only age them): at the newest version first, and at older ones
only for rows of engines that keep these. `slack` groups fewer than the bound allows are open,
so that places are left for stragglers to be passed.
"""

from __future__ import annotations

from dora.core.actions import Action, Admit, Fetch
from dora.core.bound import admissible, deadline_at
from dora.core.group import Group
from dora.core.records import RequestId
from dora.core.renewing import front
from dora.core.state import Request, State


def admit(state: State) -> list[Action]:
    """Admit groups while rows are free and every open group keeps a place before its deadline."""
    if state.next_step >= state.limits.num_steps or not state.prompts or state.is_redoing:
        return []
    orders: list[Action] = []
    size = state.limits.group_size
    for version in sorted(state.fresh_rows, reverse=True):
        is_kept = _is_kept(state, version)
        is_behind = state.limits.breaks_c1 and version != front(state)
        if version not in state.store or is_behind or (is_kept and not _may_fill(state, version)):
            continue
        room = state.fresh_rows[version] - state.num_waiting(version)
        if room <= 0:
            continue
        num_groups = min(admissible(state, version), -(-room // size))
        for _ in range(min(num_groups, len(state.prompts))):
            orders.append(_admit(state, version))
    return orders


def fetch(state: State) -> list[Action]:
    """Keep between half a batch and one batch of prompts at hand."""
    if state.next_step >= state.limits.num_steps:
        return []
    count = state.limits.batch_size - len(state.prompts) - state.num_fetching
    if 2 * count < state.limits.batch_size or count == 0:
        return []
    state.num_fetching += count
    return [Fetch(count)]


def _is_kept(state: State, version: int) -> bool:
    """Whether an engine keeps this old version beside or before the newest, which others have.

    While the newest is on its way to its first engine, nobody is served with another: its first
    group is worth that wait.
    """
    newest = state.newest
    return version != newest and (newest in state.holders or newest in state.coming)


def _may_fill(state: State, version: int) -> bool:
    """Rows of an engine that keeps an old version may be filled with it, unless it is about to expire."""
    limits = state.limits
    is_later = deadline_at(state, version) > state.next_step
    return is_later and not (limits.is_static or "fill" in limits.without or limits.batches_per_version)


def _admit(state: State, version: int) -> Action:
    index, group_id = state.prompts.popleft()
    deadline = deadline_at(state, version)
    siblings = [RequestId(*group_id, k) for k in range(state.limits.group_size)]
    group = state.groups[group_id] = Group(group_id, index, version, deadline, set(siblings))
    for request in siblings:
        state.requests[request] = Request(request, version)
        state.wait(request, version)
    state.open[deadline] += 1
    state.admissible.clear()
    state.unscored.setdefault(group.term, {})[group_id] = None
    state.pin(version, len(siblings))
    state.num_admitted += 1
    if version != state.current:
        state.current, state.num_admitted_current = version, 0
        if state.limits.batches_per_version is not None:  # the one live version, for all engines
            state.touched.update(dict.fromkeys(state.engines))
    state.num_admitted_current += 1
    return Admit(group_id, index, version, deadline)
