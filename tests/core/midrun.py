"""States of a run in progress, with engines that hold versions and decode requests, built by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dora.core.actions import Admit
from dora.core.events import EngineJoined, Loaded, PromptsFetched, Published
from dora.core.state import EngineRecord, GroupRecord, RequestRecord, State
from dora.core.types import GroupId, Limits, RequestId
from dora.sim.checker import Checker


def request(row: int, sibling: int = 0) -> RequestId:
    """A request of the first epoch."""
    return RequestId(0, row, sibling)


def state_at(limits: Limits, newest: int) -> State:
    """All versions up to `newest` are stored; the step that trains `newest` comes next."""
    store = {version: f"v{version}" for version in range(newest + 1)}
    return State(limits, newest_published=newest, next_step=newest, stored_versions=store)


def state_with_tail(**changes: Any) -> State:
    """Engines 0 and 1 have one request of version 0 each; engine 2 is full of version 1, the newest."""
    limits: dict[str, Any] = {"num_steps": 20, "batch_size": 8, "group_size": 1, "max_staleness": 2}
    state = state_at(Limits(**limits, **changes), newest=1)
    for number, version in enumerate((0, 0, 1)):
        add_engine(state, number, rows=4, loaded={version}, row_tokens_per_s=10.0)
    add_running(state, 0, 0, 0, num_tokens=100)
    add_running(state, 1, 0, 1, num_tokens=120)
    add_running(state, 2, 1, 2, 3, 4, 5, num_tokens=10)
    state.costs.mean_response_tokens = 200.0
    state.load_candidates.clear()
    return state


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


def checker_of(state: State, num_prompts: int | None) -> Checker:
    """A checker in the state that a run leading to `state` would have left it in."""
    checker, newest = Checker(state.limits, num_prompts), state.newest_published or 0
    versions, groups, steps = checker.audit.versions, checker.groups, checker.steps
    checker.store = set(state.stored_versions)
    checker.next_step, checker.num_committed = state.next_step, len(state.committed)
    steps.num_trained, steps.batches = newest, [()] * newest
    for version in range(newest + 1):
        versions.observe(Published(version, f"v{version}"))
    for engine in state.engines.values():
        checker.observe(EngineJoined(engine.id, engine.num_rows, engine.num_slots, engine.is_colocated))
        for version in engine.loaded:
            versions.observe(Loaded(engine.id, version, f"v{version}"))
        seen = checker.fleet.engines[engine.id]
        seen.is_draining, seen.is_paused = engine.is_draining, engine.is_paused
    groups.observe(PromptsFetched(0, tuple(GroupId(0, index) for index in range(state.next_index))))
    groups.num_admitted = state.prompts[0][0] if state.prompts else state.next_index
    for group in state.groups.values():
        siblings = {RequestId(*group.id, k) for k in range(state.limits.group_size)}
        versions.observe(Admit(group.id, group.index, group.version, group.deadline))
        groups.admitted[group.id], groups.deadlines[group.id] = group.version, group.deadline
        groups.finished |= siblings - group.unfinished
        checker.open_groups.add(group.id)
        checker.pins[group.version] += len(group.unfinished)
        checker.num_open[group.deadline] += 1
        checker.num_live[group.version] += 1
    for request, record in state.requests.items():
        if record.engine is not None:
            on = checker.fleet.engines[record.engine]
            on.running[request] = record.version
            versions.owners[request] = on.id
            checker.fleet.started.add(request)
    assert checker.audit.findings == []
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
