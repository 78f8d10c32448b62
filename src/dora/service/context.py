"""Access of route handlers to the run.

A handler awaits `run(function)`: the driver calls `function(context)` between two events. An exception of
the function becomes the error response; a ServiceError has its status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request

from dora.errors import ServiceError
from dora.metrics.run import RunMetrics
from dora.runtime.control.engines import EngineContext
from dora.runtime.control.requests import RequestQueue
from dora.runtime.rollout.agent_sessions import AgentSessions
from dora.runtime.rollout.prompts import PromptSource
from dora.runtime.run_setup import RunSetup
from dora.runtime.scoring.external import ExternalRewards
from dora.runtime.training.external import ExternalTrainer

DRIVER_TIMEOUT_S = 30.0  # within which the driver answers a request that need not wait

T = TypeVar("T")


class RunContext(EngineContext, Protocol):
    """What a request may read or change of a run. Only the driver uses it, between two events."""

    @property
    def setup(self) -> RunSetup: ...

    @property
    def metrics(self) -> RunMetrics: ...

    @property
    def now_s(self) -> float: ...

    @property
    def is_training(self) -> bool: ...

    @property
    def agent_sessions(self) -> AgentSessions | None: ...

    @property
    def external_trainer(self) -> ExternalTrainer | None: ...

    @property
    def external_rewards(self) -> Mapping[str, ExternalRewards]: ...

    @property
    def prompts(self) -> PromptSource: ...

    @property
    def stream_dir(self) -> Path: ...

    @property
    def weights_dir(self) -> Path: ...

    def put_prompts(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append prompts, the first of which has the index `first`. Raises ServiceError."""

    def awaited_inputs(self) -> list[str]:
        """External inputs for which the run waits or may have to wait."""

    def pause(self) -> None:
        """Pause the whole run. Raises ServiceError unless it trains."""

    def resume(self) -> None:
        """End a pause."""


class RunHandle:
    """Runs functions in the driver, for the handlers of one application."""

    def __init__(self, requests: RequestQueue[RunContext]) -> None:
        self._requests = requests

    async def __call__(self, function: Callable[[RunContext], T]) -> T:
        """The result of `function`, called by the driver. It must be quick, and must not return None."""
        result = await self.wait(function, 0.0)
        assert result is not None
        return result

    async def wait(self, function: Callable[[RunContext], T | None], wait_s: float) -> T | None:
        """The same for a function that returns None for "not yet"; None if it still does after `wait_s`."""
        future = asyncio.wrap_future(self._requests.submit(function, wait_s))
        try:
            return await asyncio.wait_for(future, wait_s + DRIVER_TIMEOUT_S)
        except TimeoutError as error:
            raise ServiceError(
                503, f"the driver did not reply within {DRIVER_TIMEOUT_S:g} s; try again later"
            ) from error


async def while_connected(request: Request, awaitable: Awaitable[T]) -> T | None:
    """The result of `awaitable`; cancelled, and None, once the client has disconnected.

    Raises HTTPException for a body that is too large or stops arriving, also if the route takes none.
    """
    task, disconnect = asyncio.ensure_future(awaitable), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else disconnect.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _run_handle(request: Request) -> RunHandle:
    handle: RunHandle = request.app.state.run
    return handle


Run = Annotated[RunHandle, Depends(_run_handle)]  # parameter type of a handler that needs the run
