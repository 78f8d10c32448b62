"""Environments on other machines: `reset` and `step` are calls over TCP.

One connection is one environment. The first line is the host's auth token; then each call and each reply is
one line of JSON. A reply has the snapshot of an environment that can be restored. Connections are not
encrypted: let hosts listen in private networks only.
"""

from __future__ import annotations

import asyncio
import base64
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
    close_environment,
    failure_reason,
    restore_snapshot,
    take_snapshot,
)

MAX_LINE_BYTES = 16 * 2**20
TOKEN_TIMEOUT_S = 10.0  # for the first line
WRONG_TOKEN = "the host refuses the auth token: env.token_file must have the content of its --token-file"


class _ConnectionLost(Fault):
    """The host does not reply."""


class RemoteEnvironment(Environment):
    """An environment on the first reachable of several hosts ("name:port")."""

    def __init__(
        self,
        hosts: Sequence[str],
        auth_token: str,
        connect_timeout_s: float,
        on_unreachable: Callable[[str, str], None] = lambda host, reason: None,
    ) -> None:
        """All hosts have the same token. `connect_timeout_s` is for trying all of them, one after the other.

        `on_unreachable` gets each host that cannot be reached, and the reason.
        """
        self._hosts, self._auth_token = hosts, auth_token
        self._connect_timeout_s, self._on_unreachable = connect_timeout_s, on_unreachable
        self._connection: tuple[StreamReader, StreamWriter] | None = None
        self._snapshot: str | None = None  # of the last reply, in base64

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode, on another host if the connection is lost. Raises Fault if none is reachable."""
        return check_observation(await self._start("reset", row, seed))

    def snapshot(self) -> bytes | None:
        """The state of the episode; None if the host's environment cannot be restored."""
        return None if self._snapshot is None else base64.b64decode(self._snapshot)

    async def restore(self, state: bytes) -> None:
        """Continue an episode, on any host. Raises Fault as `reset`, or if its environment cannot do so."""
        await self._start("restore", base64.b64encode(state).decode())

    async def step(self, action: str) -> Step:
        """Execute an action. Raises Fault, also if the connection is lost."""
        return Step(*await self._call("step", action))

    def close(self) -> None:
        """Close the connection; the host then closes the environment."""
        if self._connection is not None:
            self._connection[1].close()

    async def _start(self, *call: Any) -> Any:
        """The value of a call that starts an episode, on another host if the connection is lost."""
        if self._connection is not None:
            with contextlib.suppress(_ConnectionLost):
                return await self._call(*call)
        self._connection = await self._connect()
        return await self._call(*call)

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        """Connect to the first reachable host and send the token."""
        timeout_s, reasons = self._connect_timeout_s / len(self._hosts), []
        for host in self._hosts:
            name, _, port = host.rpartition(":")
            try:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await asyncio.open_connection(name, int(port), limit=MAX_LINE_BYTES)
                writer.write(f"{self._auth_token}\n".encode())
                return reader, writer
            except TimeoutError:
                reason = f"no reply within {timeout_s:g} s"
            except OSError as error:
                reason = str(error)
            reasons.append(f"{host}: {reason}")
            self._on_unreachable(host, reason)
        raise Fault(f"no environment host can be reached ({'; '.join(reasons)})")

    async def _call(self, *call: Any) -> Any:
        """The value that the host returns. Raises Fault with its error, or if the connection is lost."""
        assert self._connection is not None
        reader, writer = self._connection
        try:
            writer.write(_encode_line(call))
            await writer.drain()
            reply = json.loads(await reader.readuntil())
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise _ConnectionLost("the connection to the environment host is lost") from error
        if "fault" in reply:
            raise Fault(reply["fault"]) from RuntimeError(reply["detail"])
        self._snapshot = reply.get("snapshot")
        return reply["value"]


async def serve_forever(
    make: Callable[[], Environment],
    auth_token: str,
    host: str,
    port: int,
    announce: Callable[[int], None],
) -> None:
    """Run `serve` until cancelled; `announce` gets the port."""
    async with await serve(make, auth_token, host, port) as server:
        announce(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def serve(make: Callable[[], Environment], auth_token: str, host: str, port: int) -> asyncio.Server:
    """Listen for runs with the auth token, and run one environment per connection. Port 0: any free one."""

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        """Queue calls until the run disconnects, which also cancels the current one."""
        if not await _is_authenticated(auth_token, reader):
            with contextlib.suppress(OSError):
                writer.write(_encode_line({"fault": WRONG_TOKEN, "detail": ""}))
                await writer.drain()
            writer.close()
            return
        calls = asyncio.Queue[bytes](maxsize=1)
        serving = asyncio.create_task(_serve_calls(make, calls, writer))
        try:
            while True:
                calls.put_nowait(await reader.readuntil())
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.QueueFull):
            pass  # disconnected, or not a run: runs wait for each reply
        finally:
            serving.cancel()
            writer.close()

    return await asyncio.start_server(handle, host, port, limit=MAX_LINE_BYTES)


async def _is_authenticated(auth_token: str, reader: StreamReader) -> bool:
    """Whether the first line is the token."""
    try:
        async with asyncio.timeout(TOKEN_TIMEOUT_S):
            line = await reader.readuntil()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    return secrets.compare_digest(line, f"{auth_token}\n".encode())


async def _serve_calls(
    make: Callable[[], Environment], calls: asyncio.Queue[bytes], writer: StreamWriter
) -> None:
    """Execute calls with one environment until it is cancelled or the run disconnects."""
    environment: Environment | None = None
    try:
        while True:
            line = await calls.get()
            try:
                environment = make() if environment is None else environment
                reply = _encode_line(await _execute(environment, json.loads(line)))
            except (Exception, SystemExit) as error:
                reply = _encode_line({"fault": failure_reason(error), "detail": traceback.format_exc()})
            writer.write(reply)
            await writer.drain()
    except OSError:
        pass  # disconnected
    finally:
        writer.close()
        if environment is not None:
            close_environment(environment)


async def _execute(environment: Environment, call: object) -> dict[str, Any]:
    """The reply to a call. Raises Fault for an unknown call."""
    value: Observation | Step | None = None
    match call:
        case ["reset", dict(row), int(seed)]:
            value = check_observation(await environment.reset(row, seed))
        case ["restore", str(state)]:
            await restore_snapshot(environment, base64.b64decode(state))
        case ["step", str(action)]:
            value = check_step(await environment.step(action))
        case _:
            raise Fault(f"unknown call of an environment host: {str(call)[:80]!r}")
    is_done = isinstance(value, Step) and value.done
    snapshot = None if is_done else take_snapshot(environment)
    return {"value": value, "snapshot": None if snapshot is None else base64.b64encode(snapshot).decode()}


def _encode_line(value: object) -> bytes:
    """A value without a JSON type, such as a date of a row, becomes a string."""
    return json.dumps(value, default=str).encode() + b"\n"
