"""The folder of a run: which files it has, and whose it is.

It is claimed before anything starts, and given back where nothing began.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dora.config import Config
from dora.errors import InputError
from dora.observe import status
from dora.runtime.past import SAMPLES
from dora.runtime.prompts import PUT_PROMPTS
from dora.runtime.trackers import KNOWN_AS

EVAL_BEFORE = "eval_before.json"  # for a run that goes on in another life
RUN_FILES = (
    "config.toml",
    "journal.jsonl",
    "metrics.jsonl",
    *(SAMPLES + end for end in ("", "-wal", "-shm")),
    "summary.json",
    status.FILE_NAME,
    PUT_PROMPTS,
    KNOWN_AS,
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
        (out / "config.toml").write_text(config.to_toml())
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
    draft = out / "summary.json.draft"
    draft.write_text(json.dumps(summary, indent=2) + "\n")
    draft.replace(out / "summary.json")
