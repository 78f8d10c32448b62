"""How the handlers of routes reach the run.

A handler says `await run(function)`: the driver calls `function(inside)` between two facts. What
the function raises becomes the answer, a ServiceError with the status it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from dora.errors import ServiceError
from dora.runtime.calls import Calls, Inside

LOOK_S = 30.0  # within which a driver that is alive looks up

T = TypeVar("T")


class Driver:
    """The way to the run."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def __call__(self, function: Callable[[Inside], T]) -> T:
        """What `function` returns, called by the driver. It must be quick, and not return None."""
        found = await self.wait(function, 0.0)
        assert found is not None
        return found

    async def wait(self, function: Callable[[Inside], T | None], wait_s: float) -> T | None:
        """The same of a function that may say None for "not yet"; None if it still does after `wait_s`."""
        asked = asyncio.wrap_future(self._calls.ask(function, wait_s))
        try:
            return await asyncio.wait_for(asked, wait_s + LOOK_S)
        except TimeoutError as error:
            raise ServiceError(503, f"the run did not look up for {LOOK_S:g} s; ask again later") from error


async def while_here(request: Request, awaited: Awaitable[T]) -> T | None:
    """What is awaited; given up, and None, once the client has gone."""
    asked, gone = asyncio.ensure_future(awaited), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _driver(request: Request) -> Driver:
    driver: Driver = request.app.state.driver
    return driver


Run = Annotated[Driver, Depends(_driver)]  # what a handler asks for
