"""A run that stands still behind a real service: its driver looks up whenever it is nudged."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import httpx
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.events import EngineJoined, Event
from dora.core.orchestrator import Orchestrator
from dora.metrics.rollout import MigrationMetrics
from dora.metrics.run import RunMetrics
from dora.runtime.control.requests import RequestQueue
from dora.runtime.executor import ProcessExecutor
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.rollout.agent_sessions import AgentSessions
from dora.runtime.rollout.episodes import EpisodeReply
from dora.runtime.run_setup import RunSetup
from dora.service.auth import AuthMiddleware
from dora.service.context import RunContext
from dora.service.server import make_app

TOKEN = "the-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MAX_BYTES = 10_000
NUM_ENGINES, NUM_ROWS = 2, 4


class Fleet:
    """Engines that do nothing."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker | None] = dict.fromkeys(range(NUM_ENGINES))
        self.joined = {*self.workers}
        self.ends: dict[int, str] = {}
        self.sent: list[tuple[int, object]] = []
        self.rests: list[int] = []

    def start(self) -> int:
        number = len(self.workers)
        self.workers[number] = None
        return number

    def rest(self, engine: int) -> None:
        self.rests.append(engine)

    def send(self, engine: int, message: object) -> bool:
        self.sent.append((engine, message))
        return True


class Hands:
    """What calls look for in the hands of a run."""

    now, is_held, teller = 12.0, False, None

    def __init__(self, plan: RunSetup, told: WorkerMessages) -> None:
        self.plan, self.fleet = plan, Fleet()
        self.weights = SimpleNamespace(folder=plan.out.parent)  # it is asked for free room
        self.facts: deque[Event] = deque()
        self.refusals: dict[int, str] = {}
        agents = AgentSessions(plan, told, lambda sentence: None) if plan.config.service.agents else None
        self.episodes = SimpleNamespace(player=agents)
        self.patience = SimpleNamespace(awaited=lambda: iter(["agents"] if agents else []))
        self.nudge: Callable[[], None] = lambda: None


class StandingRun:
    """A tiny run with two engines that joined; `agents` plays its episodes, if they are asked for."""

    def __init__(self, folder: Path, **changes: object) -> None:
        config = write_task(folder)
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        self.plan = RunSetup.make(load.read_config(config, overrides), folder / "run")
        self.told = WorkerMessages()
        self.hands = Hands(self.plan, self.told)
        self.core = Orchestrator(self.plan.limits)
        self.core.start(0.0)
        for engine in range(NUM_ENGINES):
            self.core.handle(EngineJoined(engine, NUM_ROWS, version_slots=3), 0.0)
        hands = cast(ProcessExecutor, self.hands)
        meter = RunMetrics(self.plan.limits, hands.sample_book, MigrationMetrics(lambda group: 0))
        self.inside = RunContext(self.plan, hands, self.core.snapshot, meter, is_training=True)
        self.calls = RequestQueue(self.inside)
        self._lock = threading.Lock()
        self.hands.nudge = self.look
        self.app = make_app(self.calls, TOKEN, MAX_BYTES)

    def look(self) -> None:
        """What a driver does, in whichever thread."""
        with self._lock:
            self.calls.look()

    @property
    def agents(self) -> AgentSessions:
        agents: AgentSessions = self.hands.episodes.player
        return agents

    def words(self) -> list[EpisodeReply]:
        """What the player has said since the last time."""
        return [self.told.get()[1] for _ in range(self.told.qsize())]

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One call."""
        return self.converse(lambda http: http.request(method, path, **options))

    def converse(self, talk: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> httpx.Response:
        """Several calls, side by side or one after the other; returns what `talk` does."""

        async def run() -> httpx.Response:
            async with client(self.app) as http:
                return await talk(http)

        return asyncio.run(run())


def client(app: AuthMiddleware) -> httpx.AsyncClient:
    """A client with the token, without a network between."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://run", headers=BEARER, timeout=20
    )


def disconnect_after(
    run: StandingRun,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    **query: str,
) -> int:
    """Ask, and disappear at once: the status of what was answered all the same. Fails if that is late."""
    told = b"" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": told}, *[{"type": "http.disconnect"}] * 9]
    statuses = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    given = BEARER | {"content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": urlencode(query).encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(asyncio.wait_for(run.app(scope, receive, send), 20.0))
    return int(statuses[0])


def refusal(response: httpx.Response, status: int) -> str:
    """Why a call was refused; fails unless it was, with that status and in the one form."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert error["code"] == status
    assert error["type"] == "invalid_request_error"
    return str(error["message"])
