"""The wait-for graph of a run, derived from the orchestrator's state; for display only.

It leads from the next step to groups, their requests and engines, and ends at components that are working.
Where many nodes would qualify, a few are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from dora.core import bound
from dora.core.state import EngineRecord, RequestRecord, State
from dora.core.types import GroupId, RequestId
from dora.core.weight_sync import newest_loaded
from dora.text import plural, step_number

MAX_LISTED = 8  # nodes of one kind, behind one node
TRAINER, REWARDS, DATASET, AGENTS = "trainer", "rewards", "dataset", "agents"
NO_AGENT: Mapping[RequestId, str] = {}
ENGINES = "engines"  # any of them
ADMISSION = "admission"


class WaitEdge(NamedTuple):
    """`waiter` continues once `target` provides `reason`, for example its last token.

    `since_s` is on the run's clock; None: the core does not record it.
    """

    waiter: str
    target: str
    reason: str
    since_s: float | None = None


def find_waits(state: State, agent_waits: Mapping[RequestId, str] = NO_AGENT) -> list[WaitEdge]:
    """All waits of a run, those of the next step first; empty once the run is over.

    `agent_waits`: requests whose episodes wait for an agent -> for what.
    """
    groups = _next_groups(state)
    requests = [request for group in groups for request in _unfinished(state, group)]
    requests += _held_out_requests(state)
    return [
        *_of_step(state, groups),
        *(wait for group in groups for wait in _of_group(state, group)),
        *_of_evaluation(state),
        *(wait for request in requests for wait in _of_request(state, state.requests[request], agent_waits)),
        *(wait for engine in state.engines.values() for wait in _of_engine(state, engine)),
        *_of_admission(state),
    ]


def find_root_causes(waits: Sequence[WaitEdge]) -> list[str]:
    """The nodes that the first wait depends on and that wait for nothing themselves.

    Empty although there are waits: they form a cycle.
    """
    targets: dict[str, list[str]] = {}
    for wait in waits:
        targets.setdefault(wait.waiter, []).append(wait.target)
    reached = dict.fromkeys(wait.waiter for wait in waits[:1])
    todo = [*reached]
    while todo:
        for target in targets.get(todo.pop(0), ()):
            if target not in reached:
                reached[target] = None
                todo.append(target)
    return [node for node in reached if node not in targets]


def _of_step(state: State, groups: Sequence[GroupId]) -> Iterator[WaitEdge]:
    """Waits of the next step, or of the end of the run."""
    step = _step_or_end(state)
    yield from _of_trainer(state, step)
    if state.next_step >= state.limits.num_steps:
        if state.is_training_done and state.evaluation is not None:
            yield WaitEdge(step, _evaluation_name(state.evaluation.version), "its end")
        return
    num_missing = state.limits.batch_size - len(state.committed)
    is_trainer_idle = not (
        state.is_trainer_lost
        or state.publishing_version is not None
        or state.training_step is not None
        or state.redo_batches
        or state.newest_published in state.batches
    )
    if is_trainer_idle and not state.is_training_done:
        yield WaitEdge(TRAINER, step, f"{num_missing} more of its {state.limits.batch_size} groups")
    for group in groups:
        is_due = state.groups[group].deadline <= state.next_step
        reason = "the group is at its deadline" if is_due else f"{plural(num_missing, 'group')} missing"
        since_s = state.stall_since_s if group == state.stall_group else None
        yield WaitEdge(step, _group_name(group), reason, since_s)
    num_open = state.num_open.total()
    if num_open < num_missing:
        yield WaitEdge(step, ADMISSION, f"{plural(num_missing, 'group')} missing, {num_open} open")


def _of_trainer(state: State, step: str) -> Iterator[WaitEdge]:
    """The step waits for the trainer's current work; a colocated trainer waits for engines to pause."""
    if state.is_trainer_lost:
        yield WaitEdge(step, TRAINER, "the replacement of the lost trainer")
    elif state.publishing_version is not None:
        yield WaitEdge(step, TRAINER, f"publication of version {state.publishing_version}")
    elif state.training_step is not None:
        yield WaitEdge(step, TRAINER, f"training of step {step_number(state.training_step)}")
    elif state.redo_batches:
        yield WaitEdge(step, TRAINER, f"repetition of step {step_number(next(iter(state.redo_batches)))}")
    elif state.newest_published is not None and state.newest_published in state.batches:
        yield WaitEdge(step, TRAINER, f"training of step {step_number(state.newest_published)}")
        engines = (state.engines[engine] for engine in state.colocated)
        yield from (
            WaitEdge(TRAINER, _engine_name(e.id), "the shared device") for e in engines if not e.is_paused
        )


def _of_group(state: State, group: GroupId) -> Iterator[WaitEdge]:
    requests = _unfinished(state, group)
    yield from (
        WaitEdge(_group_name(group), _request_name(request), "its last token") for request in requests
    )
    if not requests:
        yield WaitEdge(_group_name(group), REWARDS, "its rewards")


def _of_request(
    state: State, request: RequestRecord, agent_waits: Mapping[RequestId, str]
) -> Iterator[WaitEdge]:
    name, version = _request_name(request.id), request.version
    if request.id in agent_waits:
        yield WaitEdge(name, AGENTS, agent_waits[request.id])
    elif (migration := state.migrations.get(request.id)) is not None:
        yield WaitEdge(name, _engine_name(migration.destination), f"migration from engine {migration.source}")
    elif request.engine is not None:
        reason = f"tokens of version {version}, {request.num_tokens} so far"
        yield WaitEdge(name, _engine_name(request.engine), reason)
    elif pending := _first_few(state.pending_holders.get(version, ())):
        yield from (WaitEdge(name, _load_name(version, engine), "a row there") for engine in pending)
    elif holders := _first_few(state.holders.get(version, ())):
        yield from (WaitEdge(name, _engine_name(e), f"a row for version {version}") for e in holders)
    elif version not in state.stored_versions:
        yield WaitEdge(name, TRAINER, f"publication of version {version}")
    else:
        yield WaitEdge(name, ENGINES, f"an engine that loads version {version}")


def _of_evaluation(state: State) -> Iterator[WaitEdge]:
    evaluation = state.evaluation
    if evaluation is None:
        return
    name = _evaluation_name(evaluation.version)
    yield from (WaitEdge(name, _request_name(r), "its last token") for r in _held_out_requests(state))
    if evaluation.scoring_prompts:
        yield WaitEdge(name, REWARDS, f"the rewards of {plural(len(evaluation.scoring_prompts), 'prompt')}")
    if evaluation.num_not_started:
        yield WaitEdge(name, ENGINES, f"rows for {plural(evaluation.num_not_started, 'more response')}")


def _of_engine(state: State, engine: EngineRecord) -> Iterator[WaitEdge]:
    """Waits of loads, and of paused and draining engines; a decoding engine waits for nothing."""
    name = _engine_name(engine.id)
    if engine.loading is not None:
        load = _load_name(engine.loading, engine.id)
        yield WaitEdge(load, name, "the weights", engine.load_started_s)
    if engine.next_load is not None:
        is_evicting = engine.evicting is not None
        reason = f"the end of its requests of version {engine.evicting}" if is_evicting else "a free slot"
        yield WaitEdge(_load_name(engine.next_load, engine.id), name, reason)
    if engine.id in state.load_queue and state.newest_published is not None:
        load = _load_name(state.newest_published, engine.id)
        others = ((state.engines[other].loading, other) for other in _first_few(state.loading_engines))
        loads = [_load_name(version, other) for version, other in others if version is not None]
        yield from (WaitEdge(load, other, "its turn to load") for other in loads)
    if engine.is_paused:
        yield WaitEdge(name, TRAINER, "the shared device")
    if engine.is_draining and not engine.is_empty:
        reason = f"the end or migration of {plural(len(engine.requests), 'request')}"
        yield WaitEdge(f"drain of {name}", name, reason)


def _of_admission(state: State) -> Iterator[WaitEdge]:
    """Why no group is admitted now, if none is."""
    if state.next_step >= state.limits.num_steps:
        return
    loaded, newest = newest_loaded(state), state.newest_published
    if newest is None or state.is_redoing_steps:
        yield WaitEdge(ADMISSION, TRAINER, f"publication of version {state.redo_until_version}")
        return
    if state.evaluation is not None and state.is_only_evaluating:
        yield WaitEdge(ADMISSION, _evaluation_name(state.evaluation.version), "its end")
        return
    if not state.prompts:
        yield WaitEdge(ADMISSION, DATASET, plural(state.num_fetching, "prompt"))
        return
    num_places = 0 if loaded is None else bound.num_admissible(state, loaded)
    pending = [] if loaded == newest else _first_few(state.pending_holders.get(newest, ()))
    if loaded == newest and not num_places:
        reason = f"the staleness bound leaves no place at version {loaded}"
        yield WaitEdge(ADMISSION, _step_or_end(state), reason)
    elif pending:
        yield from (WaitEdge(ADMISSION, _load_name(newest, e), "a version to start on") for e in pending)
    elif num_places:
        yield WaitEdge(ADMISSION, ENGINES, f"a free row for version {loaded}")
    else:
        yield WaitEdge(ADMISSION, ENGINES, f"an engine that loads version {newest}")


def _next_groups(state: State) -> list[GroupId]:
    """The first unscored groups that the next step may get, nearest deadline first."""
    if state.next_step >= state.limits.num_steps:
        return []
    num_missing = state.limits.batch_size - len(state.committed)
    by_deadline = (group for cohort in sorted(state.unscored) for group in state.unscored[cohort])
    return list(islice(by_deadline, min(num_missing, MAX_LISTED)))


def _unfinished(state: State, group: GroupId) -> list[RequestId]:
    return sorted(state.groups[group].unfinished)[:MAX_LISTED]


def _held_out_requests(state: State) -> list[RequestId]:
    """The first unfinished held-out requests."""
    evaluation, rule = state.evaluation, state.limits.evaluation
    if evaluation is None or rule is None:
        return []
    prompts = evaluation.unfinished_prompts
    answers = (RequestId(*prompt, k) for prompt in prompts for k in range(rule.num_answers))
    return list(islice((request for request in answers if request in state.requests), MAX_LISTED))


def _first_few(engines: Iterable[int]) -> list[int]:
    return list(islice(engines, MAX_LISTED))


def _step_or_end(state: State) -> str:
    is_over = state.next_step >= state.limits.num_steps
    return "the end of the run" if is_over else f"step {step_number(state.next_step)}"


def _group_name(group: GroupId) -> str:
    return f"group {group}"


def _request_name(request: RequestId) -> str:
    return (
        f"held-out response {request.row}/{request.sibling}" if request.is_held_out else f"request {request}"
    )


def _engine_name(engine: int) -> str:
    return f"engine {engine}"


def _load_name(version: int, engine: int) -> str:
    return f"load of version {version} on engine {engine}"


def _evaluation_name(version: int) -> str:
    return f"evaluation of version {version}"
