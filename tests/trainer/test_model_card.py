"""The card of a checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest

from dora.config.load import read_config
from dora.config.schema import UpdatePolicy
from dora.config.toml import to_toml
from dora.trainer.model_card import model_card
from dora.trainer.recipe import AdvEstimator, PolicyLoss

EXAMPLES = Path(__file__).parents[2] / "examples"


def card(config: str, *overrides: str) -> str:
    return model_card(tomllib.loads(to_toml(read_config(EXAMPLES / config, overrides))), 1200, "1.2")


def test_it_says_what_trained_the_model_and_no_path_of_the_machine() -> None:
    text = card("gcd.toml", "trainer.lora_rank=4", f"distillation.teachers=['{EXAMPLES / 'gcd-start'}']")
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "# gcd-start, after 1,200 steps\n" in text
    for row in (
        "| prompts | gcd |",
        "| rewards | dora.rewards.gcd:reward |",
        "| teachers | gcd-start |",
        "| algorithm | ppo_clip, token-mean |",
        "| steps | 1200, each of 8 groups of 8 responses |",
        "| LoRA | rank 4 |",
        "| policy versions | dora, staleness at most 2 |",
    ):
        assert row in text
    assert "`adapter` is the adapter for PEFT." in text
    assert str(EXAMPLES) not in text


def test_it_names_tasks_and_environments() -> None:
    assert "| environment | environment.py:Shop |" in card("tool_caller/environment.toml")
    assert "bigrams.py:" in card("second_reward/second_reward.toml")
    assert "LoRA" not in card("gcd.toml")


KEYS = {
    "algorithm.policy_loss": get_args(PolicyLoss),
    "algorithm.adv_estimator": get_args(AdvEstimator),
    "orchestrator.update_policy": get_args(UpdatePolicy),
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_without_effect_may_be_missing(key: str) -> None:
    """A card that cannot be written would fail the checkpoint."""
    for value in KEYS[key]:
        required = {"online_dpo": "seq-mean-token-sum", "triplet_clip": "seq-mean-token-sum-norm"}.get(value)
        others = [f"algorithm.loss_agg_mode={required}"] if required else []
        others += ["orchestrator.max_staleness=0"] if value == "reinforce" else []
        others += ["service.agents=true"] if value == "gigpo" else []
        assert "| steps | 1200" in card("gcd.toml", f"{key}={value}", *others)


def test_own_functions_are_named_without_their_path() -> None:
    own = f"algorithm.policy_loss={EXAMPLES / 'own_loss.py'}:sapo"
    assert "| algorithm | grpo, own_loss.py:sapo, token-mean |" in card("gcd.toml", own)
