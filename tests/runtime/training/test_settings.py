"""What a configuration says about the trainer's arithmetic reaches it, and is counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.cli.dry_run import memory_by_device, micro_batch_bytes
from dora.config.load import read_config
from dora.runtime.run_setup import RunSetup

CHANGES = [
    "trainer.dtype=bfloat16",
    "trainer.activation_checkpointing=true",
    "trainer.logits_chunk_tokens=17",
    "trainer.micro_batch_tokens=999",
]


@pytest.fixture
def plans(tmp_path: Path) -> tuple[RunSetup, RunSetup]:
    """As the defaults have it, and with all changes."""
    write_task(tmp_path)
    task, out = tmp_path / "task.toml", tmp_path / "out"
    return RunSetup.make(read_config(task, []), out), RunSetup.make(read_config(task, CHANGES), out)


def test_the_keys_reach_the_trainer(plans: tuple[RunSetup, RunSetup], tmp_path: Path) -> None:
    plain, changed = (plan.trainer_spec(tmp_path, tmp_path).settings for plan in plans)
    assert (plain.dtype, plain.activation_checkpointing, plain.logits_chunk_tokens) == ("float32", False, 256)
    assert (changed.dtype, changed.activation_checkpointing) == ("bfloat16", True)
    assert (changed.logits_chunk_tokens, changed.micro_batch_tokens) == (17, 999)


def test_a_micro_batch_is_counted_where_the_trainer_is(plans: tuple[RunSetup, RunSetup]) -> None:
    assert re.search(r"at most 1 x [\d.]+ MB for a micro-batch", memory_by_device(plans[0])["cpu"])
    assert micro_batch_bytes(plans[1]) < micro_batch_bytes(plans[0]) / 4
