"""What each fact changes in the state.

A fact that contradicts the state raises ProtocolError with the event, the state and the rule.
Orders that follow from one fact alone (score, fail, publish) are given here; everything that
weighs one thing against another is a rule of its own file.
"""

from __future__ import annotations

import bisect
from functools import singledispatch
from itertools import pairwise

from dora.core import evaluating, fleet, replacing, resuming, skipping
from dora.core.actions import Abort, Action, Fail, Filter, Score, Train
from dora.core.engines import Engine
from dora.core.events import (
    Event,
    GroupScored,
    GroupUnscorable,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    StepFailed,
    Trained,
    Woken,
)
from dora.core.fleet import engine_of, require
from dora.core.group import Group
from dora.core.indexes import take_one
from dora.core.records import ProtocolError, RequestId
from dora.core.state import State


def hear(state: State, event: Event) -> list[Action]:
    """Apply one fact; returns the orders that follow from it alone."""
    return _hear.registry.get(type(event), _hear)(event, state)  # a look-up is quicker than to dispatch


def _awaited(state: State, event: GroupScored | GroupUnscorable) -> Group:
    group = state.groups.get(event.group)
    if group is None or group.unfinished or group.scored:
        raise ProtocolError(f"{event}: the group was given to the rewarder; the state says {group}")
    return group


def _judged(state: State, event: GroupScored | GroupUnscorable) -> list[Action]:
    """A held-out prompt has its rewards, or will have none."""
    is_awaited = evaluating.is_awaited(state, event.group)
    require(is_awaited, event, "the prompt was given to the rewarder", state.evaluation)
    rule = state.limits.evaluation
    num_rewards = len(event.rewards) if isinstance(event, GroupScored) else None
    num_due = None if num_rewards is None or rule is None else rule.num_answers
    require(num_rewards == num_due, event, "one reward per answer", num_due)
    return evaluating.end_judging(state, event.group)


def _was_aborting(state: State, engine: Engine, request: RequestId) -> bool:
    """Free the row of a request whose abort was ordered, however it ended in the end."""
    version = engine.aborting.pop(request, None)
    if version is None:
        return False
    take_one(engine.running, version)
    state.touch(engine)
    return True


def _check_sources(state: State, event: RequestFinished) -> None:
    """C1; where it is broken on purpose, at least the order of versions, and their bytes."""
    if state.limits.breaks_c1 and not event.request.is_held_out:
        admitted = state.groups[event.request.group].version
        versions = [c.version for c in event.chunks]
        is_forward = all(a < b for a, b in pairwise([admitted - 1, *versions, event.version + 1]))
        require(is_forward, event, "segments are of ever newer versions, from its group's on", admitted)
        wrong = [c for c in event.chunks if state.store.get(c.version, c.digest) != c.digest]
        require(not wrong, event, "every token comes from published bytes", wrong)
        return
    sources = {(c.version, c.digest) for c in event.chunks}
    published = {(event.version, state.store[event.version])}
    require(sources == published, event, "every token comes from the published bytes (C1)", published)


def _leave(state: State, engine: Engine, request: RequestId) -> Group:
    """The request has left its engine for good."""
    if state.unseat(request, engine) in engine.running:
        state.touch_rows(engine)
    else:
        state.touch(engine)
    return _forget(state, request)


def _end_held_out(
    state: State, engine: Engine, request: RequestId, *, is_failed: bool = False
) -> list[Action]:
    state.unseat(request, engine)
    state.touch(engine)
    return evaluating.end_request(state, request, is_failed=is_failed)


def _forget(state: State, request: RequestId) -> Group:
    state.unpin(state.requests.pop(request).version)
    group = state.groups[request.group]
    group.unfinished.discard(request)
    return group


def _fail(state: State, group: Group, reason: str) -> list[Action]:
    """One failed sibling fails its group; the others are given up wherever they are."""
    aborts: dict[int, list[RequestId]] = {}
    for request_id in sorted(group.unfinished):
        engine_id = state.requests[request_id].engine
        if engine_id is None:
            state.wait_no_more(request_id, state.requests[request_id].version)
        else:
            engine = state.engines[engine_id]
            engine.aborting[request_id] = version = state.unseat(request_id, engine)
            engine.running[version] += 1  # until its end is confirmed
            state.touch(engine)
            aborts.setdefault(engine_id, []).append(request_id)
        _forget(state, request_id)
    _end(state, group)
    state.num_failed += 1
    orders: list[Action] = [Abort(engine_id, tuple(ids)) for engine_id, ids in sorted(aborts.items())]
    return [*orders, Fail(group.id, reason)]


def _end(state: State, group: Group) -> None:
    """The group ends untrained and gives its place back."""
    del state.groups[group.id]
    state.close(group)
    if group.version == state.current:
        state.num_admitted_current -= 1  # another may be admitted instead


@singledispatch
def _hear(event: object, state: State) -> list[Action]:
    raise ProtocolError(f"{event!r} is not a fact")


for _of_fleet in (
    fleet.joined,
    fleet.lost,
    fleet.drain_asked,
    fleet.left,
    fleet.paused,
    fleet.progressed,
    fleet.migrated,
    fleet.migration_failed,
    fleet.loaded,
    fleet.load_failed,
    replacing.lost,
    replacing.replaced,
    replacing.attested,
    resuming.resumed,
):
    _hear.register(_of_fleet)


@_hear.register
def _(event: PromptsFetched, state: State) -> list[Action]:
    require(event.first_index == state.next_index, event, "the dataset has no gap", state.next_index)
    require(len(event.groups) <= state.num_fetching, event, "prompts were asked for", state.num_fetching)
    at_hand = {group for _, group in state.prompts}
    known = [g for g in event.groups if g in state.groups or g in at_hand]
    require(
        not known and len(set(event.groups)) == len(event.groups), event, "a group id is used once", known
    )
    state.prompts.extend(enumerate(event.groups, event.first_index))
    state.next_index += len(event.groups)
    state.num_fetching -= len(event.groups)
    return []


@_hear.register
def _(event: RequestFinished, state: State) -> list[Action]:
    engine = engine_of(state, event)
    if _was_aborting(state, engine, event.request):
        return []
    version = engine.requests.get(event.request)
    require(version is not None, event, "an engine finishes only what it was given", engine.requests)
    require(event.version == version, event, "a request is finished by its own version (C1)", version)
    _check_sources(state, event)
    if event.request.is_held_out:
        return _end_held_out(state, engine, event.request)
    group = _leave(state, engine, event.request)
    group.finished_tokens += event.num_tokens
    group.longest_tokens = max(group.longest_tokens, event.num_tokens)
    state.costs.heard_answer(event.num_tokens)
    return [] if group.unfinished else [Score(group.id)]


@_hear.register
def _(event: RequestFailed, state: State) -> list[Action]:
    engine = engine_of(state, event)
    if _was_aborting(state, engine, event.request):
        return []
    require(
        event.request in engine.requests, event, "an engine fails only what it was given", engine.requests
    )
    if event.request.is_held_out:
        return _end_held_out(state, engine, event.request, is_failed=True)
    return _fail(state, _leave(state, engine, event.request), event.reason)


@_hear.register
def _(event: RequestsAborted, state: State) -> list[Action]:
    engine = engine_of(state, event)
    require(engine.aborting.keys() >= {*event.requests}, event, "the abort was ordered", engine.aborting)
    for request in event.requests:
        _was_aborting(state, engine, request)
    state.num_aborted_tokens += event.num_tokens
    return []


@_hear.register
def _(event: GroupScored, state: State) -> list[Action]:
    if event.group.is_held_out:
        return _judged(state, event)
    group = _awaited(state, event)
    require(len(event.rewards) == state.limits.group_size, event, "one reward per sibling", group.id)
    if state.limits.filter_groups and len(set(event.rewards)) == 1:
        _end(state, group)
        state.num_filtered += 1
        return [Filter(group.id, "zero_variance")]
    group.scored = True
    state.forget_unscored(group)
    bisect.insort(state.ready, (group.deadline, group.index, group.id))
    return []


@_hear.register
def _(event: GroupUnscorable, state: State) -> list[Action]:
    if event.group.is_held_out:
        return _judged(state, event)
    return _fail(state, _awaited(state, event), event.reason)


@_hear.register
def _(event: Trained, state: State) -> list[Action]:
    require(event.step == state.training, event, "the step was ordered", state.training)
    state.training = None
    if state.redo.pop(event.step, None) is not None:
        return replacing.publish(state, event.step + 1)
    groups = [state.groups.pop(group) for group in state.batches.pop(event.step)]
    oldest = event.step - min(group.version for group in groups)
    state.admissible.clear()  # it may lower the bound
    state.aging.hear(state.limits, event.step, oldest, event.ess, event.kl)
    state.divergence.hear(state.limits, event.step, event.kls)
    state.num_trained += state.limits.batch_size
    return replacing.publish(state, event.step + 1)


@_hear.register
def _(event: StepFailed, state: State) -> list[Action]:
    """It is repeated, with the same batch."""
    require(event.step == state.training, event, "the step was ordered", state.training)
    return [Train(event.step, state.redo.get(event.step) or state.batches[event.step])]


@_hear.register
def _(event: Published, state: State) -> list[Action]:
    is_due = event.version == state.publishing and not replacing.is_out(state, event.version)
    require(is_due, event, "the publication was ordered", state.publishing)
    state.newest, state.publishing = event.version, None
    state.store[event.version] = event.digest
    state.touched.update(dict.fromkeys(state.engines))
    state.is_rebalance_due |= "update" not in state.limits.without
    return [*skipping.skip(state), *evaluating.open_evaluation(state, event.version)]


@_hear.register
def _(event: Woken, state: State) -> list[Action]:
    return []
