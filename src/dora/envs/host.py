"""Plays many episodes at once in one asyncio loop; each is one coroutine from its reset to its reward.

It hears turns as token ids and says what follows from them: the words at the top. Whoever asks for
an episode names it; a name is used once.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from dora.envs.base import (
    Environment,
    Fault,
    Observation,
    check_observation,
    check_step,
    let_go,
    reason_of,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """The episode has begun with this prompt."""

    prompt_ids: list[int]


@dataclass(frozen=True)
class Replied:
    """The policy is to read these token ids after its turn, and to go on."""

    token_ids: list[int]


@dataclass(frozen=True)
class Ended:
    """The episode is over, and was worth this."""

    reward: float


@dataclass(frozen=True)
class Broke:
    """The episode cannot go on, for this short reason; `detail` is for the person who repairs it."""

    reason: str
    detail: str


Word = Opened | Replied | Ended | Broke


@dataclass(frozen=True)
class Rules:
    """The longest prompt (tokens), the most turns, and the most time that one reset or step may take."""

    max_prompt_length: int
    max_turns: int
    timeout_s: float


@dataclass(frozen=True)
class Language:
    """How text becomes token ids and back: of a first observation, of the later ones, of a turn.

    `encode_next` also gets the token ids of the turn that an observation answers.
    """

    encode_first: Callable[[Observation], list[int]]
    encode_next: Callable[[Observation, Sequence[int]], list[int]]
    decode: Callable[[Sequence[int]], str]


class Host:
    """Episodes of one kind of environment. Its methods belong to the loop that runs."""

    def __init__(
        self,
        make: Callable[[], Environment],
        rules: Rules,
        language: Language,
        say: Callable[[Any, Word], None],
    ) -> None:
        """`say` gets the name of an episode and what is to be said of it."""
        self._make, self._rules, self._language, self._say = make, rules, language, say
        self._idle: list[Environment] = []
        self._turns: dict[Hashable, asyncio.Queue[tuple[Sequence[int], int]]] = {}
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def begin(self, episode: Hashable, row: Mapping[str, Any], seed: int) -> None:
        """Reset an environment; `Opened` or `Broke` follows."""
        self._turns[episode] = asyncio.Queue()
        self._tasks[episode] = asyncio.create_task(self._play(episode, row, seed))

    def take_turn(self, episode: Hashable, token_ids: Sequence[int], num_left: int) -> None:
        """Have the environment answer a turn; `Replied`, `Ended` or `Broke` follows.

        `num_left` tokens are left for the reply and all turns after it. What has ended hears nothing.
        """
        if episode in self._turns:
            self._turns[episode].put_nowait((token_ids, num_left))

    def forget(self, episode: Hashable) -> None:
        """End an episode, wherever it is; nothing more is said of it."""
        self._turns.pop(episode, None)
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()

    async def _play(self, episode: Hashable, row: Mapping[str, Any], seed: int) -> None:
        """An episode from its beginning to its end."""
        environment: Environment | None = None
        try:
            environment = self._idle.pop() if self._idle else self._make()
            first = check_observation(await self._in_time(environment.reset(row, seed)))
            self._say(episode, Opened(self._prompt_ids(first)))
            self._say(episode, Ended(await self._take_turns(episode, environment)))
            self._idle.append(environment)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if episode in self._tasks:  # it is not forgotten
                self._say(episode, Broke(reason_of(error), traceback.format_exc()))
            if environment is not None:
                let_go(environment)  # in an unknown state
        self._turns.pop(episode, None)
        self._tasks.pop(episode, None)

    async def _take_turns(self, episode: Hashable, environment: Environment) -> float:
        """Until the environment is done, or turns or tokens are used up: the sum of all rewards."""
        rewards: list[float] = []
        for number in count(1):
            token_ids, num_left = await self._turns[episode].get()
            action = self._language.decode(token_ids)
            step = check_step(await self._in_time(environment.step(action)))
            rewards.append(step.reward)
            if step.done or number == self._rules.max_turns:
                break
            reply = self._language.encode_next(step.observation, token_ids)
            if not reply:
                raise Fault("environment gave an empty observation")
            if len(reply) >= num_left:  # no token would be left for another turn
                break
            self._say(episode, Replied(reply))
        return math.fsum(rewards)

    async def _in_time(self, call: Awaitable[T]) -> T:
        """What a call returns. Raises Fault if it takes too long."""
        try:
            async with asyncio.timeout(self._rules.timeout_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():  # its own
                raise
        raise Fault(f"environment took longer than env.timeout_s = {self._rules.timeout_s:g}")

    def _prompt_ids(self, observation: Observation) -> list[int]:
        prompt_ids = self._language.encode_first(observation)
        longest = self._rules.max_prompt_length
        if not 1 <= len(prompt_ids) <= longest:
            raise Fault(
                f"environment began with {len(prompt_ids)} tokens, and data.max_prompt_length = {longest}"
            )
        return prompt_ids
