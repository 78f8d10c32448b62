"""With which configuration a run can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
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


def test_the_documentation_names_all_keys_that_may_change() -> None:
    page = (Path(__file__).parents[3] / "docs" / "resume.md").read_text()
    keys = [key if key.endswith(".*") else key.replace("*", "NAME") for key in CHANGEABLE_KEYS]
    assert [key for key in keys if f"`{key}`" not in page] == []
