"""What is to be seen of a run, for those who ask and for metrics.

The functions are the driver's to call; they change nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from dora.errors import ServiceError
from dora.service.context import RunContext


class Groups(BaseModel):
    """What became of the groups admitted so far (counts)."""

    admitted: int
    trained: int
    filtered: int
    failed: int


class Played(BaseModel):
    """Episodes in the hands of agents, and those that wait for one (counts)."""

    sessions: int
    waiting: int


class Status(BaseModel):
    """Where the run stands; times in seconds. Between: it starts, evaluates, saves or ends."""

    phase: Literal["training", "paused", "between"]
    num_steps: int
    num_steps_trained: int
    newest_version: int | None
    groups: Groups
    num_requests: int  # unfinished
    num_waiting: int  # of them, those without an engine
    num_engines: int
    now_s: float
    stall_s: float
    waits_for: str | None  # group that the trainer waits for
    outside: list[str]  # whom or what the run may have to wait for
    agents: Played | None  # null: no agents play


class Version(BaseModel):
    """A version that is kept: published, and not retired."""

    version: int
    digest: str
    num_requests: int  # unfinished, at this version
    engines: list[int]  # that hold it


class Versions(BaseModel):
    """The kept versions, oldest first."""

    newest: int | None
    versions: list[Version]


class EngineState(BaseModel):
    """One engine; one that has ended says how."""

    engine: int
    state: Literal["starting", "working", "resting", "leaving", "ended"]
    num_rows: int = 0
    num_rows_used: int = 0
    versions: list[int] = []
    loading: int | None = None
    end: str | None = None


class Engines(BaseModel):
    """All engines there were, by number."""

    engines: list[EngineState]


def status(context: RunContext) -> Status:
    """Where the run stands."""
    state, limits = context.state(), context.setup.limits
    phase: Literal["training", "paused", "between"] = "training" if context.is_training else "between"
    sessions = context.agent_sessions
    return Status(
        phase="paused" if context.is_paused else phase,
        num_steps=limits.num_steps,
        num_steps_trained=state.num_trained // limits.batch_size,
        newest_version=state.newest_published,
        groups=Groups(
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
        outside=context.awaited_inputs(),
        agents=None
        if sessions is None
        else Played(sessions=sessions.num_sessions, waiting=sessions.num_waiting),
    )


def versions(context: RunContext) -> Versions:
    """The kept versions."""
    state = context.state()
    return Versions(
        newest=state.newest_published,
        versions=[
            Version(
                version=version,
                digest=digest,
                num_requests=state.num_unfinished.get(version, 0),
                engines=[engine.id for engine in state.engines.values() if version in engine.loaded],
            )
            for version, digest in sorted(state.stored_versions.items())
        ],
    )


def engines(context: RunContext) -> Engines:
    """All engines there were."""
    return Engines(engines=[engine(context, number) for number in context.engines.all_engines])


def engine(context: RunContext, number: int) -> EngineState:
    """One engine. Raises ServiceError if there never was one of this number."""
    control, known = context.engines, context.state().engines.get(number)
    if number not in control.all_engines:
        raise ServiceError(404, f"the run has no engine {number}; GET /v1/engines lists them")
    if (end := control.engine_end(number)) is not None:
        return EngineState(engine=number, state="ended", end=end)
    if known is None:
        return EngineState(engine=number, state="starting")
    is_resting = known.is_pausing or known.is_paused or context.is_paused
    return EngineState(
        engine=number,
        state="leaving" if known.is_draining else "resting" if is_resting else "working",
        num_rows=known.num_rows,
        num_rows_used=known.num_rows - known.free_rows,
        versions=sorted(known.loaded),
        loading=known.loading,
    )
