"""What a configuration may leave to others outside the run, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import Config
from dora.errors import ConfigError
from dora.runtime.calls import check_door
from dora.runtime.rewarding import reward_tasks
from dora.settings import read

EXTERNAL = 'service.trainer="external"'
PEOPLE = '[[task]]\nname = "people"\nclass = "service"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def test_prompts_rewards_and_trainer_may_be_outside(file: Path) -> None:
    config = read(file, [EXTERNAL, 'data.path="service"', 'reward.function="service"'])
    (task,) = reward_tasks(config)
    assert (config.data.path, task.is_outside, task.lease_s()) == ("service", True, 5.0)
    written = file.with_name("again.toml")
    written.write_text(config.to_toml())
    assert read(written).to_toml() == config.to_toml()


def test_a_task_more_may_be_outside(file: Path) -> None:
    file.write_text(file.read_text() + PEOPLE)
    assert [task.is_outside for task in reward_tasks(read(file))] == [False, True]
    file.write_text(file.read_text() + "num_workers = 2\n")
    with pytest.raises(ConfigError, match=r"task\.people\.num_workers has no effect with class = service"):
        read(file)


@pytest.mark.parametrize(
    "change", [EXTERNAL, 'data.path="service"', 'reward.function="service"', "service.agents=true"]
)
def test_a_run_that_waits_for_others_needs_its_service(file: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=f"{change.partition('=')[0]} = .*start it with dora serve"):
        check_door(read(file, [change]), None)


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.num_ranks=2"],
        ["trainer.lora_rank=4"],
        ["trainer.elastic=true"],
        ["orchestrator.placement=colocated"],
        ["orchestrator.staleness=adaptive"],
        ["engine.exact=true"],
        ["algorithm.adv_estimator=gae"],
        ["trainer.stations=['reference']", "algorithm.kl_loss_coef=0.1"],
    ],
)
def test_what_only_a_trainer_of_the_run_can_do_is_refused(file: Path, changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r'service.trainer = "external" with .*remove one of the two'):
        read(file, [EXTERNAL, *changes])


@pytest.mark.parametrize(
    "changes",
    [
        ['data.path="service"', "data.shuffle=false"],
        ['data.path="service"', 'data.split="train"'],
        ['reward.function="service"', "reward.num_workers=2"],
        ["service.patience_s=5"],
    ],
)
def test_keys_without_effect_are_refused(file: Path, changes: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        read(file, changes)


def test_settings_of_training_are_for_whoever_trains(file: Path) -> None:
    config: Config = read(file, [EXTERNAL, "trainer.warmup_steps=3", "algorithm.entropy_coeff=0.1"])
    assert (config.trainer.warmup_steps, config.algorithm.entropy_coeff) == (3, 0.1)
