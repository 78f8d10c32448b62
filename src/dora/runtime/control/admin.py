"""`dora engines`: requests to a running run, through files in RUN/control.

A client writes `ID.request` by an atomic rename and waits for `ID.answer`. The folder exists while the run
does.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dora.atomic_file import write_text_atomically
from dora.errors import InputError, RunError
from dora.runtime.control import engines
from dora.runtime.control.engines import EngineContext, EngineStatus
from dora.runtime.control.requests import RequestQueue
from dora.runtime.run_dir import check_running, write_driver

POLL_S = 0.2  # between two scans of the folder
Command = Literal["list", "add", "drain"]


@dataclass(frozen=True)
class AdminRequest:
    """A request; `engine` is the engine to drain. Raises ValueError for other values."""

    command: Command
    engine: int | None = None

    def __post_init__(self) -> None:
        if self.command not in get_args(Command):
            raise ValueError(f"command = {self.command!r} must be one of {', '.join(get_args(Command))}")
        if self.command == "drain" and type(self.engine) is not int:
            raise ValueError(f"engine = {self.engine!r} must be the number of the engine to drain")


@dataclass(frozen=True)
class AdminAnswer:
    """Whether the request succeeded, and a sentence for the user."""

    is_done: bool
    text: str


class ControlDir:
    """The folder RUN/control, as the driver uses it."""

    def __init__(self, run: Path) -> None:
        """Raises RunError if another process drives the run: a folder can be created only once."""
        self._folder = run / "control"
        self._next_s = 0.0
        self._pending: dict[str, tuple[AdminRequest, Future[Any]]] = {}
        try:
            self._folder.mkdir()
        except FileExistsError as error:
            raise RunError(
                f"{self._folder} exists, so another process drives this run: stop it, or wait for its end; "
                "if there is none, remove the folder"
            ) from error
        write_driver(run)

    def process(self, requests: RequestQueue[Any]) -> None:
        """Submit new requests to the driver, and answer those that are finished."""
        for request_id, wanted in self.new_requests():
            self._pending[request_id] = wanted, requests.submit(_function(wanted), math.inf)
        for request_id, (wanted, result) in [*self._pending.items()]:
            if result.done():
                del self._pending[request_id]
                self.answer(request_id, _answer(wanted, result))

    def new_requests(self) -> list[tuple[str, AdminRequest]]:
        """New requests by id; none within POLL_S of the last scan. Invalid ones are answered here."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + POLL_S
        found = []
        for path in sorted(self._folder.glob("*.request")):
            with contextlib.suppress(OSError):  # withdrawn
                try:
                    found.append((path.stem, AdminRequest(**json.loads(path.read_text(encoding="utf-8")))))
                except (ValueError, TypeError) as error:
                    self.answer(path.stem, AdminAnswer(False, f"invalid request: {error}"))
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
                return AdminAnswer(**json.loads(answer.read_text(encoding="utf-8")))
            check_running(run)
            time.sleep(POLL_S / 4)
    except (InputError, OSError) as error:
        raise RunError(f"{run}: the run ended before it replied") from error
    finally:
        is_unread = request.exists()
        for path in (request, answer):
            path.unlink(missing_ok=True)
    reason = "the run is starting or saving" if is_unread else "the request is still in progress"
    raise RunError(f"{run}: no reply within {timeout_s:g} s: {reason}")


def _function(wanted: AdminRequest) -> Callable[[EngineContext], Any]:
    match wanted:
        case AdminRequest("add"):
            return engines.add_engine()
        case AdminRequest("drain", int(engine)):
            return engines.drain_engine(engine, waits_for_end=True)
        case _:
            return engines.list_engines


def _answer(wanted: AdminRequest, result: Future[Any]) -> AdminAnswer:
    if (error := result.exception()) is not None:
        return AdminAnswer(False, str(error))
    if wanted.command == "list":
        found = [status for status in result.result() if status.state != "ended"]
        return AdminAnswer(True, "\n".join(map(_describe, found)))
    status: EngineStatus = result.result()
    if wanted.command == "add":
        if status.end is None:
            return AdminAnswer(True, f"engine {status.engine} joined")
        return AdminAnswer(False, f"engine {status.engine} did not start: {status.end}")
    if status.end == "removed":
        return AdminAnswer(True, f"engine {status.engine} drained and removed")
    return AdminAnswer(False, f"engine {status.engine} is {status.end}")


def _describe(status: EngineStatus) -> str:
    if status.state == "starting":
        return f"engine {status.engine}: starting"
    versions = " ".join(f"v{version}" for version in status.versions) or "no version"
    text = f"engine {status.engine}: {status.num_rows_used} of {status.num_rows} rows in use, {versions}"
    text += ", shares the trainer's device" if status.is_colocated else ""
    return text + (", draining" if status.state == "draining" else "")
