"""The weights that a run begins with, and whether they still are what they were.

A run that goes on reads them again, whatever its checkpoints hold: a frozen reference and adapters are to
them. Version 0 has their digest in the journal; the header has that of a critic's.
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

import torch

from dora.config.load import read_config
from dora.config.schema import Config, iter_values
from dora.core.actions import Stop
from dora.core.events import Published
from dora.engine.kernels.workspace import DTYPES
from dora.errors import InputError
from dora.journal.reader import CONFIG_FILE, JOURNAL_FILE, Journal, explain_missing_run, read_journal
from dora.model.pretrained import load_pretrained
from dora.model.weights import weight_digest
from dora.runtime.run_dir import INCOMING_PARTS, is_running
from dora.trainer.checkpoint import complete_checkpoints, recover_replaced, remove_after


def critic_digest(config: Config) -> str | None:
    """Digest of the weights in critic.path; None where the critic begins as the policy, or there is none."""
    return None if config.critic.path is None else _digest(config.critic.path, torch.float32)


def check_initial_weights(config: Config, journal: Journal, *, has_checkpoint: bool) -> None:
    """Raises InputError where model.path or critic.path holds other weights than when the run began.

    A critic is in every checkpoint, so that it matters without any only.
    """
    published = (r.digest for _, _, r in journal.lines if isinstance(r, Published) and r.version == 0)
    digest = next(published, None)
    if digest not in (None, _digest(config.model.path, DTYPES[config.engine.dtype])):
        _refuse("model.path", config.model.path, f"the weights that the run began with (version 0, {digest})")
    digest = journal.critic_digest
    if digest is not None and not has_checkpoint and digest != critic_digest(config):
        _refuse("critic.path", str(config.critic.path), "the weights that the critic began with")


def _digest(folder: str, dtype: torch.dtype) -> str:
    return weight_digest(load_pretrained(Path(folder))[1].to(dtype))


def _refuse(key: str, path: str, what: str) -> None:
    raise InputError(f"{key} = {path!r} does not hold {what} any more; put the old files back")


# === dora.runtime.recovery.resume: `dora train --resume RUN`: may it go on, and with which settings; then its files are put in order.
#
# Nothing is changed before all of it has been found to fit.

SUMMARY = "summary.json"
# Neither the guarantees nor what is computed depend on these.
CHANGEABLE_KEYS = (
    "runtime.*",
    "ray.*",
    "journal.*",
    "metrics.*",
    "engine.num_engines",
    "engine.max_num_seqs",
    "engine.num_kv_blocks",
    "engine.options",
    "engine.min_step_time",
    "fleet.*.max_num_seqs",
    "fleet.*.num_engines",
    "fleet.*.options",
    "env.hosts",
    "env.token_file",
    "env.num_workers",
    "env.timeout_s",
    "reward.timeout_s",
    "reward.num_workers",
    "reward_task.*.timeout_s",
    "reward_task.*.num_workers",
    "reward.max_failed_fraction",
    "trainer.save_freq",
    "trainer.keep_last",
    "trainer.num_ranks",
    "service.host",
    "service.port",
    "service.token_file",
    "service.max_body_bytes",
    "service.session_timeout_s",
    "service.idle_timeout_s",
)


def resumed_config(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration a run goes on with. Raises InputError if it cannot, or may not."""
    path = run / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"--resume {explain_missing_run(run, CONFIG_FILE)}")
    if is_running(run):
        raise InputError(f"--resume {run}: this run is running; stop it first")
    after = read_config(path, overrides)
    changed = dict(iter_values(after))
    for name, old in iter_values(read_config(path)):
        new = changed.get(name)
        if old != new and not any(fnmatchcase(name, pattern) for pattern in CHANGEABLE_KEYS):
            raise InputError(
                f"--resume {run}: {name} was {old!r} and cannot become {new!r}, for what was computed and "
                f"promised depends on it; start another run, or change only {', '.join(CHANGEABLE_KEYS)}"
            )
    return after


def has_recorded_events(run: Path) -> bool:
    """Whether anything was recorded before it died."""
    path = run / JOURNAL_FILE
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        file.readline()  # the header
        return file.readline().endswith(b"\n")


def read_recorded_journal(run: Path, num_prompts: int | None) -> Journal:
    """What a run that had begun recorded. Raises InputError if it cannot go on, or has nothing left to do."""
    with (run / JOURNAL_FILE).open("rb") as file:
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
    recover_replaced(run / "checkpoints")
    is_saved = journal.limits.num_steps in complete_checkpoints(run / "checkpoints")
    if isinstance(journal.lines[-1].record, Stop) and is_saved and _is_complete(run / SUMMARY):
        raise InputError(f"--resume {run}: this run has finished all its {journal.limits.num_steps} steps")
    return journal


def _is_complete(summary: Path) -> bool:
    """Whether the last life came to its end: it may have been stopped in the evaluation after training."""
    return summary.is_file() and not json.loads(summary.read_text()).get("stopped")


def prepare_run_dir(run: Path, from_step: int) -> None:
    """Cut off half a line at the journal's end; remove the summary, halves of weights that came from outside,
    and checkpoints of steps now void.
    """
    path = run / JOURNAL_FILE
    written = path.read_bytes()
    os.truncate(path, written.rfind(b"\n") + 1)
    (run / SUMMARY).unlink(missing_ok=True)
    shutil.rmtree(run / INCOMING_PARTS, ignore_errors=True)
    remove_after(run / "checkpoints", from_step)
