"""A name of the Hugging Face hub is no folder: what to do about it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.errors import ConfigError, how_to_download
from dora.settings import read


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.path", "hf download Qwen/Qwen3-0.6B --local-dir {}"),
        ("data.path", "hf download Qwen/Qwen3-0.6B --repo-type dataset --local-dir {}"),
    ],
)
def test_a_name_of_the_hub_is_answered_with_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read(write_task(tmp_path), [f"{name}=Qwen/Qwen3-0.6B"])
    there = tmp_path.resolve() / "Qwen" / "Qwen3-0.6B"
    assert f"run `{command.format(there)}`" in str(refusal.value)


@pytest.mark.parametrize("path", ["data/train.jsonl", "../model", "/models/qwen", "a/b/c", "model"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(path: str) -> None:
    assert how_to_download(path, Path(path)) == ""
