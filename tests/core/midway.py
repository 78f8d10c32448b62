"""A run in its middle: engines that hold versions and decode requests, put together by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dora.core.engines import Engine
from dora.core.events import EngineJoined
from dora.core.group import Group
from dora.core.records import GroupId, Limits, RequestId
from dora.core.state import Request, State
from dora.sim.checker import Ledger


def midway(limits: Limits, newest: int) -> State:
    """All versions up to the newest are stored; the step that trains the newest comes next."""
    store = {version: f"v{version}" for version in range(newest + 1)}
    return State(limits, newest=newest, next_step=newest, store=store)


def engine(state: State, engine: int, rows: int, held: Iterable[int], slots: int = 1, **facts: Any) -> Engine:
    """One more engine; `facts` are further fields of it."""
    joined = Engine(engine, rows, slots, held=set(held), **facts)
    state.add(joined)
    if joined.is_leaving:
        state.leaving[joined.id] = None
    return joined


def running(
    state: State, engine: int, version: int, *rows: int, num_tokens: int = 0, siblings: Iterable[int] = ()
) -> None:
    """The engine decodes these dataset rows: the named siblings of each, or all."""
    on = state.engines[engine]
    for request in _admit(state, version, rows, siblings):
        state.requests[request].num_tokens = num_tokens
        state.seat(request, on, version)
    state.touch(on)


def waiting(state: State, version: int, *rows: int, siblings: Iterable[int] = ()) -> None:
    """These dataset rows wait for a row on an engine that holds the version."""
    for request in _admit(state, version, rows, siblings):
        state.wait(request, version)


def prompts(state: State, first: int, count: int) -> None:
    """The dataset has handed out so many prompts; those before `first` were admitted."""
    state.prompts.extend((index, GroupId(0, index)) for index in range(first, first + count))
    state.next_index = first + count


def ledger_of(state: State) -> Ledger:
    """A checker that has seen what led to this state, as far as it matters from here on."""
    ledger = Ledger(state.limits)
    ledger.store = set(state.store)
    ledger.next_step, ledger.num_committed = state.next_step, len(state.committed)
    ledger.steps.num_trained = state.newest or 0
    for engine in state.engines.values():
        ledger.hear(EngineJoined(engine.id, engine.rows, engine.slots, engine.is_colocated))
        seen = ledger.seats.engines[engine.id]
        seen.held = set(engine.held)
        seen.is_draining, seen.is_paused = engine.is_leaving, engine.is_paused
        ledger.seats.copies.update(engine.held)
    for group in state.groups.values():
        siblings = {RequestId(*group.id, k) for k in range(state.limits.group_size)}
        ledger.version_of[group.id], ledger.deadline_of[group.id] = group.version, group.deadline
        ledger.unfinished[group.id] = len(group.unfinished)
        ledger.finished |= dict.fromkeys(siblings - group.unfinished, group.version)
        ledger.pins[group.version] += len(group.unfinished)
        ledger.open[group.deadline] += 1
        ledger.live[group.version] += 1
    for request, version in ((r, q.version) for r, q in state.requests.items() if q.engine is not None):
        on = ledger.seats.engines[state.requests[request].engine or 0]
        on.seats[request] = version
        on.num_of[version] += 1
        ledger.seats.owner[request] = on
        ledger.seats.begun.add(request)
    ledger.next_index = state.prompts[0][0] if state.prompts else state.next_index
    return ledger


def _admit(state: State, version: int, rows: Iterable[int], siblings: Iterable[int]) -> list[RequestId]:
    """The groups are admitted, if they were not; siblings that are never named have finished."""
    named = list(siblings) or range(state.limits.group_size)
    requests = [RequestId(0, row, sibling) for row in rows for sibling in named]
    for request in requests:
        if request.group not in state.groups:
            _open(state, request.group, version)
        state.groups[request.group].unfinished.add(request)
        state.requests[request] = Request(request, version)
        state.pin(version, 1)
    return requests


def _open(state: State, group: GroupId, version: int) -> None:
    deadline = state.limits.deadline(version, state.aging.lowered)
    state.groups[group] = Group(group, group.row, version, deadline, set())
    state.unscored.setdefault(state.groups[group].term, {})[group] = None
    state.open[deadline] += 1
    state.num_admitted += 1
    state.next_index = max(state.next_index, group.row + 1)
    if state.current is None or version > state.current:
        state.current, state.num_admitted_current = version, 0
    state.num_admitted_current += version == state.current
