"""Environments in worker processes: their replies reach the driver, and failures of workers are reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.types import RequestId
from dora.envs.episode import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.errors import EnvError, InputError
from dora.runtime.process.supervisor import MAX_GAP_S, Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.env_pool import EnvPool, HostUnreachable, try_environment
from dora.runtime.rollout.partial_outputs import SavedEpisode
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

class Stored(Echo):
    def snapshot(self):
        return b"x"
    def restore(self, state):
        assert state == b"x"
"""
TIMEOUT_S = 60.0
ENV_TIMEOUT_S = 1000.0  # longer than any stall of a busy machine


class Driver:
    """Receives the messages of the pool and of its workers."""

    def __init__(self, folder: Path, **env: object) -> None:
        config = write_task(folder)
        config.write_text(config.read_text().replace('[reward]\nfunction = "task.py:reward"\n', ""))
        (folder / "echo.py").write_text(ENVIRONMENT)
        chosen = {"environment": f"{folder}/echo.py:Echo", "timeout_s": ENV_TIMEOUT_S, **env}
        changes = [f"env.{key}={value}" for key, value in chosen.items()]
        self.setup = RunSetup.make(load.read_config(config, changes), folder)
        self.replies: deque[EpisodeReply] = deque()
        self.notices: list[str] = []
        self.supervisor = Supervisor(
            self.setup.config, folder, WorkerMessages(), lambda reply: self.replies.append(reply)
        )
        self.pool = EnvPool(self.setup, self.supervisor, self.notices.append)

    def next_reply(self) -> EpisodeReply:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.replies:
            assert time.monotonic() < deadline_s, "no reply"
            self.pool.check_deadlines()
            self.supervisor.poll(0.1)
        return self.replies.popleft()

    def pass_time(self, seconds: float) -> None:
        """Advance the time during which the driver was running."""
        self.supervisor.clock._ran_s += seconds

    def start(self, sibling: int) -> EpisodeId:
        episode = EpisodeId(RequestId(0, 0, sibling), 0)
        self.pool.start(episode, version=0)
        assert self.next_reply() == EpisodeStarted(episode, tuple(self.setup.tokenizer.encode("10:")))
        return episode

    def turn(self, episode: EpisodeId, number: int, action: str) -> None:
        token_ids = [*self.setup.tokenizer.encode(action), self.setup.tokenizer.eos_id]
        self.pool.on_turn(PolicyTurn(episode, number, token_ids, "stop", num_left=9))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.pool.close()


def test_an_episode_runs_in_its_worker_and_returns_its_reward(driver: Driver) -> None:
    assert driver.supervisor.not_started() == ["environments 0"]
    episode = driver.start(0)
    assert driver.supervisor.not_started() == []
    driver.turn(episode, 0, "ab")
    assert driver.next_reply() == EpisodeObservation(episode, 0, tuple(driver.setup.tokenizer.encode("ab")))
    driver.turn(episode, 1, "z")
    assert driver.next_reply() == EpisodeEnded(episode, 1, 1.0, (0.5, 0.5))
    driver.pool.release(episode)
    driver.start(0)
    assert try_environment(driver.setup) == "first prompt '10:', 3 tokens"


def test_a_worker_has_the_variables_of_the_chat_template(tmp_path: Path) -> None:
    Driver(tmp_path).pool.close()
    (tmp_path / "start" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ end }}")
    changes = ["data.chat_template=true", "data.chat_template_kwargs.end=abc"]
    changes.append(f"env.environment={tmp_path}/echo.py:Echo")
    setup = RunSetup.make(load.read_config(tmp_path / "task.toml", changes), tmp_path)
    assert try_environment(setup) == "first prompt '10:abc', 6 tokens"


def test_an_episode_is_restored_in_a_worker(tmp_path: Path) -> None:
    driver = Driver(tmp_path, environment=f"{tmp_path}/echo.py:Stored")
    episode = EpisodeId(RequestId(0, 0, 0), 0)
    state = b'{"rewards": [0.25], "snapshot": "eA=="}'
    driver.pool.start(episode, 0, SavedEpisode((1, 2, 3), 1, 7, state))
    assert driver.next_reply() == EpisodeStarted(episode, (1, 2, 3))
    driver.turn(episode, 1, "z")
    assert driver.next_reply() == EpisodeEnded(episode, 1, 0.75, (0.25, 0.5))
    driver.pool.close()


def test_an_exception_fails_one_episode_and_an_exit_all_episodes_of_the_process(driver: Driver) -> None:
    raising, exiting, other = (driver.start(sibling) for sibling in range(3))
    driver.turn(raising, 0, "r")
    failed = driver.next_reply()
    assert isinstance(failed, EpisodeFailed)
    assert (failed.episode, failed.reason) == (raising, "environment raised KeyError")
    driver.pool.release(raising)
    assert "nothing there" in driver.notices[0]
    driver.turn(exiting, 0, "x")
    reason = "environment's process ended: environments 0 exited with code 7"
    assert [driver.next_reply(), driver.next_reply()] == [
        EpisodeFailed(exiting, reason),
        EpisodeFailed(other, reason),
    ]
    driver.pool.release(exiting)
    driver.turn(other, 0, "ab")  # its worker was replaced meanwhile
    driver.pool.release(other)
    driver.start(0)
    assert len(driver.notices) == 1


def test_a_worker_that_hangs_is_replaced_and_its_episodes_fail(driver: Driver) -> None:
    hanging, other = driver.start(0), driver.start(1)
    driver.turn(hanging, 0, "h")
    driver.pass_time(2 * ENV_TIMEOUT_S)
    assert not driver.replies
    driver.pass_time(2 * MAX_GAP_S)
    reason = "environments 0: an environment in this process hangs, env.timeout_s = 1000"
    assert [driver.next_reply(), driver.next_reply()] == [
        EpisodeFailed(hanging, reason),
        EpisodeFailed(other, reason),
    ]
    driver.start(2)


def test_a_missing_environment_class_is_an_input_error(tmp_path: Path) -> None:
    driver = Driver(tmp_path, environment=f"{tmp_path}/echo.py:Ecco")
    try:
        with pytest.raises(InputError, match="has no 'Ecco'; it has Echo"):
            driver.next_reply()
    finally:
        driver.pool.close()


def test_the_error_about_a_prompt_that_cannot_be_tokenized_is_one_line(tmp_path: Path) -> None:
    echo = tmp_path / "echo.py"
    driver = Driver(tmp_path)
    driver.pool.close()
    echo.write_text(ENVIRONMENT.replace('return row["prompt"]', 'return "\\u2603"'))
    with pytest.raises(EnvError) as error:
        try_environment(driver.setup)
    assert str(error.value).startswith(f"env.environment = {echo}:Echo: the episode of the first row")
    assert "cannot tokenize the text" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "cause", "remedy"),
    [
        (
            "Echo(Environment):",
            "Echo(Environment):\n    def __init__(self, size): ...\n",
            "size",
            "correct env.options",
        ),
        (
            "Echo(Environment):",
            "Echo(Environment):\n    def __init__(self): open('no.txt')\n",
            "No such file",
            "correct what makes the environment",
        ),
        ('row["prompt"]', 'row["question"]', "KeyError: 'question'", "columns of the row, which has prompt"),
        ('return row["prompt"]', "raise TypeError('argument')", "TypeError", "have reset return text"),
        ('row["prompt"]', "None", "TypeError", "have reset return text"),
    ],
)
def test_the_remedy_fits_the_failure_of_the_first_episode(
    tmp_path: Path, old: str, new: str, cause: str, remedy: str
) -> None:
    driver = Driver(tmp_path)
    driver.pool.close()
    assert old in ENVIRONMENT
    (tmp_path / "echo.py").write_text(ENVIRONMENT.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        try_environment(driver.setup)
    assert cause in str(error.value)
    assert remedy in str(error.value)


def test_an_unreachable_host_is_logged_once(driver: Driver) -> None:
    slot = next(iter(driver.pool._episodes))
    for _ in range(2):
        driver.pool.on_message(slot, slot.worker, HostUnreachable("far:1", "no answer"))
    assert driver.notices == ["far:1 of env.hosts is unreachable; skipping it (logged once): no answer"]
