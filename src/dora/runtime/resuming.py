"""`dora train --resume RUN`: may it go on, and with which settings; then its files are put in order.

Nothing is changed before all of it has been found to fit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from dora.config import Config
from dora.core.actions import Stop
from dora.errors import InputError
from dora.observe.journal import FILE_NAME, RecordedRun, read_journal
from dora.observe.nearby import CONFIG, why_no_run
from dora.runtime.control import is_running
from dora.runtime.outside import PARTS
from dora.settings import read, values
from dora.trainer.checkpoint import forget_after, restore, whole_checkpoints

SUMMARY = "summary.json"
# Neither the guarantees nor what is computed depend on these.
MAY_CHANGE = (
    "runtime.*",
    "ray.*",
    "journal.*",
    "metrics.*",
    "engine.num_engines",
    "engine.max_rows",
    "engine.kv_blocks",
    "engine.options",
    "engine.pace",
    "fleet.*.max_rows",
    "fleet.*.num_engines",
    "fleet.*.options",
    "env.hosts",
    "env.token_file",
    "env.num_workers",
    "env.timeout_s",
    "reward.timeout_s",
    "reward.num_workers",
    "task.*.timeout_s",
    "task.*.num_workers",
    "reward.max_failed_share",
    "trainer.save_freq",
    "trainer.keep_last",
    "trainer.num_ranks",
    "service.host",
    "service.port",
    "service.token_file",
    "service.max_body_bytes",
    "service.session_lease_s",
    "service.patience_s",
)


def resumed_config(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration a run goes on with. Raises InputError if it cannot, or may not."""
    path = run / CONFIG
    if not path.is_file():
        raise InputError(f"--resume {why_no_run(run, CONFIG)}")
    if is_running(run):
        raise InputError(f"--resume {run}: this run is running; stop it first")
    after = read(path, overrides)
    changed = dict(values(after))
    for name, old in values(read(path)):
        new = changed.get(name)
        if old != new and not any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE):
            raise InputError(
                f"--resume {run}: {name} was {old!r} and cannot become {new!r}, for what was computed and "
                f"promised depends on it; start another run, or change only {', '.join(MAY_CHANGE)}"
            )
    return after


def has_begun(run: Path) -> bool:
    """Whether anything was recorded before it died."""
    path = run / FILE_NAME
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        file.readline()  # the header
        return file.readline().endswith(b"\n")


def recorded(run: Path, num_prompts: int | None) -> RecordedRun:
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
    """Cut off half a line at the journal's end; remove the summary, halves of weights that came from outside,
    and checkpoints of steps now void.
    """
    path = run / FILE_NAME
    written = path.read_bytes()
    os.truncate(path, written.rfind(b"\n") + 1)
    (run / SUMMARY).unlink(missing_ok=True)
    shutil.rmtree(run / PARTS, ignore_errors=True)
    forget_after(run / "checkpoints", from_step)
