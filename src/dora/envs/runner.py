"""Runs the environments of many episodes concurrently in one asyncio loop, one task per episode.

Input is a turn of the policy; output is the environment's reply. An `EpisodeId` is used once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
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
from dora.envs.episode import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)

T = TypeVar("T")


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
        send: Callable[[EpisodeReply], None],
    ) -> None:
        """`send` gets the replies."""
        self._make, self._limits, self._codec, self._send = make, limits, codec, send
        self._idle: list[Environment] = []
        self._turns: dict[EpisodeId, asyncio.Queue[PolicyTurn]] = {}
        self._tasks: dict[EpisodeId, asyncio.Task[None]] = {}

    def start(self, episode: EpisodeId, row: Mapping[str, Any], seed: int) -> None:
        """Reset an environment; sends `EpisodeStarted` or `EpisodeFailed`."""

        async def reset(environment: Environment) -> list[float]:
            first = check_observation(await self._with_timeout(environment.reset(row, seed)))
            prompt_ids = self._encode_prompt(first)
            self._send(EpisodeStarted(episode, prompt_ids, state=_encode_state(environment, [])))
            return []

        self._begin(episode, reset)

    def restore(self, episode: EpisodeId, state: bytes, prompt_ids: tuple[int, ...]) -> None:
        """Continue an episode from its state after a turn; sends as `start`, with its prompt."""

        async def restore(environment: Environment) -> list[float]:
            fields = json.loads(state)
            snapshot = base64.b64decode(fields["snapshot"])
            await self._with_timeout(restore_snapshot(environment, snapshot))
            self._send(EpisodeStarted(episode, prompt_ids))
            rewards: list[float] = fields["rewards"]
            return rewards

        self._begin(episode, restore)

    def submit_turn(self, turn: PolicyTurn) -> None:
        """Execute a turn of the policy; sends `EpisodeObservation`, `EpisodeEnded` or `EpisodeFailed`.

        Ignored for an episode that has ended.
        """
        if turn.episode in self._turns:
            self._turns[turn.episode].put_nowait(turn)

    def cancel(self, episode: EpisodeId) -> None:
        """End an episode; sends nothing more for it."""
        self._turns.pop(episode, None)
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()

    def _begin(self, episode: EpisodeId, start: Callable[[Environment], Awaitable[list[float]]]) -> None:
        self._turns[episode] = asyncio.Queue()
        self._tasks[episode] = asyncio.create_task(self._run(episode, start))

    async def _run(self, episode: EpisodeId, start: Callable[[Environment], Awaitable[list[float]]]) -> None:
        """Run an episode; `start` returns the rewards of the turns before."""
        environment: Environment | None = None
        try:
            environment = self._idle.pop() if self._idle else self._make()
            rewards = await start(environment)
            self._send(await self._run_turns(episode, environment, rewards))
            self._idle.append(environment)
        except (GeneratorExit, KeyboardInterrupt):  # this process ends
            raise
        except BaseException as error:  # such as a panic of a library in Rust
            if episode in self._tasks:  # not cancelled by `cancel`
                self._send(EpisodeFailed(episode, failure_reason(error), traceback.format_exc()))
            if environment is not None:
                close_environment(environment)  # its state is unknown
        self._turns.pop(episode, None)
        self._tasks.pop(episode, None)

    async def _run_turns(
        self, episode: EpisodeId, environment: Environment, rewards: list[float]
    ) -> EpisodeEnded:
        """Run turns until the environment is done, or no turns or tokens are left; all rewards are summed."""
        while True:
            turn = await self._turns[episode].get()
            action = self._codec.decode(turn.token_ids)
            step = check_step(await self._with_timeout(environment.step(action)))
            rewards.append(step.reward)
            if step.done or len(rewards) == self._limits.max_turns:
                cut = "" if step.done else "max_turns"
                break
            observation = self._codec.encode_observation(step.observation, turn.token_ids)
            if not observation:
                raise Fault("environment gave an empty observation")
            if len(observation) >= turn.num_left:  # no token is left for another turn
                cut = "observation_length"
                break
            state = _encode_state(environment, rewards)
            self._send(EpisodeObservation(episode, turn.number, tuple(observation), state))
        return EpisodeEnded(episode, turn.number, math.fsum(rewards), tuple(rewards), cut)

    async def _with_timeout(self, call: Awaitable[T]) -> T:
        """Raises Fault if the call takes too long."""
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():  # raised by the environment
                raise
        raise Fault(f"environment took longer than env.timeout_s = {self._limits.timeout_s:g}")

    def _encode_prompt(self, observation: Observation) -> tuple[int, ...]:
        prompt_ids, max_length = self._codec.encode_prompt(observation), self._limits.max_prompt_length
        if not prompt_ids:
            raise Fault("environment gave an empty prompt")
        if len(prompt_ids) > max_length:
            raise Fault(
                f"environment prompt has {len(prompt_ids)} tokens, more than data.max_prompt_length = "
                f"{max_length}"
            )
        return tuple(prompt_ids)


def _encode_state(environment: Environment, rewards: Sequence[float]) -> bytes:
    """The state of an episode between two turns; empty if its environment has no snapshots. Raises Fault."""
    snapshot = take_snapshot(environment)
    if snapshot is None:
        return b""
    return json.dumps({"rewards": [*rewards], "snapshot": base64.b64encode(snapshot).decode()}).encode()
