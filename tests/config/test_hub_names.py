"""Names of the Hugging Face hub in place of paths: downloads from a stand-in, and errors offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.config.fake_hub import COMMITS, serve_hub
from tests.config.minimal import error_of
from tests.runtime.tiny import write_task

from dora.config.hub import commit_of
from dora.config.load import read_config
from dora.errors import ConfigError, download_hint

READ = """
import json, sys
from pathlib import Path
from dora.config.load import read_config
from dora.config.toml import to_toml
from dora.errors import ConfigError
try:
    config = read_config(Path(sys.argv[1]), sys.argv[2:])
except ConfigError as error:
    sys.exit(str(error))
print(json.dumps([config.data.path, config.data.revision, to_toml(config)]))
"""
FILES = {"train.jsonl": b'{"prompt": "1+1"}\n', "README.md": b"# Sums\n"}


def read_online(task: Path, endpoint: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Read a configuration in a process whose hub is `endpoint`, with a cache beside the task."""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(task.parent / "hub"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", READ, str(task), *overrides]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_a_name_on_the_hub_becomes_a_snapshot_whose_commit_is_pinned(tmp_path: Path) -> None:
    """The resolved configuration loads the same files without the hub."""
    task = write_task(tmp_path)
    with serve_hub("someone/sums", "dataset", FILES) as endpoint:
        found = read_online(task, endpoint, "data.path=someone/sums", "data.revision=v1")
        missing = read_online(task, endpoint, "data.path=someone/products")
    assert found.returncode == 0, found.stderr
    path, revision, resolved = json.loads(found.stdout)
    assert revision == COMMITS["v1"] == commit_of(path)
    assert (Path(path) / "train.jsonl").read_bytes() == FILES["train.jsonl"]
    (tmp_path / "config.toml").write_text(resolved)
    again = read_config(tmp_path / "config.toml")
    assert (again.data.path, again.data.revision) == (path, revision)
    assert "the hub's dataset of this name could not be downloaded (Re" in missing.stderr
    Path(path).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path / "config.toml")
    assert f"`hf download someone/sums --repo-type dataset --revision {revision}`" in str(error.value)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.path", "hf download Qwen/Qwen3-0.6B --local-dir {}"),
        ("data.path", "hf download Qwen/Qwen3-0.6B --repo-type dataset --local-dir {}"),
    ],
)
def test_the_error_for_a_hub_name_without_a_network_has_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_config(write_task(tmp_path), [f"{name}=Qwen/Qwen3-0.6B"])
    folder = tmp_path.resolve() / "Qwen" / "Qwen3-0.6B"
    assert f"run `{command.format(folder)}`" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    assert "only a hub repository has revisions" in error_of(write_task(tmp_path), "model.revision=main")
    assert "data.revision has no effect with data.path = gcd" in error_of(
        write_task(tmp_path), "data.path=gcd", "data.revision=main"
    )


@pytest.mark.parametrize("path", ["data/train.jsonl", "../model", "/models/qwen", "a/b/c", "model"])
def test_a_path_is_not_mistaken_for_a_hub_name(path: str) -> None:
    assert download_hint(path, Path(path)) == ""
