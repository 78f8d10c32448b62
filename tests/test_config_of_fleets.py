"""Engines of several kinds in a configuration: each table [[fleet]] is read, checked and written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_inference import EXAMPLES
from tests.runtime.tiny import write_task

from dora.errors import ConfigError
from dora.fleets import kind_of, kinds, num_engines
from dora.runtime import adapters
from dora.runtime.devices import Devices
from dora.runtime.plan import Plan
from dora.settings import read, values

FLEET = f"""
[[fleet]]
name = "others"
adapter = "{EXAMPLES / "transformers_engine.py"}:Transformers"
num_engines = 2
max_rows = 3

[[fleet]]
name = "servers"
adapter = "vllm"
options = {{python = "environment/bin/python", arguments = ["--seed", "7"]}}
"""
FITTING = ("engine.version_slots=1", "orchestrator.placement=static", "orchestrator.rush=false")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + FLEET)
    return path


def test_engines_are_numbered_through(file: Path) -> None:
    config = read(file, FITTING)
    assert [kind_of(config, engine).key for engine in range(6)] == [
        *("engine", "engine", "fleet.others", "fleet.others", "fleet.servers"),
        "engine",  # it joins later
    ]
    assert num_engines(config) == 5
    assert config.total_rows == 2 * 4 + 2 * 3 + 1 * 4
    own, others, servers = kinds(config)
    assert (own.adapter, own.version_slots, others.version_slots) == (None, 1, 1)
    assert (own.max_rows, others.max_rows, servers.max_rows) == (4, 3, 4)


def test_each_engine_is_made_as_its_kind_is(file: Path, tmp_path: Path) -> None:
    plan = Plan.make(read(file, FITTING), tmp_path / "run")
    specs = [plan.engine_spec(tmp_path, engine) for engine in range(plan.num_engines)]
    assert [spec.max_rows for spec in specs] == [4, 4, 3, 3, 4]
    assert [spec.adapter is None for spec in specs] == [True, True, False, False, False]
    assert specs[4].options == {
        "python": f"{file.parent}/environment/bin/python",
        "arguments": ["--seed", "7"],
    }


def test_the_engine_that_a_trainer_lends_is_the_last_one_and_of_doras_kind(
    file: Path, tmp_path: Path
) -> None:
    plan = Plan.make(read(file, [*FITTING, "trainer.elastic=true"]), tmp_path / "run")
    assert [plan.is_colocated(engine) for engine in range(plan.num_engines)] == [False] * 5 + [True]
    assert plan.engine_spec(tmp_path, 5).adapter is None


def test_what_is_written_is_read_again(file: Path, tmp_path: Path) -> None:
    config, again = read(file), tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert read(again).fleet == config.fleet
    assert read(again).digest() == config.digest()


def test_a_configuration_without_a_fleet_does_not_speak_of_it(tmp_path: Path) -> None:
    written = read(write_task(tmp_path)).to_toml()
    assert "fleet" not in written
    assert "options" not in written


def test_an_override_names_the_kind(file: Path) -> None:
    config = read(file, ["fleet.others.max_rows=9", 'fleet.servers.options={url = "http://127.0.0.1:8000"}'])
    assert dict(values(config))["fleet.others.max_rows"] == 9
    assert config.fleet[1].options == {"url": "http://127.0.0.1:8000"}
    with pytest.raises(ConfigError, match="no \\[\\[fleet\\]\\] has this name; there are: others, servers"):
        read(file, ["fleet.mine.max_rows=9"])


def test_an_interpreter_is_a_command_or_a_path_and_no_links_target(tmp_path: Path) -> None:
    """That of an environment is a link, and does not know its environment by the target's name."""
    path = write_task(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    for given, found in {"python3": "python3", "./python": f"{tmp_path}/python"}.items():
        text = path.read_text().replace('kernels = "eager"\n', "").replace('pace = "10ms"\n', "")
        own = tmp_path / "own.toml"
        own.write_text(
            text.replace("[engine]", f'[engine]\nadapter = "vllm"\noptions = {{python = "{given}"}}')
        )
        assert read(own).engine.options == {"python": found}


def test_devices_are_counted_for_all_kinds(file: Path) -> None:
    config = read(file, [*FITTING, "engine.device=cuda", "engine.kernels=auto"])
    devices = Devices.of(config, num_gpus=5)
    assert [devices.of_engine(engine, is_colocated=False) for engine in range(5)] == [
        f"cuda:{engine}" for engine in range(5)
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    {
        "moves": (["engine.version_slots=1", "orchestrator.rush=false"], "placement = static"),
        "slots": ([*FITTING, "fleet.others.version_slots=2"], "set fleet.others.version_slots = 1"),
        "option": ([*FITTING, 'fleet.others.options={size="big"}'], "fleet.others.options = .*size"),
        "url": (
            [*FITTING, 'fleet.servers.options={url="http://a:1"}', "fleet.servers.num_engines=2"],
            "there are 2: set num_engines = 1",
        ),
    }.values(),
    ids=["moves", "slots", "option", "url"],
)
def test_what_a_kind_cannot_do_is_refused_by_its_name(file: Path, changes: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adapters.check(read(file, changes))


def test_a_fleet_that_fits_is_not_refused(file: Path) -> None:
    python = file.parent / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    adapters.check(read(file, FITTING))


@pytest.mark.parametrize(
    ("changes", "told"),
    {
        "name": (["fleet.others.name=servers"], "needs its own"),
        "policy": (["orchestrator.update_policy=partial"], "only DORA's own engine"),
        "options": (["engine.options={}"], "engine.options has no effect without engine.adapter"),
        "adapter": (["fleet.others.adapter=none"], "must read file.py:name or module:name"),
        "key": (["fleet.others.rows=3"], "unknown key; did you mean max_rows"),
    }.values(),
    ids=["name", "policy", "options", "adapter", "key"],
)
def test_what_makes_no_sense_is_refused(file: Path, changes: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(file, changes)
