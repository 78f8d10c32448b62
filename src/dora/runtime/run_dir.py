"""The run folder: its files, and which process drives the run.

A new run claims its folder before it starts anything, and releases it if its input is bad.
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
from dora.config.schema import Config, iter_values
from dora.config.toml import to_toml
from dora.errors import InputError
from dora.journal.reader import JOURNAL_FILE, explain_missing_run
from dora.journal.writer import file_digest
from dora.metrics import status
from dora.metrics.status import DRIVER_FILE, driver_of, is_alive, remote_driver_of
from dora.metrics.writer import TRACKER_IDS_FILE
from dora.runtime.run_setup import UPLOADED_PROMPTS

SAMPLES = "samples.sqlite"
CODE = "code"  # has copies of the user's files
CODE_FILES = f"{CODE}/*.{'[0-9a-f]' * 12}.py"
SESSIONS = "sessions.txt"  # the names of agents' sessions
SERVICE_ADDRESS = "service.json"  # URL and auth token of the service, while it listens
INCOMING_PARTS = "incoming/parts"  # uploads of an external trainer that are not complete
RUN_FILES = (
    "config.toml",
    "journal.jsonl",
    "metrics.jsonl",
    *(SAMPLES + end for end in ("", "-wal", "-shm")),
    "summary.json",
    status.STATUS_FILE,
    UPLOADED_PROMPTS,
    TRACKER_IDS_FILE,
    SESSIONS,
)


def check_out(out: Path) -> None:
    """Raises InputError if the folder already holds a run, or is a file."""
    if any((out / name).exists() for name in RUN_FILES):
        raise InputError(
            f"--out {out} already holds a run: resume it with --resume {out}, or choose another --out"
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")


def claim(out: Path, config: Config) -> None:
    """Create the run folder and write the resolved configuration into it. Raises InputError."""
    check_out(out)
    _write_config(out, config)
    (out / SERVICE_ADDRESS).unlink(missing_ok=True)  # of another run that was here


def reclaim(out: Path, config: Config) -> None:
    """As `claim`, for a run that crashed before its first event; prompts uploaded to it are kept."""
    _clear(out, {UPLOADED_PROMPTS})
    _write_config(out, config)


def _write_config(out: Path, config: Config) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out / "config.toml", to_toml(config))
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error}; name another folder") from error


def release(out: Path) -> None:
    """Remove the files of a run whose input is bad: the folder can be used again."""
    _clear(out)
    with contextlib.suppress(OSError):
        out.rmdir()


def _clear(out: Path, kept: Collection[str] = ()) -> None:
    for name in {*RUN_FILES} - {*kept}:
        (out / name).unlink(missing_ok=True)
    for copy in out.glob(CODE_FILES):
        copy.unlink()
    with contextlib.suppress(OSError):
        (out / CODE).rmdir()


def code_files(config: Config) -> dict[str, Path]:
    """The user's files, each by the path of its copy in the run folder: code/KEY.DIGEST.py."""
    names = ((key, value.rpartition(":")[0]) for key, value in iter_values(config) if isinstance(value, str))
    files = [(key, Path(name)) for key, name in names if name.endswith(".py")]
    return {f"{CODE}/{key}.{file_digest(file)[:12]}.py": file for key, file in files}


def copy_code(out: Path, config: Config) -> dict[str, str]:
    """Copy the user's files into the run folder; returns the SHA-256 of each copy by its path there."""
    files = code_files(config)
    for name, file in files.items():
        (out / CODE).mkdir(exist_ok=True)
        shutil.copyfile(file, out / name)
    return {name: file_digest(out / name) for name in files}


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json` atomically."""
    write_text_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")


def write_driver(run: Path) -> None:
    """Record that this process drives the run."""
    process = psutil.Process()
    write_text_atomically(
        run / DRIVER_FILE, json.dumps({"pid": process.pid, "created_s": process.create_time()})
    )


def remove_stale_files(run: Path) -> None:
    """Remove the control folder and the service's address of a driver that was killed; not of a running one.

    Raises InputError if the driver runs on another machine.
    """
    if (host := remote_driver_of(run)) is not None:
        raise InputError(f"--resume {run}: this run is in progress on {host}; stop it first")
    if driver_of(run) is None:
        shutil.rmtree(run / "control", ignore_errors=True)
        (run / SERVICE_ADDRESS).unlink(missing_ok=True)  # clients wait for the new one


def check_running(run: Path) -> None:
    """Raises InputError if no process drives the run in a folder."""
    path = run / DRIVER_FILE
    try:
        driver = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        ended = f"{run} is not a running run: it has ended"
        raise InputError(ended if (run / JOURNAL_FILE).exists() else explain_missing_run(run)) from error
    if not is_alive(driver["pid"], driver["created_s"]):
        raise InputError(f"{run} is not a running run: its process {driver['pid']} has exited")
