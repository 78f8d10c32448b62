"""Which prompt gets which version, and when: a group is admitted only if the bound still holds.

Prompts are admitted in dataset order, as many as there are rows to start them (later would
leave rows empty, earlier would only age them), at the newest version that an engine holds.
"""

from __future__ import annotations

from collections import deque

from dora.core.actions import Action, Admit, Fetch
from dora.core.records import RequestId
from dora.core.state import Group, Request, State, bound_holds


def admit(state: State) -> list[Action]:
    """Admit groups while rows are free and every open group keeps a place before its deadline."""
    version = admission_version(state)
    if version is None or state.next_step >= state.limits.num_steps:
        return []
    orders: list[Action] = []
    room = _free_rows(state, version)
    deadline = state.limits.deadline(version)
    while room > 0 and state.prompts and _has_place(state, deadline):
        index, group_id = state.prompts.popleft()
        siblings = [RequestId(*group_id, k) for k in range(state.limits.group_size)]
        state.groups[group_id] = Group(group_id, index, version, deadline, set(siblings))
        state.requests.update((r, Request(r, version)) for r in siblings)
        state.waiting.setdefault(version, deque()).extend(siblings)
        state.open[deadline] += 1
        state.unfinished[version] += len(siblings)
        state.num_admitted += 1
        room -= len(siblings)
        orders.append(Admit(group_id, index, version, deadline))
    return orders


def fetch(state: State) -> list[Action]:
    """Keep one batch of prompts at hand."""
    if state.next_step >= state.limits.num_steps:
        return []
    count = state.limits.batch_size - len(state.prompts) - state.num_fetching
    if count <= 0:
        return []
    state.num_fetching += count
    return [Fetch(count)]


def admission_version(state: State) -> int | None:
    """The newest version, unless no engine can hold it yet: then the newest one held and stored.

    None while the newest is on its way to an engine, for its first group is worth that wait.
    """
    newest = state.newest
    if newest is None:
        return None
    engines = state.engines.values()
    if any(e.loading == newest for e in engines) and not any(newest in e.held for e in engines):
        return None
    held = (v for e in engines if e.draining_for is None for v in e.held)
    return max((v for v in held if v in state.store), default=None)


def _free_rows(state: State, version: int) -> int:
    """Rows that could start a request of `version` now, less those already waiting for one."""
    free = sum(e.free_rows for e in state.holders(version) if e.draining_for is None)
    return free - len(state.waiting.get(version, ()))


def _has_place(state: State, deadline: int) -> bool:
    opened = state.open.copy()
    opened[deadline] += 1
    return bound_holds(opened, state.next_step, len(state.committed), state.limits)
