"""Environments on other machines: `reset` and `step` happen there, learning here.

One connection is one environment. What travels is a line of JSON for each call and one for its
answer. There is no password: let hosts listen in a private network only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora.envs.base import Environment, Fault, Observation, Step, check_observation, check_step

MAX_LINE_BYTES = 16 * 2**20
CONNECT_TIMEOUT_S = 2.0  # to one host, before the next is tried


class _Gone(Fault):
    """The host does not answer any more."""


class RemoteEnvironment(Environment):
    """An environment of one of several hosts, "name:port"; the first that can be reached."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._line: tuple[StreamReader, StreamWriter] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """On another host if the last one is gone by now. Raises Fault if none can be reached."""
        if self._line is not None:
            with contextlib.suppress(_Gone):
                return check_observation(await self._ask("reset", row, seed))
        self._line = await self._connect()
        return check_observation(await self._ask("reset", row, seed))

    async def step(self, action: str) -> Step:
        return Step(*await self._ask("step", action))

    def close(self) -> None:
        """The host sees it, and closes the environment."""
        if self._line is not None:
            self._line[1].close()

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        reasons = []
        for host in self._hosts:
            name, _, port = host.rpartition(":")
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await asyncio.open_connection(name, int(port), limit=MAX_LINE_BYTES)
            except OSError as error:
                reasons.append(f"{host}: {error}")
        raise Fault(f"no environment host can be reached ({'; '.join(reasons)})")

    async def _ask(self, *call: Any) -> Any:
        """What the other side returns. Raises Fault with what it says, or if it is gone."""
        assert self._line is not None
        reader, writer = self._line
        try:
            writer.write(_line(call))
            await writer.drain()
            answer = json.loads(await reader.readuntil())
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise _Gone("environment host is gone") from error
        if "fault" in answer:
            raise Fault(answer["fault"]) from RuntimeError(answer["detail"])
        return answer["value"]


async def serve(make: Callable[[], Environment], host: str, port: int) -> asyncio.Server:
    """Listen for runs and play one environment for each connection; port 0 is any free one."""

    async def play(reader: StreamReader, writer: StreamWriter) -> None:
        gone = contextlib.suppress(OSError, asyncio.IncompleteReadError)
        with contextlib.closing(make()) as environment, contextlib.closing(writer), gone:
            while True:
                call = json.loads(await reader.readuntil())
                writer.write(_line(await _answer(environment, call)))
                await writer.drain()

    return await asyncio.start_server(play, host, port, limit=MAX_LINE_BYTES)


async def serve_forever(
    make: Callable[[], Environment], host: str, port: int, announce: Callable[[int], None]
) -> None:
    """The same until it is cancelled; `announce` gets the port."""
    async with await serve(make, host, port) as server:
        announce(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def _answer(environment: Environment, call: Sequence[Any]) -> dict[str, Any]:
    """What a call returns, or why it does not."""
    try:
        match call:
            case ["reset", dict(row), int(seed)]:
                return {"value": check_observation(await environment.reset(row, seed))}
            case ["step", str(action)]:
                return {"value": check_step(await environment.step(action))}
            case _:
                raise Fault(f"an environment host was asked {str(call)[:80]!r}")
    except Exception as error:
        is_named = isinstance(error, Fault)
        reason = str(error) if is_named else f"environment raised {type(error).__name__}"
        return {"fault": reason, "detail": traceback.format_exc()}


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
