"""Runs that are still being written: half of a journal, the rest of it, and a dashboard server in threads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora.dashboard.server import DashboardServer, RunWatcher

WAIT_S = 20.0


@contextmanager
def served(*runs: Path, port: int = 0, token: str | None = None) -> Iterator[DashboardServer]:
    """Serve runs as `dora dash` does, at a free port, and poll the files as often as possible."""
    watcher = RunWatcher(runs, on_error=lambda error: None, poll_s=0.01)
    with DashboardServer(watcher, port, token) as server:
        serving = (watcher.follow, lambda: server.serve_forever(poll_interval=0.01))
        threads = [threading.Thread(target=each) for each in serving]
        for thread in threads:
            thread.start()
        try:
            yield server
        finally:
            watcher.close()
            server.shutdown()
            for thread in threads:
                thread.join(WAIT_S)


def half_of(run: Path, folder: Path) -> Path:
    """A copy of a run whose journal ends in the middle; returns `folder`."""
    shutil.copytree(run, folder)
    text = journal(folder).read_text()
    journal(folder).write_text(text[: text.index("\n", len(text) // 2) + 1])
    return folder


def journal(run: Path) -> Path:
    return run / "journal.jsonl"


def append(run: Path, text: str) -> None:
    with journal(run).open("a") as file:
        file.write(text)


def rest_of(run: Path, half: Path) -> str:
    """What is missing in the journal of the half."""
    return journal(run).read_text()[len(journal(half).read_text()) :]
