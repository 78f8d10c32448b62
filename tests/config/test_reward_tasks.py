"""Each table [[reward_task]] is read, checked and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.tiny import write_task

from dora.config.load import read_config
from dora.config.schema import iter_values
from dora.config.toml import config_digest, to_toml
from dora.errors import ConfigError
from dora.runtime.scoring.reward_manager import reward_tasks

TASKS = """
[[reward_task]]
name = "brevity"
class = "task.py:Brevity"
options = {path = "task.py", limits = [1, {at = 2.5}], "a key" = true}
weight = -0.5

[[reward_task]]
name = "taste"
class = "math:hypot"
micro_batch_size = 16
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + TASKS)
    return path


def test_paths_of_a_task_are_relative_to_the_file(file: Path) -> None:
    brevity, taste = read_config(file).reward_task
    assert brevity.factory == f"{file.parent}/task.py:Brevity"
    assert brevity.options == {"path": f"{file.parent}/task.py", "limits": [1, {"at": 2.5}], "a key": True}
    assert (brevity.weight, brevity.num_workers, brevity.timeout_s) == (-0.5, 1, 10.0)
    assert (taste.factory, taste.options, taste.micro_batch_size) == ("math:hypot", {}, 16)


def test_written_tasks_read_back_equal(file: Path, tmp_path: Path) -> None:
    config, again = read_config(file), tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert [task.model_dump() for task in read_config(again).reward_task] == [
        task.model_dump() for task in config.reward_task
    ]
    assert config_digest(read_config(again)) == config_digest(config)


def test_the_section_reward_is_the_first_task_with_weight_1(file: Path) -> None:
    tasks = reward_tasks(read_config(file, ["reward.num_workers=3", "reward.timeout_s=4"]))
    assert [(task.name, task.weight, task.num_workers) for task in tasks] == [
        ("reward", 1.0, 3),
        ("brevity", -0.5, 1),
        ("taste", 1.0, 1),
    ]
    assert [task.timeout_key for task in tasks] == [
        "reward.timeout_s",
        "reward_task.brevity.timeout_s",
        "reward_task.taste.timeout_s",
    ]
    assert [task.batch_request.max_rows for task in tasks] == [1, 1, 16]


def test_an_override_names_the_task(file: Path) -> None:
    changed = dict(
        iter_values(read_config(file, ["reward_task.taste.weight=2", "reward_task.brevity.timeout_s=3.5"]))
    )
    assert (changed["reward_task.taste.weight"], changed["reward_task.brevity.timeout_s"]) == (2.0, 3.5)
    with pytest.raises(
        ConfigError, match=r"reward_task\.tast\.\.\.: no .* has this name; .*: brevity, taste"
    ):
        read_config(file, ["reward_task.tast.weight=2"])


def test_a_reward_may_have_weight_0_if_another_has_none(file: Path) -> None:
    zero = ["reward_task.taste.weight=0", "reward_task.brevity.weight=0"]
    assert read_config(file, zero).reward_weights == {"reward": 1.0, "brevity": 0.0, "taste": 0.0}
    file.write_text(file.read_text().replace("[reward]\nfunction", "[reward]\n# function"))
    with pytest.raises(ConfigError, match=r"reward_task.brevity.weight = 0: no other reward has a weight"):
        read_config(file, zero)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward_task.taste.name='brevity'"],
            "reward_task.name = 'brevity': .* needs a name of its own, .*; choose another",
        ),
        (["reward_task.taste.name='reward'"], "reward_task.name = 'reward': "),
        (["reward_task.taste.name='Taste!'"], "reward_task.name = 'Taste!': string should match pattern"),
        (["reward_task.taste.weigth=2.0"], "reward_task.weigth: unknown key; did you mean weight"),
        (
            ["reward_task.taste.num_workers=0"],
            r"--set reward_task.NAME.num_workers=\.\.\.\n *reward_task.num_workers: Reward worker processes",
        ),
        (
            ["reward_task.taste.class='hypot'"],
            "reward_task.taste.class = 'hypot': must be service, or have the form file.py:name or",
        ),
        (["reward_task.brevity.class='no.py:X'"], r"reward_task.brevity.class = 'no.py': .* does not exist"),
    ],
)
def test_an_invalid_override_of_a_task_is_refused(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(file, overrides)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "[[reward_task]]\nname = 'a'\n",
            r"reward_task.class: not set, .*; add `class = ...` to \[\[reward_task\]\]",
        ),
        (
            "[reward_task]\nname = 'a'\n",
            r"reward_task = .*: input should be a valid list; write a table \[\[reward_task\]\]",
        ),
        ("[[reward_task]]\nname = 'a'\nclass = 'a:b'\noptions = {at = 1979-05-27}\n", "task.options = .*"),
    ],
)
def test_an_invalid_table_is_refused(tmp_path: Path, table: str, message: str) -> None:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + table)
    with pytest.raises(ConfigError, match=message):
        read_config(path)


def test_tasks_alone_are_enough(file: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "alone.toml", file.read_text()
    path.write_text(text.replace('[reward]\nfunction = "task.py:reward"\n', ""))
    assert [task.name for task in reward_tasks(read_config(path))] == ["brevity", "taste"]
    keys: list[tuple[str, Any]] = [("reward.num_workers", 2), ("reward.timeout_s", 2.0)]
    for key, value in keys:
        with pytest.raises(ConfigError, match=f"{key} has no effect without reward.function; remove it"):
            read_config(path, [f"{key}={value}"])
