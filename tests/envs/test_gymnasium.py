"""Environments of Gymnasium with text actions and observations."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Discrete

from dora.envs.base import Step
from dora.envs.gymnasium import GymnasiumEnvironment


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right (1) until the end; left (0) leads back."""

    observation_space, action_space = Discrete(100), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, Any]:
        super().reset(seed=seed)
        self.left = (options or {"length": 3})["length"]
        self.seeds = seed
        return self.left, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left += 1 - 2 * action
        self.thread = threading.current_thread()
        return self.left, 0.5, self.left == 0, self.left > 4, {}


class Walk(GymnasiumEnvironment):
    def __init__(self) -> None:
        super().__init__(Corridor())

    def to_text(self, observation: int) -> str:
        return "." * observation + ">"

    def to_options(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        return dict(row) or None


async def run_episode(row: Mapping[str, Any], *actions: str) -> list[Any]:
    walk = Walk()
    found: list[Any] = [await walk.reset(row, 7)]
    found += [await walk.step(action) for action in actions]
    walk.close()
    return found


async def test_an_episode_ends_where_the_environment_terminates() -> None:
    assert await run_episode({}, "1", "1", "1") == [
        "...>",
        Step("..>", 0.5, False),
        Step(".>", 0.5, False),
        Step(">", 0.5, True),
    ]


async def test_an_episode_ends_where_the_environment_truncates() -> None:
    assert (await run_episode({}, "0", "0"))[-1] == Step(".....>", 0.5, True)


@pytest.mark.parametrize("action", ["", "right", "2"])
async def test_an_invalid_action_ends_the_episode_without_reward(action: str) -> None:
    assert (await run_episode({}, action))[-1] == Step("", 0.0, True)


async def test_the_row_reaches_the_environment() -> None:
    walk = Walk()
    assert await walk.reset({"length": 1, "seed": 5}, 7) == ".>"
    assert walk.env.seeds == 5  # type: ignore[attr-defined]
    for row in ({}, {"length": 1, "seed": None}):  # null: as in a row of a dataset that has seeds elsewhere
        await walk.reset(row, 7)
        assert walk.env.seeds == 7  # type: ignore[attr-defined]
    walk.close()


async def test_each_environment_has_its_own_thread() -> None:
    walks = [Walk(), Walk()]
    for walk in walks:
        await walk.reset({}, 0)
        await walk.step("1")
    threads = {walk.env.thread for walk in walks}  # type: ignore[attr-defined]
    assert len(threads | {threading.current_thread()}) == 3
    for walk in walks:
        walk.close()


async def test_an_environment_of_the_library_runs() -> None:
    lake = GymnasiumEnvironment(gymnasium.make("FrozenLake-v1", is_slippery=False))
    assert await lake.reset({}, 0) == "0"
    steps = [await lake.step(action) for action in "112122"]
    lake.close()
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert sum(step.reward for step in steps) == 1.0
