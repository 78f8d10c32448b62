"""States of a run in progress, with engines that hold versions and decode requests, built by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dora.core.events import EngineJoined
from dora.core.state import EngineRecord, GroupRecord, RequestRecord, State
from dora.core.types import GroupId, Limits, RequestId
from dora.sim.checker import Checker


def state_at(limits: Limits, newest: int) -> State:
    """All versions up to `newest` are stored; the step that trains `newest` comes next."""
    store = {version: f"v{version}" for version in range(newest + 1)}
    return State(limits, newest_published=newest, next_step=newest, stored_versions=store)


def add_engine(
    state: State, engine: int, rows: int, loaded: Iterable[int], slots: int = 1, **fields: Any
) -> EngineRecord:
    """Add an engine with these loaded versions; `fields` are further fields of its record."""
    added = EngineRecord(engine, rows, slots, loaded=set(loaded), **fields)
    state.add_engine(added)
    if added.is_draining:
        state.draining[added.id] = None
    return added


def add_running(
    state: State, engine: int, version: int, *rows: int, num_tokens: int = 0, siblings: Iterable[int] = ()
) -> None:
    """The engine decodes these dataset rows: the given siblings of each, or all."""
    on = state.engines[engine]
    for request in _add_requests(state, version, rows, siblings):
        state.requests[request].num_tokens = num_tokens
        state.assign(request, on, version)
    state.mark_dirty(on)


def add_waiting(state: State, version: int, *rows: int, siblings: Iterable[int] = ()) -> None:
    """These dataset rows wait for a row on an engine that holds the version."""
    for request in _add_requests(state, version, rows, siblings):
        state.enqueue(request, version)


def add_prompts(state: State, first: int, count: int) -> None:
    """The dataset has delivered `count` prompts from position `first` on; those before were admitted."""
    state.prompts.extend((index, GroupId(0, index)) for index in range(first, first + count))
    state.next_index = first + count


def checker_of(state: State) -> Checker:
    """A checker in the state that a run leading to `state` would have left it in."""
    checker = Checker(state.limits)
    checker.store = set(state.stored_versions)
    checker.next_step, checker.num_committed = state.next_step, len(state.committed)
    checker.steps.num_trained = state.newest_published or 0
    for engine in state.engines.values():
        checker.observe(EngineJoined(engine.id, engine.num_rows, engine.num_slots, engine.is_colocated))
        seen = checker.fleet.engines[engine.id]
        seen.held = set(engine.loaded)
        seen.is_draining, seen.is_paused = engine.is_draining, engine.is_paused
        checker.fleet.num_holders.update(engine.loaded)
    for group in state.groups.values():
        siblings = {RequestId(*group.id, k) for k in range(state.limits.group_size)}
        checker.version_of[group.id], checker.deadline_of[group.id] = group.version, group.deadline
        checker.num_unfinished[group.id] = len(group.unfinished)
        checker.finished |= dict.fromkeys(siblings - group.unfinished, group.version)
        checker.pins[group.version] += len(group.unfinished)
        checker.num_open[group.deadline] += 1
        checker.num_live[group.version] += 1
    for request, version in ((r, q.version) for r, q in state.requests.items() if q.engine is not None):
        on = checker.fleet.engines[state.requests[request].engine or 0]
        on.running[request] = version
        on.num_rows_of[version] += 1
        checker.fleet.owner[request] = on
        checker.fleet.started.add(request)
    checker.next_index = state.prompts[0][0] if state.prompts else state.next_index
    return checker


def _add_requests(
    state: State, version: int, rows: Iterable[int], siblings: Iterable[int]
) -> list[RequestId]:
    """Admit the groups if needed; siblings that are never given count as finished."""
    given = list(siblings) or range(state.limits.group_size)
    requests = [RequestId(0, row, sibling) for row in rows for sibling in given]
    for request in requests:
        if request.group not in state.groups:
            _admit(state, request.group, version)
        state.groups[request.group].unfinished.add(request)
        state.requests[request] = RequestRecord(request, version)
        state.pin(version, 1)
    return requests


def _admit(state: State, group: GroupId, version: int) -> None:
    deadline = state.limits.deadline(version, state.adaptive_staleness.reduction)
    state.groups[group] = GroupRecord(group, group.row, version, deadline, set())
    state.unscored.setdefault(state.groups[group].cohort, {})[group] = None
    state.num_open[deadline] += 1
    state.num_admitted += 1
    state.next_index = max(state.next_index, group.row + 1)
    if state.admission_version is None or version > state.admission_version:
        state.admission_version, state.num_admitted_at_version = version, 0
    state.num_admitted_at_version += version == state.admission_version
