"""Environments of the library OpenEnv, which run in servers of their own.

A client of the library is one session of a server, over a WebSocket. A subclass defines how actions and
observations, which are not text, are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dora.envs.base import Environment, Observation, Step
from dora.errors import EnvError


class OpenEnvEnvironment(Environment):
    """Adapts a session of a server. An invalid action ends the episode with a reward of 0 for that step."""

    def __init__(self, server: Any) -> None:
        """`server` is a URL, or a client of the library, whose actions and observations may be typed.

        With a URL both are dicts. Raises EnvError if the library is missing.
        """
        self.client = _connect(server) if isinstance(server, str) else server
        self._was_reset = False
        self._closing: asyncio.Task[None] | None = None

    def to_text(self, observation: Any) -> Observation:
        """The text of an observation."""
        return str(observation)

    def to_action(self, text: str) -> Any:
        """The action that a text writes. Raises ValueError if it writes none."""
        raise NotImplementedError

    def to_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the environment's `reset`, beside `seed`."""
        return {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode. A column `seed` of the row replaces `seed`, so each row is another episode."""
        own_seed = row.get("seed")
        options = {"seed": seed if own_seed is None else own_seed, **self.to_options(row)}
        try:
            result = await self.client.reset(**options)
        except Exception:
            if not self._was_reset:
                raise
            await self.client.disconnect()  # the connection was lost after an earlier episode
            result = await self.client.reset(**options)
        self._was_reset = True
        return self.to_text(result.observation)

    async def step(self, action: str) -> Step:
        """Execute an action. A step without a reward has a reward of 0."""
        try:
            parsed = self.to_action(action)
        except ValueError:
            return Step("", 0.0, True)
        result = await self.client.step(parsed)
        return Step(self.to_text(result.observation), float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        """Begin to close the session."""
        self._closing = asyncio.get_running_loop().create_task(self.client.close())


def _connect(url: str) -> Any:
    """A client that connects with its first call."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise EnvError(f"OpenEnv is not installed ({error}); pip install openenv-core") from error
    return GenericEnvClient(base_url=url)
