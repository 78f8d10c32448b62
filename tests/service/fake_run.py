"""A run without workers behind the real service; requests are processed as soon as they arrive."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from tests.runtime.tiny import write_task

from dora.config import load
from dora.config.schema import ServiceSection
from dora.core.actions import RejectDrain
from dora.core.events import DrainRequested, EngineJoined, Event
from dora.core.orchestrator import Orchestrator
from dora.core.types import GroupId
from dora.envs.episode import EpisodeReply, PolicyTurn
from dora.errors import ServiceError
from dora.metrics.rollout import EngineUsage, MigrationMetrics
from dora.metrics.run import RunMetrics
from dora.runtime.control.requests import RequestQueue, RunEnd
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.agent_sessions import AgentSessions
from dora.runtime.rollout.prompts import PromptSource
from dora.runtime.run_setup import RunSetup
from dora.runtime.scoring.external import ExternalRewards
from dora.runtime.training.external import ExternalTrainer
from dora.service.auth import AuthMiddleware
from dora.service.context import RunContext
from dora.service.server import WebGateway, make_app

TOKEN = "the-token-of-a-test"
AUTH_HEADER = {"Authorization": f"Bearer {TOKEN}"}
MAX_BODY_BYTES = 10_000
NUM_ENGINES, NUM_ROWS = 2, 4
TIMEOUT_S = 20.0
RUN_END = RunEnd("finished", "the run has finished: 4 steps trained")


class NoSamples:
    """The numbers of a run that has no samples."""

    def __init__(self) -> None:
        self.num_tokens: dict[GroupId, dict[int, int]] = {}
        self.num_turns: dict[GroupId, dict[int, int]] = {}
        self.rewards: dict[GroupId, tuple[float, ...]] = {}
        self.task_rewards: dict[GroupId, Mapping[str, Sequence[float]]] = {}
        self.step_metrics: list[tuple[int, dict[str, float]]] = []
        self.engine_usage: dict[int, EngineUsage] = {}
        self.num_recomputed: dict[int, int] = {}

    def source_name(self, group: GroupId) -> str | None:
        return None


class FakeEngines:
    """Engines that do nothing; implements `EngineControl`."""

    def __init__(self, events: deque[Event]) -> None:
        self.engine_ends: dict[int, str | None] = dict.fromkeys(range(NUM_ENGINES))
        self.joined_engines = {*self.engine_ends}
        self.drain_rejections: dict[int, str] = {}
        self._events = events

    def add_engines(self, count: int) -> list[int]:
        first = len(self.engine_ends)
        started = [*range(first, first + count)]
        self.engine_ends |= dict.fromkeys(started)
        return started

    def drain_engine(self, engine: int) -> None:
        self._events.append(DrainRequested(engine))


class FakeContext:
    """Implements `RunContext`; the time is constant."""

    def __init__(self, setup: RunSetup, orchestrator: Orchestrator, messages: WorkerMessages) -> None:
        self.setup, self.state = setup, orchestrator.snapshot
        self.metrics = RunMetrics(setup.limits, NoSamples(), MigrationMetrics(lambda group: 0))
        self.now_s, self.is_training, self.is_paused = 12.0, True, False
        self.events: deque[Event] = deque()
        self.engines = FakeEngines(self.events)
        self.prompts = PromptSource(setup, 0)
        self.agent_sessions: AgentSessions | None = None
        if setup.config.service.agents:
            self.agent_sessions = AgentSessions(setup, messages, DriverClock(), lambda line: None)
        self.external_trainer: ExternalTrainer | None = None
        self.external_rewards: dict[str, ExternalRewards] = {}
        self.weights_dir = setup.out.parent
        self.stream_dir = self.weights_dir / "stream"

    def check_training(self) -> None:
        if not self.is_training:
            raise ServiceError(409, "the run is starting or saving; try again while it trains")

    def put_prompts(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.events.extend(self.prompts.append(first, rows))

    def awaited_inputs(self) -> list[str]:
        return [] if self.agent_sessions is None else ["agents"]

    def pause(self) -> None:
        self.check_training()
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class FakeRun:
    """A tiny run whose two engines have joined. `service__agents="true"` and its like change its settings."""

    def __init__(
        self, folder: Path, prepare: Callable[[Path], object] = lambda start: None, **changes: object
    ) -> None:
        """`prepare` may change the folder of the initial policy."""
        config = write_task(folder)
        prepare(folder / "start")
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        self.setup = RunSetup.make(load.read_config(config, overrides), folder / "run")
        self.setup.out.mkdir(exist_ok=True)
        self.messages = WorkerMessages()
        self.orchestrator = Orchestrator(self.setup.limits)
        self.orchestrator.start(0.0)
        for engine in range(NUM_ENGINES):
            self.orchestrator.handle(EngineJoined(engine, NUM_ROWS, version_slots=3), 0.0)
        self.context = FakeContext(self.setup, self.orchestrator, self.messages)
        self.requests: RequestQueue[RunContext] = RequestQueue(self.context, self.process)
        self._lock = threading.Lock()
        self.app = make_app(self.requests, TOKEN, MAX_BODY_BYTES)

    def process(self) -> None:
        """What a driver does between two events, and the drains; from any thread."""
        with self._lock:
            self.requests.process()
            if any(isinstance(event, DrainRequested) for event in self.context.events):
                self._drain()
                self.requests.process()

    def finish_turn(self, turn: PolicyTurn) -> None:
        """What a driver does when a turn of an episode has finished; from any thread."""
        with self._lock:  # not while another thread is in `process`, which starts the turn
            self.agents.on_turn(turn)
        self.process()

    def end(self) -> None:
        """The run is over; requests in progress have been answered."""
        with self._lock:
            self.requests.close(RUN_END)

    def _drain(self) -> None:
        events = self.context.events
        for _ in range(len(events)):
            event = events.popleft()
            if not isinstance(event, DrainRequested):
                events.append(event)
                continue
            for action in self.orchestrator.handle(event, 1.0):
                if isinstance(action, RejectDrain):
                    self.context.engines.drain_rejections[action.engine] = action.reason

    @property
    def agents(self) -> AgentSessions:
        """The sessions of a run with agents."""
        assert self.context.agent_sessions is not None
        return self.context.agent_sessions

    def replies(self) -> list[EpisodeReply]:
        """What the sessions have sent to the driver since the last call."""
        return [self.messages.get()[1] for _ in range(self.messages.qsize())]

    def ask(self, path: str, body: object, turn: PolicyTurn | None, **headers: str) -> httpx.Response:
        """Request a turn, which the model then generates, unless it is None or the request was refused."""

        async def requests(http: httpx.AsyncClient) -> httpx.Response:
            response = asyncio.ensure_future(http.post(path, json=body, headers=headers))
            while self.messages.empty() and not response.done():
                await asyncio.wait([response], timeout=0.001)
            if turn is not None and not response.done():
                self.finish_turn(turn)
            return await response

        return self.call_many(requests)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One HTTP request."""
        return self.call_many(lambda http: http.request(method, path, **options))

    def call_many(self, requests: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> httpx.Response:
        """Several HTTP requests of one client; returns the result of `requests`."""

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://run", headers=AUTH_HEADER, timeout=TIMEOUT_S
            ) as http:
                return await requests(http)

        return asyncio.run(run())


@contextmanager
def serve(run: FakeRun, settings: ServiceSection | None = None) -> Iterator[WebGateway]:
    """A real server for a run; its address is in the run's folder."""
    gateway = WebGateway(settings or ServiceSection(), run.setup.out)
    gateway.open(run.requests, lambda line: None)
    try:
        yield gateway
    finally:
        run.requests.close(RUN_END)
        gateway.end(RUN_END)
        gateway.close(lambda: True)


def disconnect_after(
    app: AuthMiddleware,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    **query: str,
) -> int:
    """Send a request and disconnect at once; returns the status. Fails if the response comes late."""
    content = b"" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content}, *[{"type": "http.disconnect"}] * 9]
    statuses = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    all_headers = AUTH_HEADER | {"content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": urlencode(query).encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), TIMEOUT_S))
    return int(statuses[0])


def error_message(response: httpx.Response, status: int) -> str:
    """The message of an error response; fails unless it has this status and the one form of errors."""
    assert response.status_code == status, response.text
    kind, error = response.json().values()
    assert kind == "error"
    assert error["code"] == status
    assert error["type"] == "invalid_request_error"
    return str(error["message"])
