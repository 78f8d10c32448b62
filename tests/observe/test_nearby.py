"""Who names a folder that is no run is told what it lacks, and which run was meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora.observe.nearby import newest_run, why_no_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, of which b was written to last."""
    monkeypatch.chdir(tmp_path)
    for at, name in ((1.0, "a"), (3.0, "b"), (2.0, "c")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        os.utime(folder / "journal.jsonl", (at, at))
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["runs", "runs/mistyped", "elsewhere", ".", "runs/b/journal.jsonl"])
def test_the_newest_run_is_found_from_where_one_may_look(runs: Path, name: str) -> None:
    newest = newest_run(Path(name))
    assert newest is not None
    assert newest.resolve() == runs.resolve() / "b"


def test_what_is_wrong_with_the_folder_is_said(runs: Path) -> None:
    told = {name: why_no_run(runs.parent / name) for name in ("runs", "nowhere", "runs/a/journal.jsonl")}
    assert "it has no journal.jsonl; the newest run nearby is" in told["runs"]
    assert "nowhere is not the folder of a run: it does not exist; the newest" in told["nowhere"]
    assert told["runs/a/journal.jsonl"].endswith(f"it is a file; the newest run nearby is {runs / 'a'}")


def test_where_there_is_no_run_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert why_no_run(Path("runs")) == (
        "runs is not the folder of a run: it does not exist; no run is nearby"
    )


def test_a_run_that_has_claimed_its_folder_and_no_more_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert "has not begun: it has no journal.jsonl yet; try again in a moment" in why_no_run(tmp_path)
