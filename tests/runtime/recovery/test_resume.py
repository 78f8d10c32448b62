"""With which configuration a run can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.config.schema import Config
from dora.config.toml import to_toml
from dora.errors import InputError
from dora.runtime.recovery.resume import CHANGEABLE_KEYS, resumed_config


def test_a_run_can_be_resumed_without_its_ray_cluster(tmp_path: Path) -> None:
    changes = ["runtime.kind=ray", "ray.address=gone:6379", "ray.engine_cpus=2"]
    written = to_toml(load.read_config(write_task(tmp_path), changes))
    (tmp_path / "config.toml").write_text(written)
    local = resumed_config(tmp_path, ["runtime.kind=local"])
    assert (local.runtime.kind, local.ray.address) == ("local", None)
    moved = resumed_config(tmp_path, ["ray.address=other:6379"])
    assert (moved.ray.address, moved.ray.engine_cpus) == ("other:6379", 2)
    with pytest.raises(InputError, match=r"ray\.address has no effect without runtime\.kind = ray"):
        resumed_config(tmp_path, ["runtime.kind=local", "ray.address=other:6379"])


REWARD_TASKS = """
[[reward_task]]
name = "a"
class = "task.py:reward"
[[reward_task]]
name = "b"
class = "task.py:reward"
"""


def test_a_given_configuration_may_differ_in_the_keys_of_a_resume(tmp_path: Path) -> None:
    """The recorded one lacks keys without effect, such as eval.num_prompts of the tiny task."""
    task = write_task(tmp_path)

    def resumed(*changes: str) -> Config:
        return resumed_config(tmp_path, changes, load.read_config(task, changes))

    ray = ["runtime.kind=ray", "ray.address=gone:6379"]
    (tmp_path / "config.toml").write_text(to_toml(load.read_config(task, [*ray, "trainer.keep_last=3"])))
    assert resumed(*ray).trainer.keep_last == load.read_config(task).trainer.keep_last != 3
    assert resumed("runtime.kind=local").ray.address is None
    assert resumed("run.steps=9", "trainer.lr_decay=linear").run.steps == 9
    assert resumed("run.steps=9", "trainer.lr_decay=constant").trainer.lr_decay == "constant"
    for change, refusal in (
        ("trainer.lr=0.5", r"trainer\.lr was 0\.01 and cannot become 0\.5, .* start another run"),
        ("run.steps=3", r"run\.steps was 4 and cannot become 3, .* a run can only get more steps"),
        ("run.steps=9", r"trainer\.lr_decay = 'linear' lowers the learning rate to 0 at step 4"),
        ("trainer.lr_decay=constant", r"it may change together with a larger run\.steps"),
    ):
        with pytest.raises(InputError, match=refusal):
            resumed(change)


def test_a_longer_run_may_fall_to_another_lowest_rate(tmp_path: Path) -> None:
    """A constant rate has none, so it drops the key of the run's configuration."""
    task, ratio = write_task(tmp_path), "trainer.min_lr_ratio"
    (tmp_path / "config.toml").write_text(to_toml(load.read_config(task, [f"{ratio}=0.25"])))
    refusals = {
        ("run.steps=9",): r"lowers the learning rate to 0\.0025 at step 4, .* falls to 0\.0025 at step 9",
        (f"{ratio}=0.5",): r"min_lr_ratio was 0\.25 and cannot become 0\.5, .* with a larger run\.steps",
        ("run.steps=9", "trainer.lr_decay=constant", f"{ratio}=0.5"): r"no effect with trainer\.lr_decay = c",
    }
    for changes, refusal in refusals.items():
        with pytest.raises(InputError, match=refusal):
            resumed_config(tmp_path, changes)
    longer = {"linear": 0.25, "cosine": 0.25, "constant": 0.0}
    for decay, expected in longer.items():
        resumed = resumed_config(tmp_path, ["run.steps=9", f"trainer.lr_decay={decay}"])
        assert (resumed.trainer.lr_decay, resumed.trainer.min_lr_ratio) == (decay, expected)
    assert resumed_config(tmp_path, ["run.steps=9", f"{ratio}=0.5"]).trainer.min_lr_ratio == 0.5


def test_a_given_configuration_has_the_recorded_tables_in_their_order(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    plain, tables = task.read_text(), REWARD_TASKS
    swapped = tables.replace('"a"', '"c"').replace('"b"', '"a"').replace('"c"', '"b"')
    task.write_text(plain + tables)
    (tmp_path / "config.toml").write_text(to_toml(load.read_config(task)))
    assert len(resumed_config(tmp_path, [], load.read_config(task)).reward_task) == 2
    for given, names in ((plain, r"\[\]"), (plain + swapped, r"\['b', 'a'\]")):
        task.write_text(given)
        with pytest.raises(InputError, match=rf"reward_task was \['a', 'b'\] and cannot become {names}"):
            resumed_config(tmp_path, [], load.read_config(task))


def test_the_documentation_names_all_keys_that_may_change() -> None:
    page = (Path(__file__).parents[3] / "docs" / "resume.md").read_text()
    keys = [key if key.endswith(".*") else key.replace("*", "NAME") for key in CHANGEABLE_KEYS]
    assert [key for key in keys if f"`{key}`" not in page] == []
