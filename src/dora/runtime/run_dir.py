"""The folder of a run: which files it has, and whose it is.

It is claimed before anything starts, and given back where nothing began.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from dora.atomic_file import write_text_atomically
from dora.config.schema import Config
from dora.config.toml import to_toml
from dora.errors import InputError
from dora.journal.reader import JOURNAL_FILE, explain_missing_run
from dora.metrics import status
from dora.metrics.status import DRIVER_FILE, is_alive
from dora.metrics.writer import TRACKER_IDS_FILE
from dora.runtime.run_setup import PUT_PROMPTS

SAMPLES = "samples.sqlite"
INCOMING_PARTS = "incoming/parts"  # uploads of an external trainer that are not complete
EVAL_BEFORE = "eval_before.json"  # for a run that goes on in another life
RUN_FILES = (
    "config.toml",
    "journal.jsonl",
    "metrics.jsonl",
    *(SAMPLES + end for end in ("", "-wal", "-shm")),
    "summary.json",
    status.STATUS_FILE,
    PUT_PROMPTS,
    TRACKER_IDS_FILE,
    EVAL_BEFORE,
)


def check_out(out: Path) -> None:
    """Raises InputError if the folder holds a run already, or cannot be a folder."""
    if any((out / name).exists() for name in RUN_FILES):
        raise InputError(
            f"--out {out} already holds a run: --resume {out} goes on with it, another --out begins a new one"
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")


def claim(out: Path, config: Config) -> None:
    """Make the run folder and write the resolved configuration into it."""
    check_out(out)
    _write_config(out, config)


def reclaim(out: Path, config: Config) -> None:
    """The same for a run that died before it began, but for prompts that were put: they were promised."""
    _clear(out, {PUT_PROMPTS})
    _write_config(out, config)


def _write_config(out: Path, config: Config) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.toml").write_text(to_toml(config))
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error}") from error


def unclaim(out: Path) -> None:
    """Input turned out to be bad before anything was generated: the folder can be used again."""
    _clear(out)
    with contextlib.suppress(OSError):
        out.rmdir()


def _clear(out: Path, kept: Collection[str] = ()) -> None:
    for name in {*RUN_FILES} - {*kept}:
        (out / name).unlink(missing_ok=True)


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json` in one piece."""
    write_text_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")


def write_driver(run: Path) -> None:
    """Write which process drives the run, until it ends."""
    process = psutil.Process()
    write_text_atomically(
        run / DRIVER_FILE, json.dumps({"pid": process.pid, "created_s": process.create_time()})
    )


def is_running(run: Path) -> bool:
    """Whether a process drives the run in a folder."""
    try:
        check_running(run)
    except InputError:
        return False
    return True


def forget_dead(run: Path) -> None:
    """Remove what the driver of a run that was killed left behind; nobody else's."""
    if not is_running(run):
        shutil.rmtree(run / "control", ignore_errors=True)


def check_running(run: Path) -> None:
    """Raises InputError if no process drives the run in a folder."""
    path = run / DRIVER_FILE
    try:
        driver = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        ended = f"{run} is not a running run: it has ended"
        raise InputError(ended if (run / JOURNAL_FILE).exists() else explain_missing_run(run)) from error
    if not is_alive(driver["pid"], driver["created_s"]):
        raise InputError(f"{run} is not a running run: its process {driver['pid']} has exited")
