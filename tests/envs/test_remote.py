"""Environments on another machine answer as those here do, also with what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.envs.playing import Countdown, settle

from dora.envs import remote
from dora.envs.base import Environment, Fault, Step
from dora.envs.remote import serve

ROOT = Path(__file__).parents[2]
LOCAL = "127.0.0.1"
TOKEN = "a-token-of-the-tests"


def played_at(hosts: list[str], connect_s: float = 5.0, token: str = TOKEN) -> remote.RemoteEnvironment:
    return remote.RemoteEnvironment(hosts, token, connect_s)


def with_host(play: Callable[[str], Awaitable[None]], make: Callable[[], Environment] = Countdown) -> None:
    """Play beside a host, whose name and port are given."""

    async def both() -> None:
        async with await serve(make, TOKEN, LOCAL, 0) as server:
            await play(f"{LOCAL}:{server.sockets[0].getsockname()[1]}")

    asyncio.run(both())


def test_an_episode_is_played_away() -> None:
    async def play(host: str) -> None:
        environment = played_at([host])
        assert await environment.reset({"from": 2}, 0) == "2:"
        assert await environment.step("-") == Step("1", 1.0, False)
        assert await environment.step("-") == Step("", 1.0, True)
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    with_host(play)


def test_what_goes_wrong_away_is_told_here() -> None:
    async def play(host: str) -> None:
        environment = played_at([host])
        await environment.reset({"from": 2}, 0)
        with pytest.raises(Fault, match="environment raised KeyError") as fault:
            await environment.step("raise")
        assert "nothing there" in str(fault.value.__cause__)
        environment.close()

    with_host(play)


def test_each_connection_has_an_environment_which_is_closed_with_it() -> None:
    made: list[Countdown] = []

    def make() -> Environment:
        made.append(Countdown())
        return made[-1]

    async def play(host: str) -> None:
        two = [played_at([host]), played_at([host])]
        for environment in two:
            await environment.reset({"from": 1}, 0)
        two[0].close()
        await two[1].step("-")
        await settle()
        assert [one.is_closed for one in made] == [True, False]
        two[1].close()

    with_host(play, make)


def test_a_host_that_cannot_be_reached_is_passed_over() -> None:
    async def play(host: str) -> None:
        passed: list[str] = []
        hosts = [f"{LOCAL}:1", host]
        environment = remote.RemoteEnvironment(hosts, TOKEN, 5.0, lambda name, _: passed.append(name))
        assert await environment.reset({"from": 1}, 0) == "1:"
        assert passed == hosts[:1]
        environment.close()

    with_host(play)


def test_a_host_that_drops_what_it_is_sent_is_passed_over_in_time() -> None:
    async def play(host: str) -> None:
        with socket.socket() as deaf, contextlib.ExitStack() as callers:
            deaf.bind((LOCAL, 0))
            deaf.listen(0)
            for _ in range(4):  # who calls now is neither accepted nor refused
                caller = callers.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(deaf.getsockname())
            environment = played_at([f"{LOCAL}:{deaf.getsockname()[1]}", host], connect_s=0.4)
            assert await environment.reset({"from": 1}, 0) == "1:"
            environment.close()
            with pytest.raises(Fault, match=r"no answer within 0\.4 s"):
                await played_at([f"{LOCAL}:{deaf.getsockname()[1]}"], connect_s=0.4).reset({"from": 1}, 0)

    with_host(play)


def test_an_environment_that_exits_ends_its_episode_and_not_the_host() -> None:
    async def play(host: str) -> None:
        environment = played_at([host])
        await environment.reset({"from": 2}, 0)
        with pytest.raises(Fault, match="environment raised SystemExit"):
            await environment.step("exit")
        environment.close()
        other = played_at([host])
        assert await other.reset({"from": 1}, 0) == "1:"
        other.close()

    with_host(play)


def test_an_environment_that_cannot_be_made_says_why() -> None:
    def make() -> Environment:
        raise OSError("no display")

    async def play(host: str) -> None:
        environment = played_at([host])
        with pytest.raises(Fault, match="environment raised OSError"):
            await environment.reset({"from": 1}, 0)
        environment.close()

    with_host(play, make)


def test_a_call_that_the_run_has_given_up_is_ended() -> None:
    made: list[Countdown] = []

    def make() -> Environment:
        made.append(Countdown())
        return made[-1]

    async def play(host: str) -> None:
        environment = played_at([host])
        await environment.reset({"from": 2}, 0)
        asking = asyncio.create_task(environment.step("hang"))
        await settle()
        asking.cancel()
        environment.close()
        await settle()
        assert [one.is_closed for one in made] == [True]
        assert not [task for task in asyncio.all_tasks() if "_play" in repr(task)]

    with_host(play, make)


@pytest.mark.parametrize("token", ["", "another-token", TOKEN + " ", "é"])
def test_who_does_not_show_the_token_is_told_so_and_plays_nothing(token: str) -> None:
    made: list[Countdown] = []

    def make() -> Environment:
        made.append(Countdown())
        return made[-1]

    async def play(host: str) -> None:
        refused, welcome = played_at([host], token=token), played_at([host])
        with pytest.raises(Fault, match="the host refuses the token"):
            await refused.reset({"from": 1}, 0)
        assert made == []
        assert await welcome.reset({"from": 1}, 0) == "1:"
        for environment in (refused, welcome):
            environment.close()
        await settle()

    with_host(play, make)


def test_the_command_makes_a_token_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"

    async def play(host: str) -> None:
        environment = played_at([host], token=file.read_text())
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    command = [sys.executable, "-m", "dora", "environments", "tests.envs.playing:Countdown"]
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
        asyncio.run(play(host))
        process.kill()


def test_who_shows_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TOKEN_S", 0.05)

    async def play(host: str) -> None:
        reader, writer = await asyncio.open_connection(LOCAL, int(host.rpartition(":")[2]))
        assert b"the host refuses the token" in await reader.read()
        writer.close()

    with_host(play)


CALLS = f"{TOKEN}\n" + '["step"]\n' * 3


@pytest.mark.parametrize("line", [CALLS.encode(), CALLS.encode()[:-1], b"x" * 100])
def test_who_is_no_run_is_hung_up_on(line: bytes) -> None:
    async def play(host: str) -> None:
        reader, writer = await asyncio.open_connection(LOCAL, int(host.rpartition(":")[2]))
        writer.write(line)
        writer.write_eof()
        assert len((await reader.read()).splitlines()) <= 1
        writer.close()

    with_host(play)


def test_without_any_host_the_reasons_are_told() -> None:
    with pytest.raises(Fault, match=rf"no environment host can be reached \({LOCAL}:1: "):
        asyncio.run(played_at([f"{LOCAL}:1"]).reset({"from": 1}, 0))


def test_a_host_that_goes_away_ends_the_episode_by_name() -> None:
    async def play(_: str) -> None:
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil()
            writer.close()

        async with await asyncio.start_server(leave, LOCAL, 0) as server:
            environment = played_at([f"{LOCAL}:{server.sockets[0].getsockname()[1]}"])
            with pytest.raises(Fault, match="environment host is gone"):
                await environment.reset({"from": 1}, 0)
            environment.close()

    with_host(play)


def test_the_next_episode_is_played_on_another_host_when_one_has_gone() -> None:
    async def play(staying: str) -> None:
        async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil()
            writer.write(b'{"value": "from the first"}\n')
            writer.close()

        leaving = await asyncio.start_server(answer_once, LOCAL, 0)
        port = leaving.sockets[0].getsockname()[1]
        environment = played_at([f"{LOCAL}:{port}", staying])
        assert await environment.reset({"from": 1}, 0) == "from the first"
        leaving.close()
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    with_host(play)
