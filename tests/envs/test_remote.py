"""Remote environments behave like local ones, also when a call fails or a host is lost."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.envs.countdown import Countdown, StoredCountdown, add_to, run_ready_tasks

from dora.envs import remote
from dora.envs.base import Environment, Fault, Step
from dora.envs.remote import serve

ROOT = Path(__file__).parents[2]
LOCAL = "127.0.0.1"
TOKEN = "a-token-of-the-tests"


def connect(hosts: list[str], timeout_s: float = 5.0, token: str = TOKEN) -> remote.RemoteEnvironment:
    return remote.RemoteEnvironment(hosts, token, timeout_s)


@contextlib.asynccontextmanager
async def hosted(make: Callable[[], Environment] = Countdown) -> AsyncIterator[str]:
    """An environment host; yields its "name:port"."""
    async with await serve(make, TOKEN, LOCAL, 0) as server:
        yield f"{LOCAL}:{server.sockets[0].getsockname()[1]}"


async def test_an_episode_runs_on_a_host() -> None:
    async with hosted() as host:
        environment = connect([host])
        assert await environment.reset({"from": 2}, 0) == "2:"
        assert await environment.step("-") == Step("1", 1.0, False)
        assert await environment.step("-") == Step("", 1.0, True)
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()


async def test_a_row_may_have_values_that_json_has_not() -> None:
    class Calendar(Countdown):
        async def reset(self, row: Mapping[str, Any], seed: int) -> str:
            return str(row["day"])

    async with hosted(Calendar) as host:
        environment = connect([host])
        assert await environment.reset({"day": datetime.date(2020, 1, 31)}, 0) == "2020-01-31"
        environment.close()


async def test_an_episode_continues_on_another_host() -> None:
    async with hosted(StoredCountdown) as host:
        environment, other = connect([host]), connect([f"{LOCAL}:1", host])
        assert await environment.reset({"from": 3}, 0) == "3:"
        await environment.step("-")
        state = environment.snapshot()
        assert state is not None
        await other.restore(state)
        assert await other.step("-") == Step("1", 1.0, False)
        await environment.restore(state)
        assert await environment.step("-") == Step("1", 1.0, False)
        assert (await environment.step("-"), environment.snapshot()) == (Step("", 1.0, True), None)
        environment.close()
        other.close()


async def test_an_environment_without_snapshots_has_none_on_a_host_either() -> None:
    async with hosted() as host:
        environment = connect([host])
        await environment.reset({"from": 3}, 0)
        assert environment.snapshot() is None
        with pytest.raises(Fault, match="environment has no method restore"):
            await environment.restore(b"2")
        environment.close()


async def test_a_snapshot_that_is_too_large_fails_the_episode_on_its_host() -> None:
    class Large(StoredCountdown):
        def snapshot(self) -> bytes:
            return bytes(2**20 + 1)

    async with hosted(Large) as host:
        environment = connect([host])
        with pytest.raises(Fault, match="environment snapshot has 1048577 bytes"):
            await environment.reset({"from": 3}, 0)
        environment.close()


async def test_an_error_on_the_host_is_raised_in_the_run() -> None:
    async with hosted() as host:
        environment = connect([host])
        await environment.reset({"from": 2}, 0)
        with pytest.raises(Fault, match="environment raised KeyError") as fault:
            await environment.step("raise")
        assert "nothing there" in str(fault.value.__cause__)
        environment.close()


async def test_each_connection_has_its_own_environment_which_is_closed_with_it() -> None:
    made: list[Countdown] = []
    async with hosted(lambda: add_to(made)) as host:
        two = [connect([host]), connect([host])]
        for environment in two:
            await environment.reset({"from": 1}, 0)
        two[0].close()
        await two[1].step("-")
        await run_ready_tasks()
        assert [one.is_closed for one in made] == [True, False]
        two[1].close()


async def test_an_unreachable_host_is_skipped() -> None:
    async with hosted() as host:
        skipped: list[str] = []
        hosts = [f"{LOCAL}:1", host]
        environment = remote.RemoteEnvironment(hosts, TOKEN, 5.0, lambda name, _: skipped.append(name))
        assert await environment.reset({"from": 1}, 0) == "1:"
        assert skipped == hosts[:1]
        environment.close()


async def test_a_host_that_drops_packets_is_skipped_in_time() -> None:
    async with hosted() as host:
        with socket.socket() as full, contextlib.ExitStack() as connections:
            full.bind((LOCAL, 0))
            full.listen(0)
            for _ in range(4):  # further connections are neither accepted nor refused
                connection = connections.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(full.getsockname())
            environment = connect([f"{LOCAL}:{full.getsockname()[1]}", host], timeout_s=0.4)
            assert await environment.reset({"from": 1}, 0) == "1:"
            environment.close()
            with pytest.raises(Fault, match=r"no reply within 0\.4 s"):
                await connect([f"{LOCAL}:{full.getsockname()[1]}"], timeout_s=0.4).reset({"from": 1}, 0)


async def test_an_environment_that_exits_does_not_end_the_host() -> None:
    async with hosted() as host:
        environment = connect([host])
        await environment.reset({"from": 2}, 0)
        with pytest.raises(Fault, match="environment raised SystemExit"):
            await environment.step("exit")
        environment.close()
        other = connect([host])
        assert await other.reset({"from": 1}, 0) == "1:"
        other.close()


async def test_an_environment_that_cannot_be_created_fails_with_its_error() -> None:
    def make() -> Environment:
        raise OSError("no display")

    async with hosted(make) as host:
        environment = connect([host])
        with pytest.raises(Fault, match="environment raised OSError"):
            await environment.reset({"from": 1}, 0)
        environment.close()


async def test_a_call_is_cancelled_when_the_run_disconnects() -> None:
    made: list[Countdown] = []
    async with hosted(lambda: add_to(made)) as host:
        environment = connect([host])
        await environment.reset({"from": 2}, 0)
        calling = asyncio.create_task(environment.step("hang"))
        await run_ready_tasks()
        calling.cancel()
        environment.close()
        await run_ready_tasks()
        assert [one.is_closed for one in made] == [True]
        assert not [task for task in asyncio.all_tasks() if "_serve_calls" in repr(task)]


@pytest.mark.parametrize("token", ["", "another-token", TOKEN + " ", "é"])
async def test_a_wrong_auth_token_is_refused_before_an_environment_is_made(token: str) -> None:
    made: list[Countdown] = []
    async with hosted(lambda: add_to(made)) as host:
        refused, accepted = connect([host], token=token), connect([host])
        with pytest.raises(Fault, match="the host refuses the auth token"):
            await refused.reset({"from": 1}, 0)
        assert made == []
        assert await accepted.reset({"from": 1}, 0) == "1:"
        for environment in (refused, accepted):
            environment.close()
        await run_ready_tasks()


def test_the_command_writes_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "token"

    async def run(host: str) -> None:
        environment = connect([host], token=file.read_text())
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    command = [sys.executable, "-m", "dora", "env-server", "tests.envs.countdown:Countdown"]
    with subprocess.Popen(
        [*command, "--token-file", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        assert process.stdout is not None
        host = process.stdout.readline().split('"')[1]
        assert f'env.token_file = "{file.resolve()}"' in process.stdout.readline()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        asyncio.run(run(host))
        process.kill()


async def test_a_connection_without_a_token_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TOKEN_TIMEOUT_S", 0.05)
    async with hosted() as host:
        reader, writer = await asyncio.open_connection(LOCAL, int(host.rpartition(":")[2]))
        assert b"the host refuses the auth token" in await reader.read()
        writer.close()


CALLS = f"{TOKEN}\n" + '["step"]\n' * 3


@pytest.mark.parametrize("line", [CALLS.encode(), CALLS.encode()[:-1], b"x" * 100])
async def test_a_client_that_is_not_a_run_is_disconnected(line: bytes) -> None:
    async with hosted() as host:
        reader, writer = await asyncio.open_connection(LOCAL, int(host.rpartition(":")[2]))
        writer.write(line)
        writer.write_eof()
        assert len((await reader.read()).splitlines()) <= 1
        writer.close()


async def test_without_a_reachable_host_all_reasons_are_named() -> None:
    with pytest.raises(Fault, match=rf"no environment host can be reached \({LOCAL}:1: "):
        await connect([f"{LOCAL}:1"]).reset({"from": 1}, 0)


async def test_a_lost_host_fails_the_episode_by_name() -> None:
    async def disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil()
        writer.close()

    async with await asyncio.start_server(disconnect, LOCAL, 0) as server:
        environment = connect([f"{LOCAL}:{server.sockets[0].getsockname()[1]}"])
        with pytest.raises(Fault, match="the connection to the environment host is lost"):
            await environment.reset({"from": 1}, 0)
        environment.close()


async def test_the_next_episode_runs_on_another_host_after_one_is_lost() -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil()
        writer.write(b'{"value": "from the first"}\n')
        writer.close()

    async with hosted() as staying:
        leaving = await asyncio.start_server(answer_once, LOCAL, 0)
        port = leaving.sockets[0].getsockname()[1]
        environment = connect([f"{LOCAL}:{port}", staying])
        assert await environment.reset({"from": 1}, 0) == "from the first"
        leaving.close()
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()
