"""Configurations whose processes cannot be started are rejected. Needs no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.errors import ConfigError
from dora.runtime.process import launcher


def test_ray_is_not_started_without_authentication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: name)  # as if Ray were installed
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    config = load.read_config(write_task(tmp_path), ["runtime.kind=ray"])
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE = 'disabled'.*unset it, or start Ray yourself"):
        launcher.check_ray_config(config)
    launcher.check_ray_config(
        load.read_config(tmp_path / "task.toml", ["runtime.kind=ray", "ray.address=auto"])
    )


@pytest.mark.parametrize(
    ("change", "missing", "error"),
    [
        ("ray.address=auto", "", r"ray.dashboard = true has no effect with ray.address = 'auto'.*remove"),
        ("run.steps=3", "aiohttp_cors", r"ray.dashboard = true.*pip install 'ray\[default\]'"),
    ],
)
def test_rays_dashboard_is_refused_where_it_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, missing: str, error: str
) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None if name == missing else name)
    config = load.read_config(write_task(tmp_path), ["runtime.kind=ray", "ray.dashboard=true", change])
    with pytest.raises(ConfigError, match=error):
        launcher.check_ray_config(config)
