"""Environments in processes of their own: what they say reaches the driver, whatever becomes of them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.types import RequestId
from dora.errors import EnvError
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.rollout.env_pool import EnvPool, HostUnreachable, try_environment
from dora.runtime.rollout.episodes import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.runtime.run_setup import RunSetup

ENVIRONMENT = """
import os, time
from dora.envs.base import Environment, Step

class Echo(Environment):
    async def reset(self, row, seed):
        return row["prompt"]
    async def step(self, action):
        if action == "x":
            os._exit(7)
        if action == "h":
            time.sleep(3600)
        if action == "r":
            raise KeyError("nothing there")
        return Step(action, 0.5, action == "z")
"""
PATIENCE_S = 60.0


class Driver:
    """Hears what workers and the player say."""

    def __init__(self, folder: Path, **env: object) -> None:
        config = write_task(folder)
        config.write_text(config.read_text().replace('[reward]\nfunction = "task.py:reward"\n', ""))
        (folder / "echo.py").write_text(ENVIRONMENT)
        chosen = {"environment": f"{folder}/echo.py:Echo", "timeout_s": 0.5, **env}
        changes = [f"env.{key}={value}" for key, value in chosen.items()]
        self.plan = RunSetup.make(load.read_config(config, changes), folder)
        self._told = WorkerMessages()
        self.notices: list[str] = []
        self.player = EnvPool(self.plan, self._told, self.notices.append)

    def next_word(self) -> EpisodeReply:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self.player.check_deadlines()
            try:
                worker, message = self._told.get(timeout=0.1)
            except queue.Empty:
                continue
            if worker is None:
                word: EpisodeReply = message
                return word
            self.player.on_message(worker, message)
        raise AssertionError("nothing was said")

    def begin(self, sibling: int) -> EpisodeId:
        episode = EpisodeId(RequestId(0, 0, sibling), 0)
        self.player.start(episode, version=0)
        assert self.next_word() == EpisodeStarted(episode, tuple(self.plan.tokenizer.encode("10:")))
        return episode

    def turn(self, episode: EpisodeId, number: int, action: str) -> None:
        token_ids = [*self.plan.tokenizer.encode(action), self.plan.tokenizer.eos_id]
        self.player.on_turn(PolicyTurn(episode, number, token_ids, "stop", num_left=9))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.player.close()


def test_an_episode_is_played_away_and_its_reward_comes_back(driver: Driver) -> None:
    assert driver.player.not_started == ["environments 0"]
    episode = driver.begin(0)
    assert driver.player.not_started == []
    driver.turn(episode, 0, "ab")
    assert driver.next_word() == EpisodeObservation(episode, 0, tuple(driver.plan.tokenizer.encode("ab")))
    driver.turn(episode, 1, "z")
    assert driver.next_word() == EpisodeEnded(episode, 1, 1.0)
    driver.player.release(episode)
    driver.begin(0)
    somebody_else = object.__new__(Worker)
    assert not driver.player.on_message(somebody_else, "anything")
    assert try_environment(driver.plan) == "begins with '10:', 3 tokens"


def test_what_is_raised_breaks_one_episode_and_a_death_all_that_were_in_the_process(driver: Driver) -> None:
    raising, dying, beside = (driver.begin(sibling) for sibling in range(3))
    driver.turn(raising, 0, "r")
    assert driver.next_word() == EpisodeFailed(raising, "environment raised KeyError")
    driver.player.release(raising)
    assert "nothing there" in driver.notices[0]
    driver.turn(dying, 0, "x")
    reason = "environment's process ended: environments 0 ended with exit code 7"
    assert [driver.next_word(), driver.next_word()] == [
        EpisodeFailed(dying, reason),
        EpisodeFailed(beside, reason),
    ]
    driver.player.release(dying)
    driver.turn(beside, 0, "ab")  # said before the driver heard of the death
    driver.player.release(beside)
    driver.begin(0)
    assert len(driver.notices) == 1


def test_a_process_that_hangs_is_replaced_and_its_episodes_break_by_name(driver: Driver) -> None:
    hanging, beside = driver.begin(0), driver.begin(1)
    driver.turn(hanging, 0, "h")
    reason = "environment or one beside it hangs, env.timeout_s = 0.5"
    assert [driver.next_word(), driver.next_word()] == [
        EpisodeFailed(hanging, reason),
        EpisodeFailed(beside, reason),
    ]
    driver.begin(2)


def test_a_class_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    driver = Driver(tmp_path, environment=f"{tmp_path}/echo.py:Ecco")
    try:
        with pytest.raises(EnvError, match="has no 'Ecco'; it has Echo"):
            driver.next_word()
    finally:
        driver.player.close()


def test_a_first_prompt_that_cannot_be_tokenized_is_told_in_a_sentence(tmp_path: Path) -> None:
    echo = tmp_path / "echo.py"
    driver = Driver(tmp_path)
    driver.player.close()
    echo.write_text(ENVIRONMENT.replace('return row["prompt"]', 'return "\\u2603"'))
    with pytest.raises(EnvError) as error:
        try_environment(driver.plan)
    assert str(error.value).startswith(f"env.environment = {echo}:Echo: the episode of the first row")
    assert "cannot tokenize the text" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_host_that_is_passed_over_is_told_once(driver: Driver) -> None:
    for _ in range(2):
        driver.player.on_message(driver.player._homes[0].worker, HostUnreachable("far:1", "no answer"))
    assert driver.notices == ["far:1 of env.hosts is passed over, also later without a word: no answer"]
