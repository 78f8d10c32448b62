"""Environments are chosen by name or by host."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.minimal import MINIMAL, REWARD_SECTION, error_of

from dora.config.load import read_config
from dora.config.toml import to_toml


@pytest.fixture
def env_file(file: Path) -> Path:
    """A configuration whose environment gives the rewards."""
    (file.parent / "game.py").write_text("")
    assert REWARD_SECTION in MINIMAL
    file.write_text(MINIMAL.replace(REWARD_SECTION, '[env]\nenvironment = "game.py:Game"\n'))
    return file


def test_the_file_of_an_environment_is_relative_to_the_configuration(env_file: Path) -> None:
    config = read_config(env_file)
    assert config.env.environment == f"{env_file.parent.resolve() / 'game.py'}:Game"
    assert config.has_episodes
    assert 'environment = "' in to_toml(config)


def test_remote_environments_have_host_and_port(file: Path) -> None:
    (file.parent / "token").write_text("a-token-of-the-tests")
    hosts = 'env.hosts=["10.0.0.7:7600", "games:7600"]'
    config = read_config(file, [hosts, f"env.token_file={file.parent / 'token'}"])
    assert config.env.hosts == ["10.0.0.7:7600", "games:7600"]
    assert config.env.token_file == str((file.parent / "token").resolve())
    assert config.has_episodes
    assert "without env.token_file: environment servers require their auth token" in error_of(file, hosts)
    assert "does not exist" in error_of(file, hosts, "env.token_file=nowhere")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.environment=game.py"],
            "env.environment = 'game.py': must have the form file.py:name or module:name",
        ),
        (["env.environment=nowhere.py:Game"], "nowhere.py does not exist"),
        (["env.token_file=game.py"], "env.token_file has no effect without env.hosts"),
        (['env.hosts=["games"]'], "env.hosts = 'games': string should match pattern"),
        (["env.max_turns=0"], "env.max_turns = 0: input should be greater than or equal to 1"),
        (["env.timeout_s=0"], "env.timeout_s = 0: input should be greater than 0"),
        (['env.hosts=["games:7600"]'], "workers or on the hosts; remove one of the two"),
        (["service.agents=true"], "either an agent or an environment; remove one of the two"),
        (["reward.timeout_s=3"], "reward.timeout_s has no effect without reward.function"),
    ],
)
def test_environment_settings_that_conflict_are_refused(
    env_file: Path, overrides: list[str], message: str
) -> None:
    assert message in error_of(env_file, *overrides)


@pytest.mark.parametrize("key", ["env.num_workers", "env.max_turns", "env.timeout_s"])
def test_environment_settings_need_an_environment(file: Path, key: str) -> None:
    assert f"{key} has no effect without env.environment" in error_of(file, f"{key}=3")


def test_a_run_without_any_reward_is_refused(file: Path) -> None:
    file.write_text(MINIMAL.replace(REWARD_SECTION, ""))
    assert "reward.function: not set, and no environment" in error_of(file)
