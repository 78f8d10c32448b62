"""What is to be seen of a run, for those who ask and for metrics.

The functions are the driver's to call; they change nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from dora.errors import ServiceError
from dora.runtime.agents import Agents
from dora.runtime.calls import Inside


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


def status(inside: Inside) -> Status:
    """Where the run stands."""
    state, limits = inside.state(), inside.plan.limits
    phase: Literal["training", "paused", "between"] = "training" if inside.is_training else "between"
    player = inside.hands.episodes.player
    return Status(
        phase="paused" if inside.hands.is_held else phase,
        num_steps=limits.num_steps,
        num_steps_trained=state.num_trained // limits.batch_size,
        newest_version=state.newest,
        groups=Groups(
            admitted=state.num_admitted,
            trained=state.num_trained,
            filtered=state.num_filtered,
            failed=state.num_failed,
        ),
        num_requests=len(state.requests),
        num_waiting=sum(map(len, state.waiting.values())),
        num_engines=len(state.engines),
        now_s=inside.hands.now,
        stall_s=state.stall_s,
        waits_for=None if state.stall_group is None else str(state.stall_group),
        outside=[*inside.hands.patience.awaited()],
        agents=Played(sessions=player.num_sessions, waiting=player.num_seats)
        if isinstance(player, Agents)
        else None,
    )


def versions(inside: Inside) -> Versions:
    """The kept versions."""
    state = inside.state()
    return Versions(
        newest=state.newest,
        versions=[
            Version(
                version=version,
                digest=digest,
                num_requests=state.unfinished.get(version, 0),
                engines=[engine.id for engine in state.engines.values() if version in engine.held],
            )
            for version, digest in sorted(state.store.items())
        ],
    )


def engines(inside: Inside) -> Engines:
    """All engines there were."""
    fleet = inside.hands.fleet
    return Engines(engines=[engine(inside, n) for n in sorted({*fleet.workers, *fleet.ends})])


def engine(inside: Inside, number: int) -> EngineState:
    """One engine. Raises ServiceError if there never was one of this number."""
    fleet, known = inside.hands.fleet, inside.state().engines.get(number)
    if number not in fleet.workers:
        if number not in fleet.ends:
            raise ServiceError(404, f"the run has no engine {number}; GET /v1/engines lists them")
        return EngineState(engine=number, state="ended", end=fleet.ends[number])
    if known is None:
        return EngineState(engine=number, state="starting")
    is_resting = known.is_pausing or known.is_paused or inside.hands.is_held
    return EngineState(
        engine=number,
        state="leaving" if known.is_leaving else "resting" if is_resting else "working",
        num_rows=known.rows,
        num_rows_used=known.rows - known.free_rows,
        versions=sorted(known.held),
        loading=known.loading,
    )
