"""What a person asks of a run while it goes: files in RUN/control, which the driver looks at.

A request is `ID.request`, put there by an atomic rename; its answer is `ID.answer`. The folder
exists while the run does and names its process, so that nobody waits for one that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from dora.errors import InputError, RunError
from dora.observe.nearby import JOURNAL, why_no_run
from dora.observe.status import DRIVER, is_alive

LOOK_S = 0.2  # between two looks into the folder


@dataclass(frozen=True)
class Ask:
    """One request; `engine` is only named where one is meant."""

    command: Literal["list", "add", "drain"]
    engine: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request, in words."""

    is_done: bool
    text: str


class Control:
    """The driver's side."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "control"
        self._next_s = 0.0
        self._folder.mkdir()
        process = psutil.Process()
        _put(run / DRIVER, {"pid": process.pid, "created_s": process.create_time()})

    def asked(self) -> list[tuple[str, Ask]]:
        """New requests with their names, if the last look is long enough ago."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + LOOK_S
        found = []
        for path in sorted(self._folder.glob("*.request")):
            with contextlib.suppress(OSError, ValueError, TypeError):  # not written by us
                found.append((path.stem, Ask(**json.loads(path.read_text()))))
            path.unlink(missing_ok=True)
        return found

    def answer(self, name: str, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # a full disk is the run's worry, not this one's
            _put(self._folder / f"{name}.answer", {"is_done": answer.is_done, "text": answer.text})

    def close(self) -> None:
        """The run is over: nothing can be asked any more."""
        shutil.rmtree(self._folder, ignore_errors=True)


def ask(run: Path, asked: Ask, timeout_s: float) -> Answer:
    """Put a request to the run in a folder and wait for the answer.

    Raises InputError if no run is going there, RunError if it ends or does not answer in time.
    """
    folder, name = run / "control", uuid.uuid4().hex
    request, answer = folder / f"{name}.request", folder / f"{name}.answer"
    _check_running(run)
    try:
        _put(request, {"command": asked.command, "engine": asked.engine})
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if answer.exists():
                return Answer(**json.loads(answer.read_text()))
            _check_running(run)
            time.sleep(LOOK_S / 4)
    except (InputError, OSError) as error:
        raise RunError(f"{run}: the run ended before it answered") from error
    finally:
        is_unread = request.exists()
        for path in (request, answer):
            path.unlink(missing_ok=True)
    why = "it starts, evaluates or saves, and did not look" if is_unread else "what was asked goes on there"
    raise RunError(f"{run}: no answer within {timeout_s:g} s; {why}")


def is_running(run: Path) -> bool:
    """Whether a process drives the run in a folder."""
    try:
        _check_running(run)
    except InputError:
        return False
    return True


def forget_dead(run: Path) -> None:
    """Remove what the driver of a run that was killed left behind; nobody else's."""
    if not is_running(run):
        shutil.rmtree(run / "control", ignore_errors=True)


def _check_running(run: Path) -> None:
    """Raises InputError if no process drives the run in a folder."""
    path = run / DRIVER
    try:
        driver = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        ended = f"{run} is not a running run: it has ended"
        raise InputError(ended if (run / JOURNAL).exists() else why_no_run(run)) from error
    if not is_alive(driver["pid"], driver["created_s"]):
        raise InputError(f"{run} is not a running run: its process {driver['pid']} is gone")


def _put(path: Path, content: dict[str, Any]) -> None:
    """The file appears under its name in one piece."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)
