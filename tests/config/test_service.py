"""Prompts, rewards, agents and the trainer may be external; settings of local workers then conflict."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config.load import read_config
from dora.config.schema import Config
from dora.config.toml import to_toml
from dora.errors import ConfigError
from dora.runtime.control.requests import check_gateway
from dora.runtime.scoring.reward_manager import reward_tasks

EXTERNAL = 'service.trainer="external"'
RATINGS = '[[reward_task]]\nname = "ratings"\nclass = "service"\n'


def test_prompts_rewards_and_trainer_may_be_external(file: Path) -> None:
    config = read_config(file, [EXTERNAL, 'data.path="service"', 'reward.function="service"'])
    (task,) = reward_tasks(config)
    assert (config.data.path, task.is_external) == ("service", True)
    written = file.with_name("again.toml")
    written.write_text(to_toml(config))
    assert to_toml(read_config(written)) == to_toml(config)


def test_an_additional_reward_may_be_external(file: Path) -> None:
    file.write_text(file.read_text() + RATINGS)
    config = read_config(file)
    assert [task.is_external for task in reward_tasks(config)] == [False, True]
    written = file.with_name("again.toml")
    written.write_text(to_toml(config))
    assert to_toml(read_config(written)) == to_toml(config), "the run can be resumed"
    file.write_text(file.read_text() + "num_workers = 2\n")
    with pytest.raises(ConfigError, match=r"task\.ratings\.num_workers has no effect with class = service"):
        read_config(file)


@pytest.mark.parametrize(
    "change", [EXTERNAL, 'data.path="service"', 'reward.function="service"', "service.agents=true"]
)
def test_a_run_with_external_input_needs_its_service(file: Path, change: str) -> None:
    check_gateway(read_config(file), None)
    with pytest.raises(ConfigError, match=f"{change.partition('=')[0]} = .*start it with dora serve"):
        check_gateway(read_config(file, [change]), None)


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.num_ranks=2"],
        ["trainer.lora_rank=4"],
        ["trainer.continue_from=checkpoint"],
        ["trainer.elastic=true"],
        ["orchestrator.placement=colocated"],
        ["orchestrator.staleness_mode=adaptive"],
        ["engine.exact_logprobs=true"],
        ["algorithm.adv_estimator=gae"],
        ["trainer.aux_workers=['reference']", "algorithm.kl_loss_coef=0.1"],
    ],
)
def test_features_of_the_internal_trainer_are_refused_with_an_external_one(
    file: Path, changes: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r'service.trainer = "external" with .*remove one of the two'):
        read_config(file, [EXTERNAL, *changes])


@pytest.mark.parametrize(
    "changes",
    [
        ['data.path="service"', "data.shuffle=false"],
        ['data.path="service"', 'data.split="train"'],
        ['reward.function="service"', "reward.num_workers=2"],
        ["service.idle_timeout_s=5"],
    ],
)
def test_keys_without_effect_are_refused(file: Path, changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{changes[-1].partition('=')[0]} has no effect"):
        read_config(file, changes)


def test_an_external_trainer_may_use_the_settings_of_training(file: Path) -> None:
    config: Config = read_config(file, [EXTERNAL, "trainer.warmup_steps=3", "algorithm.entropy_coeff=0.1"])
    assert (config.trainer.warmup_steps, config.algorithm.entropy_coeff) == (3, 0.1)
