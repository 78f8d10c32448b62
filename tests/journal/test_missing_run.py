"""The error for a folder without a run names what is missing, and the run that may be meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora.errors import InputError
from dora.journal.reader import explain_missing_run, find_newest_run, open_sample_store


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs; b was written last."""
    monkeypatch.chdir(tmp_path)
    for at, name in ((1.0, "a"), (3.0, "b"), (2.0, "c")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        os.utime(folder / "journal.jsonl", (at, at))
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["runs", "runs/mistyped", "elsewhere", ".", "runs/b/journal.jsonl"])
def test_the_newest_run_is_found_from_any_nearby_folder(runs: Path, name: str) -> None:
    newest = find_newest_run(Path(name))
    assert newest is not None
    assert newest.resolve() == runs.resolve() / "b"


def test_the_reason_is_named(runs: Path) -> None:
    reasons = {
        name: explain_missing_run(runs.parent / name) for name in ("runs", "nowhere", "runs/a/journal.jsonl")
    }
    assert "it has no journal.jsonl; the newest run nearby is" in reasons["runs"]
    assert "nowhere is not the folder of a run: it does not exist; the newest" in reasons["nowhere"]
    assert reasons["runs/a/journal.jsonl"].endswith(f"it is a file; the newest run nearby is {runs / 'a'}")


def test_without_any_run_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert explain_missing_run(Path("runs")) == (
        "runs is not the folder of a run: it does not exist; there is no run nearby"
    )


def test_samples_of_a_folder_that_does_not_exist_name_the_newest_run(runs: Path) -> None:
    with (
        pytest.raises(InputError, match="it does not exist; the newest run nearby is"),
        open_sample_store(runs.parent / "nowhere"),
    ):
        pass
    with pytest.raises(InputError, match="the run has no responses yet"), open_sample_store(runs / "a"):
        pass


def test_a_run_with_a_configuration_only_has_not_started(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert "has not started yet: it has no journal.jsonl; try again in a moment" in explain_missing_run(
        tmp_path
    )
