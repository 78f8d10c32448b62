"""Each table [[fleet]] is read, checked and written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_engine_contract import LIMITED
from tests.runtime.tiny import drop_engine_settings, write_task

from dora.config.load import read_config
from dora.config.schema import iter_values
from dora.config.toml import config_digest, to_toml
from dora.errors import ConfigError
from dora.runtime.process import backends
from dora.runtime.process.resources import DeviceAssignment
from dora.runtime.run_setup import RunSetup

FLEET = f"""
[[fleet]]
name = "others"
backend = "{LIMITED}"
num_engines = 2
max_num_seqs = 3

[[fleet]]
name = "servers"
backend = "vllm"
options = {{python = "environment/bin/python", arguments = ["--seed", "7"]}}
"""
FITTING = (
    "engine.version_slots=1",
    "orchestrator.placement=static",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + FLEET)
    return path


def test_engines_of_all_kinds_are_numbered_consecutively(file: Path) -> None:
    config = read_config(file, FITTING)
    assert [config.kind_of_engine(engine).key for engine in range(6)] == [
        *("engine", "engine", "fleet.others", "fleet.others", "fleet.servers"),
        "engine",  # joins later
    ]
    assert config.num_engines == 5
    assert config.max_concurrent_requests == 2 * 4 + 2 * 3 + 1 * 4
    own, others, servers = config.engine_kinds
    assert (own.backend, own.version_slots, others.version_slots) == (None, 1, 1)
    assert (own.max_num_seqs, others.max_num_seqs, servers.max_num_seqs) == (4, 3, 4)


def test_engines_of_all_kinds_need_the_slots_of_an_inflight_update(file: Path) -> None:
    changes = ["orchestrator.update_policy=inflight"]
    config = read_config(file, changes)
    assert [kind.version_slots for kind in config.engine_kinds] == [2, 2, 2]
    with pytest.raises(ConfigError, match=r"fleet\.others\.version_slots = 3 .*needs 2.*remove"):
        read_config(file, [*changes, "fleet.others.version_slots=3"])


def test_each_engine_has_the_settings_of_its_kind(file: Path, tmp_path: Path) -> None:
    setup = RunSetup.make(read_config(file, FITTING), tmp_path / "run")
    specs = [setup.engine_spec(tmp_path, engine) for engine in range(setup.num_engines)]
    assert [spec.max_rows for spec in specs] == [4, 4, 3, 3, 4]
    assert [spec.backend is None for spec in specs] == [True, True, False, False, False]
    assert specs[4].backend_options == {
        "python": f"{file.parent}/environment/bin/python",
        "arguments": ["--seed", "7"],
    }


def test_the_engine_of_an_elastic_trainer_is_the_last_one_and_of_the_section_engine(
    file: Path, tmp_path: Path
) -> None:
    setup = RunSetup.make(read_config(file, [*FITTING, "trainer.elastic=true"]), tmp_path / "run")
    assert [setup.is_colocated(engine) for engine in range(setup.num_engines)] == [False] * 5 + [True]
    assert setup.engine_spec(tmp_path, 5).backend is None


def test_a_written_fleet_reads_back_equal(file: Path, tmp_path: Path) -> None:
    config, again = read_config(file), tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert read_config(again).fleet == config.fleet
    assert config_digest(read_config(again)) == config_digest(config)


def test_a_configuration_without_a_fleet_has_no_such_section(tmp_path: Path) -> None:
    written = to_toml(read_config(write_task(tmp_path)))
    assert "fleet" not in written
    assert "options" not in written


def test_an_override_names_the_kind(file: Path) -> None:
    config = read_config(
        file, ["fleet.others.max_num_seqs=9", 'fleet.servers.options={url = "http://127.0.0.1:8000"}']
    )
    assert dict(iter_values(config))["fleet.others.max_num_seqs"] == 9
    assert config.fleet[1].options == {"url": "http://127.0.0.1:8000"}
    with pytest.raises(ConfigError, match="no \\[\\[fleet\\]\\] has this name; names: others, servers"):
        read_config(file, ["fleet.mine.max_num_seqs=9"])


def test_an_interpreter_is_a_command_or_a_path_whose_link_is_kept(tmp_path: Path) -> None:
    """The interpreter of a virtual environment is a link, and its target does not find the environment."""
    text = drop_engine_settings(write_task(tmp_path)).read_text()
    (tmp_path / "python").symlink_to(sys.executable)
    for given, found in {"python3": "python3", "./python": f"{tmp_path}/python"}.items():
        own = tmp_path / "own.toml"
        own.write_text(
            text.replace("[engine]", f'[engine]\nbackend = "vllm"\noptions = {{python = "{given}"}}')
        )
        assert read_config(own).engine.options == {"python": found}


def test_devices_are_counted_for_all_kinds(file: Path) -> None:
    config = read_config(file, [*FITTING, "engine.device=cuda", "engine.kernels=auto"])
    devices = DeviceAssignment.of(config, num_gpus=5)
    assert [devices.engine_device(engine, is_colocated=False) for engine in range(5)] == [
        f"cuda:{engine}" for engine in range(5)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "migration": (
            ["engine.version_slots=1", "orchestrator.prioritize_stragglers=false"],
            "placement = static",
        ),
        "policy": (
            ["orchestrator.update_policy=partial", "orchestrator.prioritize_stragglers=false"],
            "requests keep their version: set orchestrator.update_policy = dora",
        ),
        "slots": ([*FITTING, "fleet.others.version_slots=2"], "set fleet.others.version_slots = 1"),
        "option": ([*FITTING, 'fleet.others.options={size="big"}'], "fleet.others.options = .*size"),
        "url": (
            [*FITTING, 'fleet.servers.options={url="http://a:1"}', "fleet.servers.num_engines=2"],
            "there are 2 engines: set num_engines = 1",
        ),
    }.values(),
    ids=["migration", "policy", "slots", "option", "url"],
)
def test_a_setting_that_a_backend_does_not_support_is_refused(
    file: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        backends.check_backends(read_config(file, changes))


def test_a_supported_fleet_is_accepted(file: Path) -> None:
    python = file.parent / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    backends.check_backends(read_config(file, FITTING))


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "name": (["fleet.others.name=servers"], "needs a name of its own"),
        "options": (["engine.options={}"], "engine.options has no effect without engine.backend"),
        "backend": (["fleet.others.backend=none"], "or have the form file.py:name or module:name"),
        "key": (["fleet.others.max_seqs=3"], "unknown key; did you mean max_num_seqs"),
    }.values(),
    ids=["name", "options", "backend", "key"],
)
def test_fleet_settings_that_conflict_are_refused(file: Path, changes: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(file, changes)
