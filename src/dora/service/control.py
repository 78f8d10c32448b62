"""Looking at a run and steering it: status, versions, engines, pause and resume.

Looking is always possible; steering only while the run trains, for else there is nothing to steer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from dora.errors import ServiceError
from dora.service import state
from dora.service.context import Run, RunContext, while_connected
from dora.service.models import Given
from dora.service.prometheus import Traffic, of_run
from dora.service.state import Engines, EngineState, Status, Versions

router = APIRouter(tags=["run"])
MAX_NEW_ENGINES = 64  # in one request
ORDER_S = 5.0  # that the orchestrator may take to answer

Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for it (s)")]
Number = Annotated[int, Path(ge=0, lt=2**31, description="number of the engine")]


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"] = "ok"


class More(Given):
    """How many engines to start."""

    count: int = Field(default=1, ge=1, le=MAX_NEW_ENGINES)


class Paused(BaseModel):
    is_paused: bool


async def health() -> Health:
    """Whether anybody is there; the only call without a token."""
    return Health()


@router.get("/v1/status")
async def status(run: Run) -> Status:
    """Where the run stands."""
    return await run(state.status)


@router.get("/v1/versions")
async def versions(
    run: Run,
    request: Request,
    newer_than: Annotated[int, Query(ge=-1, lt=2**31, description="wait for a version after this one")] = -1,
    wait_s: Wait = 0.0,
) -> Versions:
    """The versions that are kept; after `wait_s` also if none is newer than `newer_than`."""

    def newer(context: RunContext) -> Versions | None:
        newest = context.state().newest_published
        return state.versions(context) if newest is not None and newest > newer_than else None

    found = await while_connected(request, run.wait(newer, wait_s))
    return await run(state.versions) if found is None else found


@router.get("/v1/engines")
async def engines(run: Run) -> Engines:
    """The engines, those that ended included."""
    return await run(state.engines)


@router.post("/v1/engines", status_code=202)
async def add_engines(more: More, run: Run) -> Engines:
    """Start engines, which join once they are ready; the answer has those that start."""

    def start(context: RunContext) -> Engines:
        context.check_training()
        numbers = context.engines.add_engines(more.count)
        return Engines(engines=[EngineState(engine=number, state="starting") for number in numbers])

    return await run(start)


@router.post("/v1/engines/{engine}/drain", status_code=202)
async def drain_engine(engine: Number, run: Run) -> EngineState:
    """Have an engine leave once its requests have moved or finished; nothing is generated again."""
    is_asked = False

    def drain(context: RunContext) -> EngineState | None:
        nonlocal is_asked
        if not is_asked:
            state.engine(context, engine)  # or 404, whatever the run is doing
            context.check_training()
            context.engines.drain_engine(engine)
            is_asked = True
        if (refusal := context.engines.drain_rejection(engine)) is not None:
            raise ServiceError(409, f"engine {engine} stays: {refusal}; add another one first")
        found = state.engine(context, engine)
        return None if found.state == "working" else found

    found = await run.wait(drain, ORDER_S)
    return await run(lambda context: state.engine(context, engine)) if found is None else found


@router.post("/v1/pause")
async def pause(run: Run) -> Paused:
    """Have the whole run stand still; nothing is lost. A training step under way is ended."""

    def hold(context: RunContext) -> Paused:
        context.pause()
        return Paused(is_paused=True)

    return await run(hold)


@router.post("/v1/resume")
async def resume(run: Run) -> Paused:
    """Have it go on."""

    def release(context: RunContext) -> Paused:
        context.resume()
        return Paused(is_paused=False)

    return await run(release)


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(run: Run, request: Request) -> Response:
    """Everything that is measured, for Prometheus."""
    traffic: Traffic = request.app.state.traffic
    text = await run(of_run) + traffic.exposition()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
