"""What each fact changes in the state.

A fact that contradicts the state raises ProtocolError with the event, the state and the rule.
Orders that follow from one fact alone (score, fail, publish) are given here; everything that
weighs one thing against another is a rule of its own file.
"""

from __future__ import annotations

import bisect
from collections import deque
from functools import singledispatch
from typing import Protocol

from dora.core.actions import Abort, Action, Fail, Filter, Publish, Score
from dora.core.events import (
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    Progressed,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Trained,
    Woken,
)
from dora.core.records import ProtocolError, RequestId
from dora.core.state import Engine, Group, State, take_one


def hear(state: State, event: Event) -> list[Action]:
    """Apply one fact; returns the orders that follow from it alone."""
    return _hear(event, state)


def _require(condition: bool, event: object, rule: str, found: object) -> None:
    if not condition:
        raise ProtocolError(f"{event}: {rule}; the state says {found!r}")


class _OfEngine(Protocol):
    @property
    def engine(self) -> int: ...


def _engine(state: State, event: _OfEngine) -> Engine:
    engine = state.engines.get(event.engine)
    if engine is None:
        raise ProtocolError(f"{event}: the engine must have joined; the state knows {sorted(state.engines)}")
    return engine


def _awaited(state: State, event: GroupScored | GroupUnscorable) -> Group:
    group = state.groups.get(event.group)
    if group is None or group.unfinished or group.scored:
        raise ProtocolError(f"{event}: the group was given to the rewarder; the state says {group}")
    return group


def _was_aborting(engine: Engine, request: RequestId) -> bool:
    """Free the row of a request whose abort was ordered, however it ended in the end."""
    version = engine.aborting.pop(request, None)
    if version is None:
        return False
    take_one(engine.running, version)
    return True


def _leave(state: State, engine: Engine, request: RequestId) -> Group:
    """The request has left its engine for good."""
    take_one(engine.running, engine.requests.pop(request))
    return _forget(state, request)


def _forget(state: State, request: RequestId) -> Group:
    take_one(state.unfinished, state.requests.pop(request).version)
    group = state.groups[request.group]
    group.unfinished.discard(request)
    return group


def _fail(state: State, group: Group, reason: str) -> list[Action]:
    """One failed sibling fails its group; the others are given up wherever they are."""
    aborts: dict[int, list[RequestId]] = {}
    for request_id in sorted(group.unfinished):
        engine_id = state.requests[request_id].engine
        if engine_id is None:
            state.waiting[group.version].remove(request_id)
        else:
            engine = state.engines[engine_id]
            engine.aborting[request_id] = engine.requests.pop(request_id)
            aborts.setdefault(engine_id, []).append(request_id)
        _forget(state, request_id)
    _end(state, group)
    state.num_failed += 1
    orders: list[Action] = [Abort(engine_id, tuple(ids)) for engine_id, ids in sorted(aborts.items())]
    return [*orders, Fail(group.id, reason)]


def _end(state: State, group: Group) -> None:
    """The group ends untrained and gives its place back."""
    del state.groups[group.id]
    state.close(group.deadline)


@singledispatch
def _hear(event: object, state: State) -> list[Action]:
    raise ProtocolError(f"{event!r} is not a fact")


@_hear.register
def _(event: EngineJoined, state: State) -> list[Action]:
    _require(event.engine not in state.engines, event, "an engine joins once", event.engine)
    _require(event.rows > 0 and event.slots > 0, event, "an engine has rows and version slots", event)
    state.engines[event.engine] = Engine(event.engine, event.rows, event.slots)
    return []


@_hear.register
def _(event: EngineLost, state: State) -> list[Action]:
    """Its requests begin again on their version, before all others that wait for it."""
    engine = _engine(state, event)
    del state.engines[event.engine]
    for request_id in reversed(engine.requests):
        request = state.requests[request_id]
        state.num_regenerated_tokens += request.num_tokens
        request.engine, request.num_tokens = None, 0
        state.waiting.setdefault(request.version, deque()).appendleft(request_id)
    return []


@_hear.register
def _(event: PromptsFetched, state: State) -> list[Action]:
    _require(event.first_index == state.next_index, event, "the dataset has no gap", state.next_index)
    _require(len(event.groups) <= state.num_fetching, event, "prompts were asked for", state.num_fetching)
    at_hand = {group for _, group in state.prompts}
    known = [g for g in event.groups if g in state.groups or g in at_hand]
    _require(
        not known and len(set(event.groups)) == len(event.groups), event, "a group id is used once", known
    )
    state.prompts.extend(enumerate(event.groups, event.first_index))
    state.next_index += len(event.groups)
    state.num_fetching -= len(event.groups)
    return []


@_hear.register
def _(event: Progressed, state: State) -> list[Action]:
    engine = _engine(state, event)
    for request, num_tokens in event.lengths:
        if request in engine.requests:  # others were aborted while the report was under way
            state.requests[request].num_tokens = num_tokens
    return []


@_hear.register
def _(event: RequestFinished, state: State) -> list[Action]:
    engine = _engine(state, event)
    if _was_aborting(engine, event.request):
        return []
    version = engine.requests.get(event.request)
    _require(version is not None, event, "an engine finishes only what it was given", engine.requests)
    _require(event.version == version, event, "a request is finished by its own version (C1)", version)
    sources = {(c.version, c.digest) for c in event.chunks}
    published = {(event.version, state.store[event.version])}
    _require(sources == published, event, "every token comes from the published bytes (C1)", published)
    group = _leave(state, engine, event.request)
    return [] if group.unfinished else [Score(group.id)]


@_hear.register
def _(event: RequestFailed, state: State) -> list[Action]:
    engine = _engine(state, event)
    if _was_aborting(engine, event.request):
        return []
    _require(
        event.request in engine.requests, event, "an engine fails only what it was given", engine.requests
    )
    return _fail(state, _leave(state, engine, event.request), event.reason)


@_hear.register
def _(event: RequestsAborted, state: State) -> list[Action]:
    engine = _engine(state, event)
    _require(engine.aborting.keys() >= {*event.requests}, event, "the abort was ordered", engine.aborting)
    for request in event.requests:
        _was_aborting(engine, request)
    state.num_aborted_tokens += event.num_tokens
    return []


@_hear.register
def _(event: GroupScored, state: State) -> list[Action]:
    group = _awaited(state, event)
    _require(len(event.rewards) == state.limits.group_size, event, "one reward per sibling", group.id)
    if state.limits.filter_groups and len(set(event.rewards)) == 1:
        _end(state, group)
        state.num_filtered += 1
        return [Filter(group.id, "zero_variance")]
    group.scored = True
    bisect.insort(state.ready, (group.deadline, group.index, group.id))
    return []


@_hear.register
def _(event: GroupUnscorable, state: State) -> list[Action]:
    return _fail(state, _awaited(state, event), event.reason)


@_hear.register
def _(event: Trained, state: State) -> list[Action]:
    _require(event.step == state.training, event, "the step was ordered", state.training)
    state.training = None
    for group in state.batches.pop(event.step):
        del state.groups[group]
    state.num_trained += state.limits.batch_size
    state.publishing = event.step + 1
    return [Publish(state.publishing)]


@_hear.register
def _(event: Published, state: State) -> list[Action]:
    _require(event.version == state.publishing, event, "the publication was ordered", state.publishing)
    state.newest, state.publishing = event.version, None
    state.store[event.version] = event.digest
    return []


@_hear.register
def _(event: Loaded, state: State) -> list[Action]:
    engine = _engine(state, event)
    _require(event.version == engine.loading, event, "the load was ordered", engine.loading)
    stored = state.store.get(event.version)
    _require(event.digest == stored, event, "an engine holds the bytes that were published (C1)", stored)
    engine.loading = None
    engine.held.add(event.version)
    return []


@_hear.register
def _(event: Woken, state: State) -> list[Action]:
    return []
