"""Reward tasks in a configuration: each table [[task]] is read, checked and written as a section is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.tiny import write_task

from dora.errors import ConfigError
from dora.runtime.rewarding import reward_tasks
from dora.settings import read, values

TASKS = """
[[task]]
name = "brevity"
class = "task.py:Brevity"
options = {path = "task.py", limits = [1, {at = 2.5}], "a key" = true}
weight = -0.5

[[task]]
name = "taste"
class = "math:hypot"
micro_batch_rows = 16
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + TASKS)
    return path


def test_every_task_has_a_table_with_paths_relative_to_the_file(file: Path) -> None:
    brevity, taste = read(file).task
    assert brevity.factory == f"{file.parent}/task.py:Brevity"
    assert brevity.options == {"path": f"{file.parent}/task.py", "limits": [1, {"at": 2.5}], "a key": True}
    assert (brevity.weight, brevity.num_workers, brevity.timeout_s) == (-0.5, 1, 10.0)
    assert (taste.factory, taste.options, taste.micro_batch_rows) == ("math:hypot", {}, 16)


def test_what_is_written_is_read_again(file: Path, tmp_path: Path) -> None:
    config, again = read(file), tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert [task.model_dump() for task in read(again).task] == [task.model_dump() for task in config.task]
    assert read(again).digest() == config.digest()


def test_the_reward_is_the_first_task_and_counts_once(file: Path) -> None:
    tasks = reward_tasks(read(file, ["reward.num_workers=3", "reward.timeout_s=4"]))
    assert [(task.name, task.weight, task.num_workers) for task in tasks] == [
        ("reward", 1.0, 3),
        ("brevity", -0.5, 1),
        ("taste", 1.0, 1),
    ]
    assert [task.timeout_key for task in tasks] == [
        "reward.timeout_s",
        "task.brevity.timeout_s",
        "task.taste.timeout_s",
    ]
    assert [task.want.num_rows for task in tasks] == [1, 1, 16]


def test_an_override_names_the_task(file: Path) -> None:
    changed = dict(values(read(file, ["task.taste.weight=2", "task.brevity.timeout_s=3.5"])))
    assert (changed["task.taste.weight"], changed["task.brevity.timeout_s"]) == (2.0, 3.5)
    with pytest.raises(ConfigError, match=r"task\.tast\.\.\.: no .* has this name; .*: brevity, taste"):
        read(file, ["task.tast.weight=2"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["task.taste.name='brevity'"], "task.name = 'brevity': .* need names of their own; choose another"),
        (["task.taste.name='reward'"], "task.name = 'reward': "),
        (["task.taste.name='Taste!'"], "task.name = 'Taste!': string should match pattern"),
        (["task.taste.weight=0.0"], "task.taste.weight = 0: its rewards would change nothing; remove it"),
        (["task.taste.weigth=2.0"], "task.weigth: unknown key; did you mean weight"),
        (["task.taste.num_workers=0"], r"task.num_workers = 0: .* --set task.NAME.num_workers=\.\.\. \(proc"),
        (["task.taste.class='hypot'"], "task.taste.class = 'hypot': must read file.py:name or module:name"),
        (["task.brevity.class='no.py:X'"], r"task.brevity.class = 'no.py': .* does not exist"),
    ],
)
def test_what_cannot_be_is_refused_by_name(file: Path, overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(file, overrides)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (
            "[[task]]\nname = 'a'\n",
            r"task.class: not set, .*; add `class = ...` to \[\[task\]\]",
        ),
        ("[task]\nname = 'a'\n", r"task = .*: input should be a valid list; write a table \[\[task\]\]"),
        ("[[task]]\nname = 'a'\nclass = 'a:b'\noptions = {at = 1979-05-27}\n", "task.options = .*"),
    ],
)
def test_what_is_no_task_is_refused_by_name(tmp_path: Path, table: str, complaint: str) -> None:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + table)
    with pytest.raises(ConfigError, match=complaint):
        read(path)


def test_tasks_alone_judge_too(file: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "alone.toml", file.read_text()
    path.write_text(text.replace('[reward]\nfunction = "task.py:reward"\n', ""))
    assert [task.name for task in reward_tasks(read(path))] == ["brevity", "taste"]
    keys: list[tuple[str, Any]] = [("reward.num_workers", 2), ("reward.timeout_s", 2.0)]
    for key, value in keys:
        with pytest.raises(ConfigError, match=f"{key} has no effect without reward.function; remove it"):
            read(path, [f"{key}={value}"])
