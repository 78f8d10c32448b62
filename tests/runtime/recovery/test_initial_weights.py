"""A run is resumed from the initial weights that it started with, and from no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.tiny import MODEL, save_start, write_task

from dora.config import load
from dora.config.schema import Config
from dora.core.events import Published
from dora.core.types import Limits
from dora.errors import InputError
from dora.journal.reader import Journal, JournalLine
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights, weight_digest
from dora.runtime.recovery.resume import check_initial_weights, critic_digest

START = initial_weights(MODEL, seed=0)
OTHER = initial_weights(MODEL, seed=1)
LIMITS = Limits(num_steps=4, batch_size=2, group_size=2, max_staleness=2)


def read(folder: Path, *changes: str) -> Config:
    return load.read_config(write_task(folder), [*changes])


def recorded(*digests: str, critic: str | None = None) -> Journal:
    """A journal in which versions with these digests were published."""
    events = [Published(version, digest) for version, digest in enumerate(digests)]
    lines = tuple(JournalLine(seq, 0.0, event) for seq, event in enumerate(events))
    return Journal(LIMITS, 7, critic, lines=lines, is_torn=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_other_initial_weights_are_refused_at_every_resume(
    tmp_path: Path, dtype: str, has_checkpoint: bool
) -> None:
    config = read(tmp_path, f"engine.dtype={dtype}")
    journal = recorded(weight_digest(START.to(getattr(torch, dtype))), "digest of version 1")
    check_initial_weights(config, journal, has_checkpoint=has_checkpoint)
    save_pretrained(tmp_path / "start", MODEL, OTHER)
    with pytest.raises(
        InputError, match=r"model.path = '.*start' no longer holds .*version 0, .*; restore the old"
    ):
        check_initial_weights(config, journal, has_checkpoint=has_checkpoint)


def test_a_run_that_published_nothing_may_resume_from_any_model(tmp_path: Path) -> None:
    check_initial_weights(read(tmp_path), recorded(), has_checkpoint=False)


def test_another_critic_is_refused_without_a_checkpoint(tmp_path: Path) -> None:
    folder = save_start(tmp_path / "critic")
    config = read(tmp_path, "algorithm.adv_estimator=gae", f"critic.path={folder}")
    journal = recorded(weight_digest(START), critic=critic_digest(config))
    check_initial_weights(config, journal, has_checkpoint=False)
    save_pretrained(folder, MODEL, OTHER)
    check_initial_weights(config, journal, has_checkpoint=True)
    with pytest.raises(
        InputError, match=r"critic.path = '.*critic' no longer holds .*; restore the old files"
    ):
        check_initial_weights(config, journal, has_checkpoint=False)


def test_a_critic_that_starts_from_the_policy_has_no_digest(tmp_path: Path) -> None:
    assert critic_digest(read(tmp_path, "algorithm.adv_estimator=gae")) is None
