"""Who types a key of another trainer is told DORA's, wherever it stood."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.phrasebook import PHRASEBOOK, Word, translated
from dora.settings import keys, read

WORDS = [*chain.from_iterable(PHRASEBOOK.values())]
OURS = {f"{section}.{key}" for section, key, _ in keys()}


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "run.toml", overrides)
    return str(error.value)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.theirs)
def test_every_word_is_translated_into_a_key_that_there_is(word: Word) -> None:
    assert word.ours in OURS
    assert word.theirs not in OURS
    found = translated(word.theirs)
    assert found is not None
    assert found.ours == word.ours  # trainers that share a word mean the same


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("num_generations=8", "num_generations is sampling.group_size here"),
        ("trainer.num_generations=8", "trainer.num_generations is sampling.group_size here"),
        ("beta=0.01", "beta is algorithm.kl_loss_coef here"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is sampling.group_size here"),
        ("rollout.n=8", "rollout.n is sampling.group_size here"),
        ("data.train_batch_size=8", "data.train_batch_size is trainer.batch_size here (in groups)"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef is algorithm.kl_loss_coef here"),
        ("rollout_batch_size=8", "rollout_batch_size is trainer.batch_size here (in groups)"),
        ("--n-samples-per-prompt=8", "--n-samples-per-prompt is sampling.group_size here"),
        ("orchestrator.max_async_level=2", "orchestrator.max_async_level is orchestrator.max_staleness here"),
        ("batch_size=8", "batch_size is trainer.batch_size here"),
        ("actor_rollout_ref.rollout.temperature=1.0", "temperature is sampling.temperature here"),
    ],
)
def test_an_override_in_the_words_of_another_trainer_is_answered(
    tmp_path: Path, override: str, told: str
) -> None:
    assert told in refusal(tmp_path, "", override)


@pytest.mark.parametrize(
    ("text", "told"),
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
def test_a_file_in_the_words_of_another_trainer_is_answered(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


@pytest.mark.parametrize("typed", ["lr", "n", "path", "batch_size", "colour"])
def test_a_part_of_a_name_is_nobodys_key(typed: str) -> None:
    assert translated(typed) is None
