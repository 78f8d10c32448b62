"""Environments of the library Gymnasium, whose actions and observations are not text.

A subclass defines how they are written. Their `step` is not a coroutine and may be slow, so each environment
has its own thread.
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
    """Adapts `env`. An invalid action ends the episode with a reward of 0 for that step."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self._thread = ThreadPoolExecutor(max_workers=1)

    def to_text(self, observation: Any) -> Observation:
        """The text of an observation."""
        return str(observation)

    def to_action(self, text: str) -> Any:
        """The action that a text writes. Raises ValueError if it writes none."""
        if isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            return int(text)
        return text

    def to_options(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The `options` of the environment's `reset`."""
        return None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode. A column `seed` of the row replaces `seed`, so each row is another episode."""
        own_seed, options = row.get("seed"), self.to_options(row)
        seed = seed if own_seed is None else own_seed
        observation, _ = await self._in_thread(lambda: self.env.reset(seed=seed, options=options))
        return self.to_text(observation)

    async def step(self, action: str) -> Step:
        """Execute an action. `truncated` ends an episode like `terminated`."""
        try:
            parsed = self.to_action(action)
        except ValueError:
            return Step("", 0.0, True)
        if not self.env.action_space.contains(parsed):
            return Step("", 0.0, True)
        observation, reward, terminated, truncated, _ = await self._in_thread(lambda: self.env.step(parsed))
        return Step(self.to_text(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment after its current call, without waiting."""
        self._thread.submit(self.env.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
