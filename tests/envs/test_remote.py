"""Environments on another machine answer as those here do, also with what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.envs.playing import Countdown, settle

from dora.envs.base import Environment, Fault, Step
from dora.envs.remote import RemoteEnvironment, serve

LOCAL = "127.0.0.1"


def with_host(play: Callable[[str], Awaitable[None]], make: Callable[[], Environment] = Countdown) -> None:
    """Play beside a host, whose name and port are given."""

    async def both() -> None:
        async with await serve(make, LOCAL, 0) as server:
            await play(f"{LOCAL}:{server.sockets[0].getsockname()[1]}")

    asyncio.run(both())


def test_an_episode_is_played_away() -> None:
    async def play(host: str) -> None:
        environment = RemoteEnvironment([host])
        assert await environment.reset({"from": 2}, 0) == "2:"
        assert await environment.step("-") == Step("1", 1.0, False)
        assert await environment.step("-") == Step("", 1.0, True)
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    with_host(play)


def test_what_goes_wrong_away_is_told_here() -> None:
    async def play(host: str) -> None:
        environment = RemoteEnvironment([host])
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
        two = [RemoteEnvironment([host]), RemoteEnvironment([host])]
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
        environment = RemoteEnvironment([f"{LOCAL}:1", host])
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    with_host(play)


def test_without_any_host_the_reasons_are_told() -> None:
    with pytest.raises(Fault, match=rf"no environment host can be reached \({LOCAL}:1: "):
        asyncio.run(RemoteEnvironment([f"{LOCAL}:1"]).reset({"from": 1}, 0))


def test_a_host_that_goes_away_ends_the_episode_by_name() -> None:
    async def play(_: str) -> None:
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil()
            writer.close()

        async with await asyncio.start_server(leave, LOCAL, 0) as server:
            environment = RemoteEnvironment([f"{LOCAL}:{server.sockets[0].getsockname()[1]}"])
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
        environment = RemoteEnvironment([f"{LOCAL}:{port}", staying])
        assert await environment.reset({"from": 1}, 0) == "from the first"
        leaving.close()
        assert await environment.reset({"from": 1}, 0) == "1:"
        environment.close()

    with_host(play)
