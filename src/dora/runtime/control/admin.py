"""`dora engines`: list, add and drain the engines of a running run through files in RUN/control.

A client writes `ID.request` by an atomic rename and waits for `ID.answer`. The folder exists while the run
does.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dora.atomic_file import write_text_atomically
from dora.core.state import EngineRecord, State
from dora.errors import InputError, RunError, ServiceError
from dora.runtime.run_dir import check_running, write_driver

POLL_S = 0.2  # between two scans of the folder


@dataclass(frozen=True)
class AdminRequest:
    """A request; `engine` is the engine to drain."""

    command: Literal["list", "add", "drain"]
    engine: int | None = None


@dataclass(frozen=True)
class AdminAnswer:
    """Whether the request succeeded, and a sentence for the user."""

    is_done: bool
    text: str


class ControlDir:
    """The folder RUN/control, as the driver uses it."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "control"
        self._next_s = 0.0
        self._folder.mkdir()
        write_driver(run)

    def new_requests(self) -> list[tuple[str, AdminRequest]]:
        """New requests by id; none within POLL_S of the last scan."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + POLL_S
        found = []
        for path in sorted(self._folder.glob("*.request")):
            with contextlib.suppress(OSError, ValueError, TypeError):  # not a request of `send_request`
                found.append((path.stem, AdminRequest(**json.loads(path.read_text()))))
            path.unlink(missing_ok=True)
        return found

    def answer(self, request_id: str, answer: AdminAnswer) -> None:
        text = json.dumps({"is_done": answer.is_done, "text": answer.text})
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            write_text_atomically(self._folder / f"{request_id}.answer", text)

    def close(self) -> None:
        """Remove the folder: the run accepts no more requests."""
        shutil.rmtree(self._folder, ignore_errors=True)


def send_request(run: Path, wanted: AdminRequest, timeout_s: float) -> AdminAnswer:
    """Send a request to the run in a folder and wait for its answer.

    Raises InputError if no process drives that run, RunError if it ends or does not answer in time.
    """
    folder, request_id = run / "control", uuid.uuid4().hex
    request, answer = folder / f"{request_id}.request", folder / f"{request_id}.answer"
    check_running(run)
    try:
        write_text_atomically(request, json.dumps({"command": wanted.command, "engine": wanted.engine}))
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if answer.exists():
                return AdminAnswer(**json.loads(answer.read_text()))
            check_running(run)
            time.sleep(POLL_S / 4)
    except (InputError, OSError) as error:
        raise RunError(f"{run}: the run ended before it replied") from error
    finally:
        is_unread = request.exists()
        for path in (request, answer):
            path.unlink(missing_ok=True)
    reason = "the run is starting, evaluating or saving" if is_unread else "the request is still in progress"
    raise RunError(f"{run}: no reply within {timeout_s:g} s: {reason}")


class EngineControl(Protocol):
    """What the driver can do with engines on request; the executor implements it."""

    def add_engines(self, count: int) -> list[int]:
        """Start engines; returns their numbers. Raises ServiceError without room for them."""

    def drain_engine(self, engine: int | None) -> int:
        """Ask the orchestrator to drain an engine. Raises ServiceError if the run has no such engine."""

    def drain_rejection(self, engine: int) -> str | None:
        """Why the orchestrator refused to drain an engine, until the rejections are taken."""

    @property
    def all_engines(self) -> Sequence[int]:
        """Numbers of all current and former engines, in order."""

    @property
    def joined_engines(self) -> Set[int]: ...

    @property
    def starting_engines(self) -> Set[int]: ...

    def engine_end(self, engine: int) -> str | None:
        """How an engine ended: "removed", or "lost (reason)"; None if it has not."""

    def take_drain_rejections(self) -> dict[int, str]:
        """Engines that the orchestrator refused to drain since the last call, with the reason."""


class EngineAdmin:
    """Handles the requests in a control folder. Adding and draining take time, but no method blocks."""

    def __init__(self, control: ControlDir, engines: EngineControl, state: Callable[[], State]) -> None:
        self._control, self._engines, self._state = control, engines, state
        self._adding: dict[str, int] = {}  # request id -> engine that is starting
        self._draining: dict[str, int] = {}  # request id -> engine that is draining
        self._rejections: dict[int, str] = {}

    def process(self) -> None:
        """Begin new requests, and answer those that are finished."""
        for request_id, wanted in self._control.new_requests():
            answer = self._begin(request_id, wanted)
            if answer is not None:
                self._control.answer(request_id, answer)
        for request_id, engine in [*self._adding.items()]:
            self._finish(request_id, self._adding, self._add_result(engine))
        self._rejections = self._engines.take_drain_rejections()
        for request_id, engine in [*self._draining.items()]:
            self._finish(request_id, self._draining, self._drain_result(engine))

    def _begin(self, request_id: str, wanted: AdminRequest) -> AdminAnswer | None:
        """The answer, if it is known at once."""
        if wanted.command == "list":
            return AdminAnswer(True, self._list())
        try:
            if wanted.command == "add":
                (self._adding[request_id],) = self._engines.add_engines(1)
            else:
                self._draining[request_id] = self._engines.drain_engine(wanted.engine)
        except ServiceError as error:
            return AdminAnswer(False, str(error))
        return None

    def _finish(self, request_id: str, pending: dict[str, int], answer: AdminAnswer | None) -> None:
        if answer is not None:
            del pending[request_id]
            self._control.answer(request_id, answer)

    def _add_result(self, engine: int) -> AdminAnswer | None:
        if engine in self._engines.joined_engines:
            return AdminAnswer(True, f"engine {engine} joined")
        end = self._engines.engine_end(engine)
        return AdminAnswer(False, f"engine {engine} did not start: {end}") if end else None

    def _drain_result(self, engine: int) -> AdminAnswer | None:
        rejection, end = self._rejections.get(engine), self._engines.engine_end(engine)
        if rejection is not None:
            return AdminAnswer(False, f"engine {engine} cannot be drained: {rejection}")
        if end is None:
            return None
        if end == "removed":
            return AdminAnswer(True, f"engine {engine} drained and removed")
        return AdminAnswer(False, f"engine {engine} is {end}")

    def _list(self) -> str:
        engines = self._state().engines
        lines = [f"engine {engine.id}: {_describe(engine)}" for _, engine in sorted(engines.items())]
        starting = sorted(self._engines.starting_engines)
        return "\n".join([*lines, *(f"engine {engine}: starting" for engine in starting)])


def _describe(engine: EngineRecord) -> str:
    versions = " ".join(f"v{version}" for version in sorted(engine.loaded)) or "no version"
    text = f"{engine.num_rows - engine.free_rows} of {engine.num_rows} rows in use, {versions}"
    text += ", shares the trainer's device" if engine.is_colocated else ""
    return text + (", draining" if engine.is_draining else "")
