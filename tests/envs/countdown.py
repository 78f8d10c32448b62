"""A small environment, and a runner of it whose replies can be read."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora.core.types import RequestId
from dora.envs.base import Environment, Observation, Step
from dora.envs.episode import (
    EpisodeEnded,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.envs.runner import EnvRunner, EpisodeLimits, TextCodec

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
            case "panic":
                raise Panic("index out of bounds")
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


class Panic(BaseException):
    """What libraries in Rust raise is no Exception either."""


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


def episode_id(name: str) -> EpisodeId:
    return EpisodeId(RequestId(0, 0, 0), int.from_bytes(name.encode()))


def started(prompt: str, episode: str = "e") -> EpisodeStarted:
    return EpisodeStarted(episode_id(episode), tuple(encode(prompt)))


def observed(turn: int, observation: str, episode: str = "e") -> EpisodeObservation:
    return EpisodeObservation(episode_id(episode), turn, tuple(encode(observation)))


def ended(turn: int, reward: float, episode: str = "e", cut: str = "") -> EpisodeEnded:
    """Each step of a Countdown has a reward of 1."""
    return EpisodeEnded(episode_id(episode), turn, reward, (1.0,) * round(reward), cut)


class RecordedRunner:
    """A runner with a queue of replies for each episode."""

    def __init__(self, make: Callable[[], Environment] = Countdown, limits: EpisodeLimits = LIMITS) -> None:
        self.runner = EnvRunner(make, limits, CODEC, self._receive)
        self._replies: dict[EpisodeId, asyncio.Queue[EpisodeReply]] = defaultdict(asyncio.Queue)
        self._num_turns = Counter[str]()

    def _receive(self, reply: EpisodeReply) -> None:
        self._replies[reply.episode].put_nowait(reply)

    async def start(self, episode: str, number: int = 3) -> EpisodeReply:
        self.runner.start(episode_id(episode), {"from": number}, seed=0)
        return await self._replies[episode_id(episode)].get()

    async def restore(self, episode: str, state: bytes, prompt: str = "3:") -> EpisodeReply:
        self.runner.restore(episode_id(episode), state, tuple(encode(prompt)))
        return await self._replies[episode_id(episode)].get()

    def submit(self, episode: str, action: str, num_left: int = 10) -> None:
        number, self._num_turns[episode] = self._num_turns[episode], self._num_turns[episode] + 1
        turn = PolicyTurn(episode_id(episode), number, encode(action), "stop", num_left)
        self.runner.submit_turn(turn)

    async def turn(self, episode: str, action: str = "-", num_left: int = 10) -> EpisodeReply:
        self.submit(episode, action, num_left)
        return await self._replies[episode_id(episode)].get()

    def has_no_reply(self, episode: str) -> bool:
        return self._replies[episode_id(episode)].empty()


async def run_ready_tasks() -> None:
    """Run the event loop until no task is ready."""
    loop = asyncio.get_running_loop()
    for _ in range(10):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def run_episode(actions: Sequence[str], **options: Any) -> list[EpisodeReply]:
    """The replies to one episode with these actions."""

    async def run() -> list[EpisodeReply]:
        runner = RecordedRunner(**options)
        return [await runner.start("e"), *[await runner.turn("e", action) for action in actions]]

    return asyncio.run(run())
