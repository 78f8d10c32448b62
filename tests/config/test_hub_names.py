"""The error for a Hugging Face hub name in place of a path has the command to download it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config.load import read_config
from dora.errors import ConfigError, download_hint


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.path", "hf download Qwen/Qwen3-0.6B --local-dir {}"),
        ("data.path", "hf download Qwen/Qwen3-0.6B --repo-type dataset --local-dir {}"),
    ],
)
def test_the_error_for_a_hub_name_has_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_config(write_task(tmp_path), [f"{name}=Qwen/Qwen3-0.6B"])
    folder = tmp_path.resolve() / "Qwen" / "Qwen3-0.6B"
    assert f"run `{command.format(folder)}`" in str(error.value)


@pytest.mark.parametrize("path", ["data/train.jsonl", "../model", "/models/qwen", "a/b/c", "model"])
def test_a_path_is_not_mistaken_for_a_hub_name(path: str) -> None:
    assert download_hint(path, Path(path)) == ""
