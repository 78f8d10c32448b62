"""Environments on other machines: `reset` and `step` happen there, learning here.

One connection is one environment. It begins with a line that is the host's token; then what travels is a line
of JSON for each call and one for its answer. Nothing is encrypted: let hosts listen in private networks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import traceback
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora.envs.base import (
    Environment,
    Fault,
    Observation,
    Step,
    check_observation,
    check_step,
    let_go,
    reason_of,
)

MAX_LINE_BYTES = 16 * 2**20
TOKEN_S = 10.0  # that the first line may take
WRONG_TOKEN = "the host refuses the token: env.token_file must have what its --token-file has"


class _Gone(Fault):
    """The host does not answer any more."""


class RemoteEnvironment(Environment):
    """An environment of one of several hosts, "name:port"; the first that can be reached."""

    def __init__(
        self,
        hosts: Sequence[str],
        token: str,
        connect_s: float,
        pass_over: Callable[[str, str], None] = lambda host, reason: None,
    ) -> None:
        """`connect_s` is the time for trying all of them, one after the other; they have the same token.

        `pass_over` gets each that cannot be reached, and why.
        """
        self._hosts, self._token = hosts, token
        self._connect_s, self._pass_over = connect_s, pass_over
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
        """To the first host that answers; each gets its share of the time, and is shown the token."""
        share_s, reasons = self._connect_s / len(self._hosts), []
        for host in self._hosts:
            name, _, port = host.rpartition(":")
            try:
                async with asyncio.timeout(share_s):
                    reader, writer = await asyncio.open_connection(name, int(port), limit=MAX_LINE_BYTES)
                writer.write(f"{self._token}\n".encode())
                return reader, writer
            except TimeoutError:
                reason = f"no answer within {share_s:g} s"
            except OSError as error:
                reason = str(error)
            reasons.append(f"{host}: {reason}")
            self._pass_over(host, reason)
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


async def serve(make: Callable[[], Environment], token: str, host: str, port: int) -> asyncio.Server:
    """Listen for runs that show the token, and play one environment for each connection.

    Port 0 is any free one.
    """

    async def hear(reader: StreamReader, writer: StreamWriter) -> None:
        """Take calls until the run hangs up, which also ends the one that is being answered."""
        if not await _is_shown(token, reader):
            with contextlib.suppress(OSError):
                writer.write(_line({"fault": WRONG_TOKEN, "detail": ""}))
                await writer.drain()
            writer.close()
            return
        calls = asyncio.Queue[bytes](maxsize=1)
        playing = asyncio.create_task(_play(make, calls, writer))
        try:
            while True:
                calls.put_nowait(await reader.readuntil())
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.QueueFull):
            pass  # gone, or no run: those wait for an answer before they ask again
        finally:
            playing.cancel()
            writer.close()

    return await asyncio.start_server(hear, host, port, limit=MAX_LINE_BYTES)


async def _is_shown(token: str, reader: StreamReader) -> bool:
    """Whether the first line is the token."""
    try:
        async with asyncio.timeout(TOKEN_S):
            shown = await reader.readuntil()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    return secrets.compare_digest(shown, f"{token}\n".encode())


async def _play(make: Callable[[], Environment], calls: asyncio.Queue[bytes], writer: StreamWriter) -> None:
    """Answer calls with one environment, until it cannot go on or is cancelled."""
    environment: Environment | None = None
    try:
        while True:
            line = await calls.get()
            try:
                environment = make() if environment is None else environment
                answer = _line({"value": await _answer(environment, json.loads(line))})
            except (Exception, SystemExit) as error:
                answer = _line({"fault": reason_of(error), "detail": traceback.format_exc()})
            writer.write(answer)
            await writer.drain()
    except OSError:
        pass  # the run is gone
    finally:
        writer.close()
        if environment is not None:
            let_go(environment)


async def serve_forever(
    make: Callable[[], Environment], token: str, host: str, port: int, announce: Callable[[int], None]
) -> None:
    """The same until it is cancelled; `announce` gets the port."""
    async with await serve(make, token, host, port) as server:
        announce(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def _answer(environment: Environment, call: object) -> Observation | Step:
    """What a call returns. Raises Fault if there is no such call."""
    match call:
        case ["reset", dict(row), int(seed)]:
            return check_observation(await environment.reset(row, seed))
        case ["step", str(action)]:
            return check_step(await environment.step(action))
    raise Fault(f"an environment host was asked {str(call)[:80]!r}")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
