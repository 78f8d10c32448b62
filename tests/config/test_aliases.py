"""Errors for renamed keys and for keys of other trainers name the right key."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from tests.config.minimal import MINIMAL, error_of, write_minimal

from dora.config.aliases import RENAMED, TRAINER_ALIASES, KeyAlias, find_alias
from dora.config.schema import LIST_SECTIONS, iter_keys, iter_sections

ALIASES = [*chain(RENAMED, *TRAINER_ALIASES.values())]
NAMES = {f"{section}.{key}" for section, key, _ in iter_keys()} | dict(iter_sections()).keys()
RENAMED_KEYS = [alias[:2] for alias in RENAMED if "." in alias.theirs]
TABLES = """
[[reward_task]]
name = "others"
class = "math:hypot"
[[fleet]]
name = "others"
backend = "vllm"
"""


def named(key: str) -> str:
    """The key as it is written for the table "others" of a list of tables."""
    section, _, name = key.partition(".")
    return f"{section}.others.{name}" if section in LIST_SECTIONS else key


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS)
def test_a_renamed_key_in_a_file_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    section, _, key = old.partition(".")
    file = write_minimal(tmp_path)
    head = f'[[{section}]]\nname = "others"' if section in LIST_SECTIONS else f"[{section}]"
    text = f"{head}\n{key} = 3\n"
    if f"\n{head}\n" in MINIMAL:
        text = MINIMAL.replace(f"\n{head}\n", f"\n{text}")
    file.write_text(text)
    assert f"{old}: unknown key; {old} is {new} here" in error_of(file)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS)
def test_a_renamed_key_in_an_override_is_refused_with_its_new_name(
    tmp_path: Path, old: str, new: str
) -> None:
    file = write_minimal(tmp_path)
    file.write_text(MINIMAL + TABLES)
    assert f"{old}: unknown key; {old} is {new} here" in error_of(file, f"{named(old)}=3")


def test_a_renamed_list_of_tables_is_refused_with_its_new_name(tmp_path: Path) -> None:
    file = write_minimal(tmp_path)
    file.write_text(MINIMAL + '[[task]]\nname = "brevity"\n')
    assert "task: unknown section; task is reward_task here" in error_of(file)
    file.write_text(MINIMAL)
    assert "task: unknown section; task is reward_task here" in error_of(file, "task.brevity.weight=2")


def test_all_renamed_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = write_minimal(tmp_path)
    error = error_of(file, "engine.max_rows=4", "engine.adapter=vllm", "trainer.stations=[]")
    assert error.count("unknown key") == error.count(" here") == 3


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.theirs)
def test_every_alias_leads_to_an_existing_key(alias: KeyAlias) -> None:
    assert alias.ours in NAMES
    assert alias.theirs not in NAMES
    found = find_alias(alias.theirs)
    assert found is not None
    assert found.ours == alias.ours  # trainers that share a name mean the same setting


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_generations=8", "num_generations is sampling.group_size here"),
        ("trainer.num_generations=8", "trainer.num_generations is sampling.group_size here"),
        ("beta=0.01", "beta is algorithm.kl_loss_coef here"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is sampling.group_size here"),
        ("rollout.n=8", "rollout.n is sampling.group_size here"),
        ("env.rollout.n=8", "env.rollout.n is sampling.group_size here"),
        ("env.max_steps=30", "env.max_steps is env.max_turns here (of verl-agent: turns of an episode)"),
        ("max_steps=30", "max_steps is run.steps here"),
        ("algorithm.gigpo.mode=mean_norm", "gigpo divides by the standard deviation"),
        ("data.train_batch_size=8", "data.train_batch_size is trainer.batch_size here (counted in groups)"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef is algorithm.kl_loss_coef here"),
        ("rollout_batch_size=8", "rollout_batch_size is trainer.batch_size here (counted in groups)"),
        ("--n-samples-per-prompt=8", "--n-samples-per-prompt is sampling.group_size here"),
        ("orchestrator.max_async_level=2", "orchestrator.max_async_level is orchestrator.max_staleness here"),
        ("batch_size=8", "batch_size is trainer.batch_size here"),
        ("chat_template_kwargs.x=1", "chat_template_kwargs is data.chat_template_kwargs here"),
        (
            "data.apply_chat_template_kwargs.x=1",
            "data.apply_chat_template_kwargs is data.chat_template_kwargs here",
        ),
        (
            "generator.chat_template_kwargs.x=1",
            "generator.chat_template_kwargs is data.chat_template_kwargs here",
        ),
        ("num_iterations=2", "trainer.mini_batch_tokens here (the policy has one pass per step, which"),
        (
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.ppo_epochs is trainer.mini_batch_tokens here (the policy has one pass",
        ),
        ("trainer.ppo_epochs=2", "trainer.ppo_epochs is trainer.mini_batch_tokens here (the policy has one"),
        (
            "algorithm.clip_ratio=0.2",
            "algorithm.clip_ratio is algorithm.clip_ratio_low here (together with algorithm.clip_ratio_high)",
        ),
        ("actor_rollout_ref.rollout.temperature=1.0", "temperature is sampling.temperature here"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.95", "top_p is eval.top_p here"),
    ],
)
def test_an_override_with_a_key_of_another_trainer_is_refused_with_ours(
    tmp_path: Path, override: str, message: str
) -> None:
    (tmp_path / "run.toml").write_text("")
    assert message in error_of(tmp_path / "run.toml", override)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("eval.max_response_length=4096", "sampling.max_response_length"),
        ("actor_rollout_ref.rollout.val_kwargs.stop=x", "sampling.stop"),
    ],
)
def test_a_sampling_key_of_evaluations_is_refused_as_one_that_also_changes_training(
    tmp_path: Path, override: str, ours: str
) -> None:
    file = write_minimal(tmp_path)
    assert f"{ours} here, for training and evaluations alike" in error_of(file, override)
    assert "alike" not in error_of(file, f"trainer.{ours.partition('.')[2]}=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_completion_length = 256", "max_completion_length is sampling.max_response_length here"),
        (
            "[actor_rollout_ref.rollout]\nn = 8\n[actor_rollout_ref.actor.optim]\nlr = 1e-6",
            "actor_rollout_ref.rollout.n is sampling.group_size here; "
            "actor_rollout_ref.actor.optim.lr is trainer.lr here",
        ),
        ("[algorithm.kl_ctrl]\nkl_coef = 0.1", "algorithm.kl_ctrl.kl_coef is algorithm.kl_loss_coef here"),
    ],
)
def test_a_file_with_keys_of_another_trainer_is_refused_with_ours(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert message in error_of(tmp_path / "run.toml")


@pytest.mark.parametrize("typed", ["lr", "n", "path", "batch_size", "colour"])
def test_a_part_of_a_name_is_no_alias(typed: str) -> None:
    assert find_alias(typed) is None
