"""Runs the environments of many episodes concurrently in one asyncio loop, one task per episode.

Input is a turn of the policy as token ids; output is the environment's reply as an `EnvReply`. The caller
names each episode; a name is used once.
"""

from __future__ import annotations

import asyncio
import base64
import json
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
    close_environment,
    failure_reason,
    restore_snapshot,
    take_snapshot,
)

T = TypeVar("T")


@dataclass(frozen=True)
class EnvReset:
    """The episode has started with this prompt. `state` is for `EnvRunner.restore`; empty: it has none."""

    prompt_ids: list[int]
    state: bytes = b""


@dataclass(frozen=True)
class EnvRestored:
    """The episode continues from a state."""


@dataclass(frozen=True)
class EnvObservation:
    """The observation that follows the policy's turn; the episode continues. `state` as in `EnvReset`."""

    token_ids: list[int]
    state: bytes = b""


@dataclass(frozen=True)
class EnvDone:
    """The episode has ended with this total reward."""

    reward: float


@dataclass(frozen=True)
class EnvFailure:
    """The episode cannot continue: a short reason, and its traceback."""

    reason: str
    detail: str


EnvReply = EnvReset | EnvRestored | EnvObservation | EnvDone | EnvFailure


@dataclass(frozen=True)
class EpisodeLimits:
    """Maximum prompt length (tokens), number of turns, and time of one reset or step (s)."""

    max_prompt_length: int
    max_turns: int
    timeout_s: float


@dataclass(frozen=True)
class TextCodec:
    """Converts observations to token ids and turns to text.

    `encode_observation` also gets the token ids of the turn before the observation.
    """

    encode_prompt: Callable[[Observation], list[int]]
    encode_observation: Callable[[Observation, Sequence[int]], list[int]]
    decode: Callable[[Sequence[int]], str]


class EnvRunner:
    """Runs episodes of one kind of environment. Its methods must be called in the running loop."""

    def __init__(
        self,
        make: Callable[[], Environment],
        limits: EpisodeLimits,
        codec: TextCodec,
        send: Callable[[Any, EnvReply], None],
    ) -> None:
        """`send` gets the name of an episode and a reply."""
        self._make, self._limits, self._codec, self._send = make, limits, codec, send
        self._idle: list[Environment] = []
        self._turns: dict[Hashable, asyncio.Queue[tuple[Sequence[int], int]]] = {}
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, episode: Hashable, row: Mapping[str, Any], seed: int) -> None:
        """Reset an environment; sends `EnvReset` or `EnvFailure`."""

        async def reset(environment: Environment) -> list[float]:
            first = check_observation(await self._with_timeout(environment.reset(row, seed)))
            prompt_ids = self._encode_prompt(first)
            self._send(episode, EnvReset(prompt_ids, _encode_state(environment, [])))
            return []

        self._begin(episode, reset)

    def restore(self, episode: Hashable, state: bytes) -> None:
        """Continue an episode from its state after a turn; sends `EnvRestored` or `EnvFailure`."""

        async def restore(environment: Environment) -> list[float]:
            fields = json.loads(state)
            snapshot = base64.b64decode(fields["snapshot"])
            await self._with_timeout(restore_snapshot(environment, snapshot))
            self._send(episode, EnvRestored())
            rewards: list[float] = fields["rewards"]
            return rewards

        self._begin(episode, restore)

    def submit_turn(self, episode: Hashable, token_ids: Sequence[int], num_left: int) -> None:
        """Execute a turn of the policy; sends `EnvObservation`, `EnvDone` or `EnvFailure`.

        `num_left`: tokens left for the observation and all later turns. Ignored for an episode that has
        ended.
        """
        if episode in self._turns:
            self._turns[episode].put_nowait((token_ids, num_left))

    def cancel(self, episode: Hashable) -> None:
        """End an episode; sends nothing more for it."""
        self._turns.pop(episode, None)
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()

    def _begin(self, episode: Hashable, start: Callable[[Environment], Awaitable[list[float]]]) -> None:
        self._turns[episode] = asyncio.Queue()
        self._tasks[episode] = asyncio.create_task(self._run(episode, start))

    async def _run(self, episode: Hashable, start: Callable[[Environment], Awaitable[list[float]]]) -> None:
        """Run an episode; `start` returns the rewards of the turns before."""
        environment: Environment | None = None
        try:
            environment = self._idle.pop() if self._idle else self._make()
            rewards = await start(environment)
            self._send(episode, EnvDone(await self._run_turns(episode, environment, rewards)))
            self._idle.append(environment)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if episode in self._tasks:  # not cancelled by `cancel`
                self._send(episode, EnvFailure(failure_reason(error), traceback.format_exc()))
            if environment is not None:
                close_environment(environment)  # its state is unknown
        self._turns.pop(episode, None)
        self._tasks.pop(episode, None)

    async def _run_turns(self, episode: Hashable, environment: Environment, rewards: list[float]) -> float:
        """Run turns until the environment is done, or no turns or tokens are left; the sum of all rewards."""
        for number in count(len(rewards) + 1):
            token_ids, num_left = await self._turns[episode].get()
            action = self._codec.decode(token_ids)
            step = check_step(await self._with_timeout(environment.step(action)))
            rewards.append(step.reward)
            if step.done or number == self._limits.max_turns:
                break
            observation = self._codec.encode_observation(step.observation, token_ids)
            if not observation:
                raise Fault("environment gave an empty observation")
            if len(observation) >= num_left:  # no token is left for another turn
                break
            self._send(episode, EnvObservation(observation, _encode_state(environment, rewards)))
        return math.fsum(rewards)

    async def _with_timeout(self, call: Awaitable[T]) -> T:
        """Raises Fault if the call takes too long."""
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():  # raised by the environment
                raise
        raise Fault(f"environment took longer than env.timeout_s = {self._limits.timeout_s:g}")

    def _encode_prompt(self, observation: Observation) -> list[int]:
        prompt_ids = self._codec.encode_prompt(observation)
        max_length = self._limits.max_prompt_length
        if not 1 <= len(prompt_ids) <= max_length:
            raise Fault(
                f"environment prompt has {len(prompt_ids)} tokens, more than data.max_prompt_length = "
                f"{max_length}"
            )
        return prompt_ids


def _encode_state(environment: Environment, rewards: Sequence[float]) -> bytes:
    """The state of an episode between two turns; empty if its environment has no snapshots. Raises Fault."""
    snapshot = take_snapshot(environment)
    if snapshot is None:
        return b""
    return json.dumps({"rewards": [*rewards], "snapshot": base64.b64encode(snapshot).decode()}).encode()
