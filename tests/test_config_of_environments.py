"""Who plays the other side of episodes is chosen by name; what cannot be played is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.test_config import MINIMAL, file, refusal

from dora.settings import read

__all__ = ["file"]

REWARD = '[reward]\nfunction = "reward.py:reward"\n'


@pytest.fixture
def played(file: Path) -> Path:
    """A configuration whose rewards are those of environments."""
    (file.parent / "game.py").write_text("")
    assert REWARD in MINIMAL
    file.write_text(MINIMAL.replace(REWARD, '[env]\nenvironment = "game.py:Game"\n'))
    return file


def test_an_environment_of_a_file_is_found_beside_the_configuration(played: Path) -> None:
    config = read(played)
    assert config.env.environment == f"{played.parent.resolve() / 'game.py'}:Game"
    assert config.has_episodes
    assert 'environment = "' in config.to_toml()


def test_environments_elsewhere_are_named_by_host_and_port(file: Path) -> None:
    (file.parent / "token").write_text("a-token-of-the-tests")
    hosts = 'env.hosts=["10.0.0.7:7600", "games:7600"]'
    config = read(file, [hosts, f"env.token_file={file.parent / 'token'}"])
    assert config.env.hosts == ["10.0.0.7:7600", "games:7600"]
    assert config.env.token_file == str((file.parent / "token").resolve())
    assert config.has_episodes
    assert "without env.token_file: hosts play for those who show their token" in refusal(file, hosts)
    assert "does not exist" in refusal(file, hosts, "env.token_file=nowhere")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["env.environment=game.py"], "env.environment = 'game.py': must read file.py:name or module:name"),
        (["env.environment=nowhere.py:Game"], "nowhere.py does not exist"),
        (["env.token_file=game.py"], "env.token_file has no effect without env.hosts"),
        (['env.hosts=["games"]'], "env.hosts = 'games': string should match pattern"),
        (["env.max_turns=0"], "env.max_turns = 0: input should be greater than or equal to 1"),
        (["env.timeout_s=0"], "env.timeout_s = 0: input should be greater than 0"),
        (['env.hosts=["games:7600"]'], "an episode is played here or there; remove one of the two"),
        (["service.agents=true"], "an episode has one other side; remove one of the two"),
        (["reward.timeout_s=3"], "reward.timeout_s has no effect without reward.function"),
    ],
)
def test_what_cannot_be_played_is_refused(played: Path, overrides: list[str], complaint: str) -> None:
    assert complaint in refusal(played, *overrides)


@pytest.mark.parametrize("key", ["env.num_workers", "env.max_turns", "env.timeout_s"])
def test_settings_of_environments_need_some(file: Path, key: str) -> None:
    assert f"{key} has no effect without env.environment" in refusal(file, f"{key}=3")


def test_somebody_has_to_say_how_good_an_answer_is(file: Path) -> None:
    file.write_text(MINIMAL.replace(REWARD, ""))
    assert "reward.function: not set, and there are no environments" in refusal(file)
