"""`dora train --resume RUN`: may it go on, and with which settings; then its files are put in order.

Nothing is changed before all of it has been found to fit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dora.config import Config
from dora.core.actions import Stop
from dora.errors import InputError
from dora.observe.journal import FILE_NAME, RecordedRun, read_journal
from dora.runtime.control import is_running
from dora.settings import keys, read
from dora.trainer.checkpoint import forget_after, restore, whole_checkpoints

SUMMARY = "summary.json"
# Neither the guarantees nor what is computed depend on these.
MAY_CHANGE = ("runtime", "journal", "metrics")
MAY_CHANGE_KEYS = (
    "engine.num_engines",
    "engine.max_rows",
    "engine.pace",
    "reward.timeout_s",
    "reward.max_failed_share",
    "trainer.save_freq",
    "trainer.keep_last",
    "trainer.num_ranks",
)


def resumed_config(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration a run goes on with. Raises InputError if it cannot, or may not."""
    path = run / "config.toml"
    if not path.is_file():
        raise InputError(f"--resume {run} is not the folder of a run: it has no config.toml")
    if is_running(run):
        raise InputError(f"--resume {run}: this run is running; stop it first")
    before, after = read(path), read(path, overrides)
    for section, key, _ in keys():
        old, new = (getattr(getattr(config, section), key) for config in (before, after))
        if old != new and section not in MAY_CHANGE and f"{section}.{key}" not in MAY_CHANGE_KEYS:
            may = ", ".join([*(f"{name}.*" for name in MAY_CHANGE), *MAY_CHANGE_KEYS])
            raise InputError(
                f"--resume {run}: {section}.{key} was {old!r} and cannot become {new!r}, for what was "
                f"computed and promised depends on it; start another run, or change only {may}"
            )
    return after


def has_begun(run: Path) -> bool:
    """Whether anything was recorded before it died."""
    path = run / FILE_NAME
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        file.readline()  # the header
        return file.readline().endswith(b"\n")


def recorded(run: Path, num_prompts: int) -> RecordedRun:
    """What a run that had begun recorded. Raises InputError if it cannot go on, or has nothing left to do."""
    with (run / FILE_NAME).open("rb") as file:
        head = file.readline()
    written = (run / "config.toml").read_bytes()
    if json.loads(head).get("config_digest") != hashlib.blake2b(written, digest_size=16).hexdigest():
        raise InputError(
            f"{run / 'config.toml'} is not what the run began with; put its old content back, and give what "
            "is to change with --set"
        )
    journal = read_journal(run)
    if journal.num_prompts != num_prompts:
        raise InputError(
            f"--resume {run}: the dataset had {journal.num_prompts} prompts and now has {num_prompts}; "
            "put the old one back"
        )
    restore(run / "checkpoints")
    is_saved = journal.limits.num_steps in whole_checkpoints(run / "checkpoints")
    if isinstance(journal.lines[-1].record, Stop) and is_saved and _is_complete(run / SUMMARY):
        raise InputError(f"--resume {run}: this run has finished all its {journal.limits.num_steps} steps")
    return journal


def _is_complete(summary: Path) -> bool:
    """Whether the last life came to its end: it may have been stopped in the evaluation after training."""
    return summary.is_file() and not json.loads(summary.read_text()).get("stopped")


def put_in_order(run: Path, from_step: int) -> None:
    """Cut off half a line at the journal's end; remove the summary, and checkpoints of steps now void."""
    path = run / FILE_NAME
    written = path.read_bytes()
    os.truncate(path, written.rfind(b"\n") + 1)
    (run / SUMMARY).unlink(missing_ok=True)
    forget_after(run / "checkpoints", from_step)
