"""Environments of the library Gymnasium, whose actions and observations are no text.

A subclass says how they are written. Their `step` is no coroutine and may take its time, so that
each has a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gymnasium

from dora.envs.base import Environment, Observation, Step

T = TypeVar("T")


class GymnasiumEnvironment(Environment):
    """Plays `env`. An action that cannot be read ends the episode, with a reward of 0 for it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self._thread = ThreadPoolExecutor(max_workers=1)

    def to_text(self, observation: Any) -> Observation:
        """How an observation is written."""
        return str(observation)

    def to_action(self, text: str) -> Any:
        """What the policy means. Raises ValueError where it means nothing."""
        if isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            return int(text)
        return text

    def to_options(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the environment's own `reset` gets as `options`, beside the seed."""
        return None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The column `seed` is the seed, where there is one: so each row is another episode."""
        seed, options = row.get("seed", seed), self.to_options(row)
        observation, _ = await self._away(lambda: self.env.reset(seed=seed, options=options))
        return self.to_text(observation)

    async def step(self, action: str) -> Step:
        """The end of the time that an environment allows (`truncated`) is an end like any other."""
        try:
            meant = self.to_action(action)
        except ValueError:
            return Step("", 0.0, True)
        if not self.env.action_space.contains(meant):
            return Step("", 0.0, True)
        observation, reward, terminated, truncated, _ = await self._away(lambda: self.env.step(meant))
        return Step(self.to_text(observation), float(reward), terminated or truncated)

    def close(self) -> None:
        """Let the thread go, once it has ended what it is at; nobody waits for one that hangs."""
        self._thread.submit(self.env.close)
        self._thread.shutdown(wait=False)

    async def _away(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
