"""An OpenEnv server, unmodified, has the environments of a whole run: `make test-agents`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import summary, wait_until
from tests.runtime.tiny import write_task

from dora.audit import audit

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AGENTS_PYTHON", sys.executable)  # that has the library

pytestmark = pytest.mark.agents

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Turn(Action):
    text: str

class Reply(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **options):
        self._state = State(episode_id=episode_id)
        return Reply(text=options["prompt"])

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        reward = action.text.count("7") + len(action.text) / 100
        return Reply(text="77:", reward=reward, done=self._state.step_count == 3)

    @property
    def state(self):
        return self._state

app = create_app(Echo, Turn, Reply, env_name="echo", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
ENVIRONMENT = """
from dora.envs.openenv import OpenEnvEnvironment

class Echo(OpenEnvEnvironment):
    def __init__(self):
        super().__init__("http://127.0.0.1:{port}")

    def to_text(self, observation):
        return observation["text"]

    def to_action(self, text):
        return {{"text": text}}

    def to_options(self, row):
        return {{"prompt": row["prompt"]}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


@contextlib.contextmanager
def running(port: int, *command: str | Path) -> Iterator[None]:
    """Run a program with the library until the block has ended; it listens on `port`."""
    process = subprocess.Popen([PYTHON, *command], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        wait_until(lambda: accepts(port) or process.poll() is not None)
        assert process.poll() is None, "the program has ended"
        yield
    finally:
        process.kill()
        process.wait()


def test_an_openenv_server_has_the_environments_of_a_run(start_run: StartRun, tmp_path: Path) -> None:
    """The library is where `dora env-server` runs, and not where the run is."""
    port, env_port = free_port(), free_port()
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "echo.py").write_text(ENVIRONMENT.format(port=port))
    config, token = write_task(tmp_path), tmp_path / "environments.token"
    env = f'[env]\nhosts = ["127.0.0.1:{env_port}"]\ntoken_file = "{token}"\n'
    config.write_text(config.read_text().replace('[reward]\nfunction = "task.py:reward"\n', env))
    serve = ["-m", "dora", "env-server", f"{tmp_path}/echo.py:Echo", "--port", str(env_port)]
    with running(port, tmp_path / "server.py", str(port)), running(env_port, *serve, "--token-file", token):
        run = start_run(config, run__steps=2, sampling__max_turn_length=5)
        run.succeed()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"]) == (4, 0)
    assert audit.check(run.out).findings == ()
