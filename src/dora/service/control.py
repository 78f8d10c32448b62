"""Routes that show the state of a run, and that pause it and change its engines.

The state is available at any time; changes are possible only while the run trains.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from dora.runtime.control import engines
from dora.runtime.control.engines import EngineStatus
from dora.service.context import Run, RunContext, while_connected
from dora.service.models import RequestBody, Wait

router = APIRouter(tags=["run"])
MAX_NEW_ENGINES = 64  # in one request
DRAIN_TIMEOUT_S = 5.0  # for the orchestrator's answer to a request to drain an engine

EngineNumber = Annotated[int, Path(ge=0, lt=2**31, description="number of the engine")]


class HealthResponse(BaseModel):
    """The service responds."""

    status: Literal["ok"] = "ok"


class GroupCounts(BaseModel):
    """Numbers of admitted groups by outcome."""

    admitted: int
    trained: int
    filtered: int
    failed: int


class AgentCounts(BaseModel):
    """Open sessions of agents, and episodes that no agent has opened yet."""

    sessions: int
    waiting: int
    branches: int  # continuations of earlier tokens, because a history was changed
    retokenized: int  # turns of the model whose text was tokenized again: 0


class ProgressStatus(BaseModel):
    """Progress of the run; times in seconds. `not_training`: it starts, saves or ends."""

    phase: Literal["training", "paused", "not_training"]
    num_steps: int
    num_steps_trained: int
    newest_version: int | None
    groups: GroupCounts
    num_requests: int  # unfinished
    num_waiting: int  # unfinished requests that no engine has
    num_engines: int
    now_s: float
    stall_s: float
    waits_for: str | None  # the group that the trainer waits for
    awaited_inputs: list[str]  # external inputs for which the run waits or may have to wait
    agents: AgentCounts | None  # null: the run has no agents


class StoredVersion(BaseModel):
    """A version that is published and not retired."""

    version: int
    digest: str
    num_requests: int  # unfinished requests of this version
    engines: list[int]  # engines that have loaded it


class VersionList(BaseModel):
    """The stored versions, oldest first."""

    newest: int | None
    versions: list[StoredVersion]


class EngineList(BaseModel):
    """All current and former engines, by number."""

    engines: list[EngineStatus]


class NewEngines(RequestBody):
    """How many engines to start."""

    count: int = Field(default=1, ge=1, le=MAX_NEW_ENGINES)


class PauseState(BaseModel):
    """Whether the run is paused."""

    is_paused: bool


# --- the state, called by the driver; nothing here changes the run


def progress_status(context: RunContext) -> ProgressStatus:
    """Progress of the run."""
    state, limits = context.state(), context.setup.limits
    phase: Literal["training", "not_training"] = "training" if context.is_training else "not_training"
    sessions = context.agent_sessions
    return ProgressStatus(
        phase="paused" if context.is_paused else phase,
        num_steps=limits.num_steps,
        num_steps_trained=state.num_trained // limits.batch_size,
        newest_version=state.newest_published,
        groups=GroupCounts(
            admitted=state.num_admitted,
            trained=state.num_trained,
            filtered=state.num_filtered,
            failed=state.num_failed,
        ),
        num_requests=len(state.requests),
        num_waiting=sum(map(len, state.waiting.values())),
        num_engines=len(state.engines),
        now_s=context.now_s,
        stall_s=state.stall_s,
        waits_for=None if state.stall_group is None else str(state.stall_group),
        awaited_inputs=context.awaited_inputs(),
        agents=None
        if sessions is None
        else AgentCounts(
            sessions=sessions.num_sessions,
            waiting=sessions.num_waiting,
            branches=sessions.num_branches,
            retokenized=sessions.num_retokenized,
        ),
    )


def stored_versions(context: RunContext) -> VersionList:
    """The stored versions."""
    state = context.state()
    return VersionList(
        newest=state.newest_published,
        versions=[
            StoredVersion(
                version=version,
                digest=digest,
                num_requests=state.num_unfinished.get(version, 0),
                engines=[engine.id for engine in state.engines.values() if version in engine.loaded],
            )
            for version, digest in sorted(state.stored_versions.items())
        ],
    )


# --- routes


async def health() -> HealthResponse:
    """Whether the service responds; needs no auth token."""
    return HealthResponse()


@router.get("/v1/status")
async def get_status(run: Run) -> ProgressStatus:
    """Progress of the run."""
    return await run(progress_status)


@router.get("/v1/versions")
async def get_versions(
    run: Run,
    request: Request,
    newer_than: Annotated[int, Query(ge=-1, lt=2**31, description="wait for a version after this one")] = -1,
    wait_s: Wait = 0.0,
) -> VersionList:
    """The stored versions, once one is newer than `newer_than`, at the latest after `wait_s`."""

    def newer_versions(context: RunContext) -> VersionList | None:
        newest = context.state().newest_published
        return stored_versions(context) if newest is not None and newest > newer_than else None

    found = await while_connected(request, run.wait(newer_versions, wait_s))
    return await run(stored_versions) if found is None else found


@router.get("/v1/engines")
async def get_engines(run: Run) -> EngineList:
    """All engines, those that have ended included."""
    return await run(lambda context: EngineList(engines=engines.list_engines(context)))


@router.post("/v1/engines", status_code=202)
async def add_engines(body: NewEngines, run: Run) -> EngineList:
    """Start engines, which join once they are ready; returns the new ones."""
    return await run(lambda context: EngineList(engines=engines.add_engines(context, body.count)))


@router.post("/v1/engines/{engine}/drain", status_code=202)
async def drain_engine(engine: EngineNumber, run: Run) -> EngineStatus:
    """Remove an engine once its requests have migrated or finished; no token is generated again."""
    found = await run.wait(engines.drain_engine(engine, waits_for_end=False), DRAIN_TIMEOUT_S)
    return await run(lambda context: engines.get_engine(context, engine)) if found is None else found


@router.post("/v1/pause")
async def pause(run: Run) -> PauseState:
    """Pause the whole run; nothing is lost. A training step in progress finishes."""

    def pause_run(context: RunContext) -> PauseState:
        context.pause()
        return PauseState(is_paused=True)

    return await run(pause_run)


@router.post("/v1/resume")
async def resume(run: Run) -> PauseState:
    """End a pause."""

    def resume_run(context: RunContext) -> PauseState:
        context.resume()
        return PauseState(is_paused=False)

    return await run(resume_run)
