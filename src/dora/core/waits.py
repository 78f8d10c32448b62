"""Who waits for whom, and for what: the wait-for graph of a run, read from the orchestrator's state.

From the next step it leads to groups, to their requests, to engines, and ends at stations that work: every
wait has an owner. Nothing here decides. Of what may be many, a few are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dora.core import bound
from dora.core.engines import Engine
from dora.core.records import GroupId, RequestId
from dora.core.state import Request, State
from dora.core.wording import counted, nth

MAX_NAMED = 8  # of one kind, behind one wait
TRAINER, REWARDS, DATASET = "trainer", "rewards", "dataset"
ENGINES = "engines"  # whichever of them is the first
ADMISSION = "admission"


class Wait(NamedTuple):
    """`who` goes on once it has `what` from `on`.

    `since_s` is on the run's clock; None: the core does not keep it.
    """

    who: str
    on: str
    what: str
    since_s: float | None = None


def waits(state: State) -> list[Wait]:
    """All waits of a run that goes, those of the next step first; empty once the run is over."""
    groups = _next_groups(state)
    requests = [request for group in groups for request in _unfinished(state, group)]
    requests += _held_out(state)
    return [
        *_of_step(state, groups),
        *(wait for group in groups for wait in _of_group(state, group)),
        *_of_evaluation(state),
        *(wait for request in requests for wait in _of_request(state, state.requests[request])),
        *(wait for engine in state.engines.values() for wait in _of_engine(state, engine)),
        *_of_admission(state),
    ]


def owners(found: Sequence[Wait]) -> list[str]:
    """For whom the first of these waits, in the end: those behind it that wait for nobody themselves.

    None, though there are waits: they wait for each other.
    """
    behind: dict[str, list[str]] = {}
    for wait in found:
        behind.setdefault(wait.who, []).append(wait.on)
    reached = dict.fromkeys(wait.who for wait in found[:1])
    todo = [*reached]
    while todo:
        for on in behind.get(todo.pop(0), ()):
            if on not in reached:
                reached[on] = None
                todo.append(on)
    return [node for node in reached if node not in behind]


def _of_step(state: State, groups: Sequence[GroupId]) -> Iterator[Wait]:
    """What the next step waits for, or the end of the run."""
    step, limits = _next(state), state.limits
    is_idle = False
    if state.is_trainer_lost:
        yield Wait(step, TRAINER, "another one takes its place")
    elif state.publishing is not None:
        yield Wait(step, TRAINER, f"version {state.publishing} is published")
    elif state.training is not None:
        yield Wait(step, TRAINER, f"step {nth(state.training)} is trained")
    elif state.redo:
        yield Wait(step, TRAINER, f"step {nth(next(iter(state.redo)))} is redone")
    elif state.newest in state.batches:
        yield Wait(step, TRAINER, f"step {state.newest} is trained")
        working = (e for e in map(state.engines.__getitem__, state.colocated) if not e.is_paused)
        yield from (Wait(TRAINER, _engine(e.id), "the device that they share") for e in working)
    else:
        is_idle = not state.is_trained
    if state.next_step >= limits.num_steps:
        if state.is_trained and state.evaluation is not None:
            yield Wait(step, _evaluation(state.evaluation.version), "it ends")
        return
    num_lacking = limits.batch_size - len(state.committed)
    if is_idle:
        yield Wait(TRAINER, step, f"{num_lacking} more of its {limits.batch_size} groups")
    for group in groups:
        is_due = state.groups[group].deadline <= state.next_step
        what = "it must be among its groups" if is_due else f"it lacks {counted(num_lacking, 'group')}"
        yield Wait(step, _group(group), what, state.stall_since_s if group == state.stall_group else None)
    if state.open.total() < num_lacking:
        yield Wait(
            step, ADMISSION, f"it lacks {counted(num_lacking, 'group')}, and {state.open.total()} are open"
        )


def _of_group(state: State, group: GroupId) -> Iterator[Wait]:
    requests = _unfinished(state, group)
    yield from (Wait(_group(group), _request(request), "its last token") for request in requests)
    if not requests:
        yield Wait(_group(group), REWARDS, "its answers are judged")


def _of_request(state: State, request: Request) -> Iterator[Wait]:
    who, version = _request(request.id), request.version
    if (move := state.moves.get(request.id)) is not None:
        yield Wait(who, _engine(move.destination), f"it takes it over from engine {move.source}")
    elif request.engine is not None:
        yield Wait(who, _engine(request.engine), f"tokens of version {version}, {request.num_tokens} so far")
    elif coming := _some(state.coming.get(version, ())):
        yield from (Wait(who, _load(version, engine), "a row there") for engine in coming)
    elif holders := _some(state.holders.get(version, ())):
        yield from (Wait(who, _engine(engine), f"a row for version {version}") for engine in holders)
    elif version not in state.store:
        yield Wait(who, TRAINER, f"version {version} is published")
    else:
        yield Wait(who, ENGINES, f"one that takes version {version}")


def _of_evaluation(state: State) -> Iterator[Wait]:
    run = state.evaluation
    if run is None:
        return
    who = _evaluation(run.version)
    yield from (Wait(who, _request(request), "its last token") for request in _held_out(state))
    if run.judging:
        yield Wait(who, REWARDS, f"{len(run.judging)} prompts are judged")
    if run.num_left:
        yield Wait(who, ENGINES, f"rows for {run.num_left} more answers")


def _of_engine(state: State, engine: Engine) -> Iterator[Wait]:
    """Loads wait, and whole engines for the trainer; an engine that decodes waits for nobody."""
    name = _engine(engine.id)
    if engine.loading is not None:
        yield Wait(_load(engine.loading, engine.id), name, "it takes the weights", engine.load_since_s)
    if engine.wanted is not None:
        what = "a free slot" if engine.clearing is None else f"its requests of version {engine.clearing} go"
        yield Wait(_load(engine.wanted, engine.id), name, what)
    if engine.id in state.line and state.newest is not None:
        before = ((state.engines[other].loading, other) for other in _some(state.loaders))
        loads = [_load(version, other) for version, other in before if version is not None]
        yield from (Wait(_load(state.newest, engine.id), load, "its turn") for load in loads)
    if engine.is_paused:
        yield Wait(name, TRAINER, "the device that they share")
    if engine.is_leaving and not engine.is_empty:
        yield Wait(f"the leave of {name}", name, f"{len(engine.requests)} requests end or move")


def _of_admission(state: State) -> Iterator[Wait]:
    """Why no group is admitted now, if none is."""
    if state.next_step >= state.limits.num_steps:
        return
    held = max((version for version in state.holders if version in state.store), default=None)
    newest = state.newest
    if newest is None or state.is_redoing:
        yield Wait(ADMISSION, TRAINER, f"version {state.redo_until} is published")
        return
    if not state.prompts:
        yield Wait(ADMISSION, DATASET, f"{state.num_fetching} prompts")
        return
    num_admissible = 0 if held is None else bound.num_admissible(state, held)
    coming = [] if held == newest else _some(state.coming.get(newest, ()))
    if held == newest and not num_admissible:
        yield Wait(ADMISSION, _next(state), f"the staleness bound leaves no place at version {held}")
    elif coming:
        yield from (Wait(ADMISSION, _load(newest, engine), "a version to begin with") for engine in coming)
    else:
        what = f"a free row for version {held}" if num_admissible else f"one that takes version {newest}"
        yield Wait(ADMISSION, ENGINES, what)


def _next_groups(state: State) -> list[GroupId]:
    """The first groups that the next step may get, nearest deadline first, of those without rewards."""
    if state.next_step >= state.limits.num_steps:
        return []
    num_lacking = state.limits.batch_size - len(state.committed)
    in_order = (group for term in sorted(state.unscored) for group in state.unscored[term])
    return list(islice(in_order, min(num_lacking, MAX_NAMED)))


def _unfinished(state: State, group: GroupId) -> list[RequestId]:
    return sorted(state.groups[group].unfinished)[:MAX_NAMED]


def _held_out(state: State) -> list[RequestId]:
    """Some held-out requests that were begun and are not at their end."""
    run, rule = state.evaluation, state.limits.evaluation
    if run is None or rule is None:
        return []
    answers = (RequestId(*prompt, k) for prompt in run.unfinished for k in range(rule.num_answers))
    return list(islice((request for request in answers if request in state.requests), MAX_NAMED))


def _some(engines: Iterable[int]) -> list[int]:
    return list(islice(engines, MAX_NAMED))


def _next(state: State) -> str:
    is_there = state.next_step < state.limits.num_steps
    return f"step {nth(state.next_step)}" if is_there else "the end of the run"


def _group(group: GroupId) -> str:
    return f"group {group}"


def _request(request: RequestId) -> str:
    return f"held-out answer {request.row}/{request.sibling}" if request.is_held_out else f"request {request}"


def _engine(engine: int) -> str:
    return f"engine {engine}"


def _load(version: int, engine: int) -> str:
    return f"version {version} on engine {engine}"


def _evaluation(version: int) -> str:
    return f"the evaluation of version {version}"
