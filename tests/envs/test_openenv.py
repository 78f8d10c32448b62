"""Environments of OpenEnv with text actions and observations; `make test-agents` runs a real server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.envs.countdown import run_ready_tasks

from dora.envs.base import Step
from dora.envs.openenv import OpenEnvEnvironment
from dora.errors import EnvError


class Client:
    """Counts down, as a session of OpenEnv does."""

    def __init__(self) -> None:
        self.is_closed, self.has_connection = False, True

    async def disconnect(self) -> None:
        self.has_connection = True  # the next call connects again

    async def reset(self, *, seed: int, start: int) -> Any:
        if not self.has_connection:
            raise ConnectionError
        self.seed, self.left = seed, start
        return SimpleNamespace(observation={"left": start}, reward=None, done=False)

    async def step(self, action: Mapping[str, int]) -> Any:
        self.left -= action["by"]
        reward = 0.5 if self.left == 0 else None
        return SimpleNamespace(observation={"left": self.left}, reward=reward, done=self.left == 0)

    async def close(self) -> None:
        self.is_closed = True


class Countdown(OpenEnvEnvironment):
    def to_text(self, observation: Mapping[str, int]) -> str:
        return f"{observation['left']}:"

    def to_action(self, text: str) -> dict[str, int]:
        return {"by": int(text)}

    def to_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"start": row["start"]}


async def test_a_session_is_an_episode() -> None:
    client = Client()
    environment = Countdown(client)
    assert await environment.reset({"start": 3}, 7) == "3:"
    assert await environment.step("1") == Step("2:", 0.0, False)
    assert await environment.step("2") == Step("0:", 0.5, True)
    assert client.seed == 7
    assert await environment.reset({"start": 4, "seed": 1}, 7) == "4:"
    assert await environment.step("one") == Step("", 0.0, True)
    assert client.seed == 1
    client.has_connection = False
    assert await environment.reset({"start": 5, "seed": None}, 7) == "5:"
    assert client.seed == 7
    environment.close()
    await run_ready_tasks()
    assert client.is_closed


def test_without_the_library_a_url_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(EnvError, match="pip install openenv-core"):
        Countdown("http://127.0.0.1:8000")
