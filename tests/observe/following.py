"""A run that goes on while it is looked at: half of a journal, the rest of it, and `dora dash` in threads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora.observe.dash.server import Dash
from dora.observe.dash.watch import Watch

WAIT_S = 20.0


@contextmanager
def served(*runs: Path, port: int = 0, token: str | None = None) -> Iterator[Dash]:
    """As `dora dash` serves them, at a free port, with looks as often as the machine allows."""
    watch = Watch(runs, complain=lambda trouble: None, look_s=0.01)
    with Dash(watch, port, token) as dash:
        serving = (watch.follow, lambda: dash.serve_forever(poll_interval=0.01))
        threads = [threading.Thread(target=each) for each in serving]
        for thread in threads:
            thread.start()
        try:
            yield dash
        finally:
            watch.close()
            dash.shutdown()
            for thread in threads:
                thread.join(WAIT_S)


def half_of(good_run: Path, folder: Path) -> Path:
    """A copy of a run whose journal ends in the middle; returns `folder`."""
    shutil.copytree(good_run, folder)
    text = journal(folder).read_text()
    journal(folder).write_text(text[: text.index("\n", len(text) // 2) + 1])
    return folder


def journal(run: Path) -> Path:
    return run / "journal.jsonl"


def append(run: Path, text: str) -> None:
    with journal(run).open("a") as file:
        file.write(text)


def rest_of(good_run: Path, run: Path) -> str:
    """What the journal of a half lacks."""
    return journal(good_run).read_text()[len(journal(run).read_text()) :]
