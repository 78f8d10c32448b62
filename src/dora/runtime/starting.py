"""The weights that a run begins with, and whether they still are what they were.

A run that goes on reads them again, whatever its checkpoints hold: a frozen reference and adapters are to
them. Version 0 has their digest in the journal; the header has that of a critic's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dora.config import Config
from dora.core.events import Published
from dora.engine.workspace import DTYPES
from dora.errors import InputError
from dora.model.folder import load_folder
from dora.model.weights import weight_digest
from dora.observe.journal import RecordedRun


def critic_digest(config: Config) -> str | None:
    """Digest of the weights in critic.path; None where the critic begins as the policy, or there is none."""
    return None if config.critic.path is None else _digest(config.critic.path, torch.float32)


def check_start(config: Config, journal: RecordedRun, *, has_checkpoint: bool) -> None:
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
    return weight_digest(load_folder(Path(folder))[1].to(dtype))


def _refuse(key: str, path: str, what: str) -> None:
    raise InputError(f"{key} = {path!r} does not hold {what} any more; put the old files back")
