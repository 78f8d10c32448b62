"""A small environment, and a host of it whose words can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora.envs.base import Environment, Observation, Step
from dora.envs.host import Host, Language, Rules, Word

RULES = Rules(max_prompt_length=8, max_turns=4, timeout_s=5.0)


class Countdown(Environment):
    """Counts the row's number down with every action; each is worth 1. Some actions mean trouble."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1
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
            case "silent":
                return Step("", 1.0, False)
            case "long":
                return Step("x" * 20, 1.0, False)
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


def encode(observation: Observation) -> list[int]:
    """A token for each character."""
    assert isinstance(observation, str)
    return [ord(character) for character in observation]


LANGUAGE = Language(encode, lambda observation, _: encode(observation), lambda ids: "".join(map(chr, ids)))


class Table:
    """A host, and what it has said of each episode."""

    def __init__(self, make: Callable[[], Environment] = Countdown, rules: Rules = RULES) -> None:
        self.host = Host(make, rules, LANGUAGE, self._say)
        self._words: dict[str, asyncio.Queue[Word]] = {}

    def _say(self, episode: str, word: Word) -> None:
        self._words[episode].put_nowait(word)

    async def begin(self, episode: str, number: int = 3) -> Word:
        self._words[episode] = asyncio.Queue()
        self.host.begin(episode, {"from": number}, seed=0)
        return await self.next_word(episode)

    async def turn(self, episode: str, action: str = "-", num_left: int = 10) -> Word:
        self.host.take_turn(episode, encode(action), num_left)
        return await self.next_word(episode)

    async def next_word(self, episode: str) -> Word:
        return await self._words[episode].get()

    def is_silent(self, episode: str) -> bool:
        return self._words[episode].empty()


async def settle() -> None:
    """Let everything happen that does not wait."""
    loop = asyncio.get_running_loop()
    for _ in range(10):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def played(actions: Sequence[str], **table: Any) -> list[Word]:
    """The words of one episode with these actions."""

    async def play() -> list[Word]:
        at = Table(**table)
        return [await at.begin("e"), *[await at.turn("e", action) for action in actions]]

    return asyncio.run(play())
