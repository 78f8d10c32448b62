"""The configuration of the trainer reaches its processes, and its memory is counted in a dry run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.tiny import MODEL, write_task

from dora.config.load import read_config
from dora.errors import ConfigError
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.runtime.memory import memory_by_device, micro_batch_bytes
from dora.runtime.run_setup import RunSetup

CHANGES = [
    "trainer.dtype=bfloat16",
    "trainer.activation_checkpointing=true",
    "trainer.logits_chunk_tokens=17",
    "trainer.micro_batch_tokens=999",
    "trainer.betas=[0.8, 0.95]",
    "trainer.min_lr_ratio=0.1",
]


@pytest.fixture
def setups(tmp_path: Path) -> tuple[RunSetup, RunSetup]:
    """With the default settings, and with CHANGES."""
    write_task(tmp_path)
    task, out = tmp_path / "task.toml", tmp_path / "out"
    return RunSetup.make(read_config(task, []), out), RunSetup.make(read_config(task, CHANGES), out)


def test_the_keys_reach_the_trainer(setups: tuple[RunSetup, RunSetup], tmp_path: Path) -> None:
    default, changed = (setup.trainer_spec(tmp_path, tmp_path).settings for setup in setups)
    assert (default.dtype, default.activation_checkpointing) == ("float32", False)
    assert default.logits_chunk_tokens == 256
    assert (changed.dtype, changed.activation_checkpointing) == ("bfloat16", True)
    assert (changed.logits_chunk_tokens, changed.micro_batch_tokens) == (17, 999)
    assert (default.betas, changed.betas) == ((0.9, 0.999), (0.8, 0.95))
    assert (default.min_lr_ratio, changed.min_lr_ratio) == (0.0, 0.1)


def test_the_memory_of_a_micro_batch_is_counted_on_the_trainers_device(
    setups: tuple[RunSetup, RunSetup],
) -> None:
    assert re.search(r"at most 1 x [\d.]+ MB for a micro-batch", memory_by_device(setups[0])["cpu"])
    assert micro_batch_bytes(setups[1]) < micro_batch_bytes(setups[0]) / 4


def test_the_objective_reaches_the_trainer(task: Path) -> None:
    config = read_config(
        task,
        [
            "algorithm.policy_loss=dual_clip",
            "algorithm.clip_ratio_c=4.0",
            "algorithm.entropy_coeff=0.01",
            "algorithm.kl_loss_coef=0.1",
            "algorithm.kl_loss_type=k3+",
            "algorithm.overlong_buffer_tokens=8",
            "algorithm.mask_truncated_responses=true",
            "correction.proximal=interpolated",
            "correction.token=tis",
            "correction.tis_cap=3.0",
        ],
    )
    spec = RunSetup.make(config, task.parent / "out").trainer_spec(task.parent, task.parent)
    settings, advantages = spec.settings, spec.advantage_settings
    assert (settings.policy_loss, settings.clip_ratio_c) == ("dual_clip", 4.0)
    assert (settings.entropy_coeff, settings.kl_loss_coef, settings.kl_loss_type) == (0.01, 0.1, "k3+")
    assert (settings.correction.proximal, settings.correction.tis_cap) == ("interpolated", 3.0)
    assert (advantages.max_tokens, advantages.overlong_buffer_tokens) == (24, 8)
    assert spec.streams_gradients
    assert spec.masks_truncated
    assert spec.critic is None


def test_the_critic_reaches_the_trainer(task: Path) -> None:
    start = f"critic.path={task.parent / 'start'}"
    lowest = "trainer.min_lr_ratio=0.1"
    config = read_config(
        task, ["algorithm.adv_estimator=gae", "algorithm.gamma=0.99", start, "critic.lr=0.5", lowest]
    )
    spec = RunSetup.make(config, task.parent / "out").trainer_spec(task.parent, task.parent)
    assert spec.critic is not None
    assert spec.critic.model == (task.parent / "start").resolve()
    assert (spec.critic.settings.gamma, spec.critic.settings.lr, spec.streams_gradients) == (0.99, 0.5, False)
    assert spec.critic.settings.min_lr_ratio == 0.1


def test_a_critic_with_another_vocabulary_than_the_policy_is_refused(task: Path) -> None:
    other = replace(MODEL, vocab_size=MODEL.vocab_size + 1)
    save_pretrained(task.parent / "other", other, initial_weights(other, seed=0))
    changes = ["algorithm.adv_estimator=gae", f"critic.path={task.parent / 'other'}"]
    with pytest.raises(ConfigError, match=r"critic\.path = .*use a model of the policy's family"):
        RunSetup.make(read_config(task, changes), task.parent / "out")
