"""A small environment, and a runner of it whose replies can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora.envs.base import Environment, Observation, Step
from dora.envs.runner import EnvReply, EnvRunner, EpisodeLimits, TextCodec

LIMITS = EpisodeLimits(max_prompt_length=8, max_turns=4, timeout_s=5.0)


class Countdown(Environment):
    """Counts the row's number down; each action has reward 1, and some actions cause a failure."""

    def __init__(self) -> None:
        self.is_closed = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self._left: int = row["from"]
        return f"{self._left}:"

    async def step(self, action: str) -> Any:
        match action:
            case "raise":
                raise KeyError("nothing there")
            case "hang":
                await asyncio.Event().wait()
            case "exit":
                raise SystemExit("no license left")
            case "cancel":
                raise asyncio.CancelledError
            case "empty":
                return Step("", 1.0, False)
            case "nan":
                return Step("0", float("nan"), False)
            case "pair":
                return "0", 1.0
            case "list":
                return Step([1, 2], 1.0, False)  # type: ignore[list-item]
        self._left -= 1
        return Step(f"{self._left}", 1.0, self._left == 0)

    def close(self) -> None:
        self.is_closed = True


def add_to(made: list[Countdown]) -> Countdown:
    """A new countdown, which is added to `made`."""
    made.append(Countdown())
    return made[-1]


class StoredCountdown(Countdown):
    """A countdown whose episodes survive their process."""

    def snapshot(self) -> bytes:
        return bytes([self._left])

    def restore(self, state: bytes) -> None:
        (self._left,) = state


def encode(observation: Observation) -> list[int]:
    """One token per character."""
    assert isinstance(observation, str)
    return [ord(character) for character in observation]


CODEC = TextCodec(encode, lambda observation, _: encode(observation), lambda ids: "".join(map(chr, ids)))


class RecordedRunner:
    """A runner with a queue of replies for each episode."""

    def __init__(self, make: Callable[[], Environment] = Countdown, limits: EpisodeLimits = LIMITS) -> None:
        self.runner = EnvRunner(make, limits, CODEC, self._receive)
        self._replies: dict[str, asyncio.Queue[EnvReply]] = {}

    def _receive(self, episode: str, reply: EnvReply) -> None:
        self._replies[episode].put_nowait(reply)

    async def start(self, episode: str, number: int = 3) -> EnvReply:
        self._replies[episode] = asyncio.Queue()
        self.runner.start(episode, {"from": number}, seed=0)
        return await self._replies[episode].get()

    async def restore(self, episode: str, state: bytes) -> EnvReply:
        self._replies[episode] = asyncio.Queue()
        self.runner.restore(episode, state)
        return await self._replies[episode].get()

    async def turn(self, episode: str, action: str = "-", num_left: int = 10) -> EnvReply:
        self.runner.submit_turn(episode, encode(action), num_left)
        return await self._replies[episode].get()

    def has_no_reply(self, episode: str) -> bool:
        return self._replies[episode].empty()


async def run_ready_tasks() -> None:
    """Run the event loop until no task is ready."""
    loop = asyncio.get_running_loop()
    for _ in range(10):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def run_episode(actions: Sequence[str], **options: Any) -> list[EnvReply]:
    """The replies to one episode with these actions."""

    async def run() -> list[EnvReply]:
        runner = RecordedRunner(**options)
        return [await runner.start("e"), *[await runner.turn("e", action) for action in actions]]

    return asyncio.run(run())
