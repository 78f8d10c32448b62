"""A folder that is no model is refused with the option that named it and with the checkpoints that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.test_main import refusal
from tests.config.minimal import write_minimal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with the checkpoints of two steps."""
    run = tmp_path / "run"
    for step in (9, 40):
        (run / f"checkpoints/step-{step}").mkdir(parents=True)
    (run / "config.toml").write_text("")
    return run


def refused(capsys: pytest.CaptureFixture[str], folder: Path, command: str, model: Path) -> str:
    """The error of a command for a model."""
    given = {
        "eval": [str(write_minimal(folder)), "--model", str(model), "--set", "eval.path=gcd"],
        "sft": ["data.jsonl", "--out", str(folder / "out"), "--model", str(model)],
        "generate": [str(model), "12,30:"],
    }
    return refusal(capsys, command, *given[command])


COMMANDS = pytest.mark.parametrize(
    ("command", "option"), [("eval", "--model"), ("sft", "--model"), ("generate", "MODEL")]
)


@COMMANDS
def test_the_error_for_the_folder_of_a_run_names_its_newest_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    error = refused(capsys, tmp_path, command, run)
    assert f"{option} {run} is the folder of a run" in error
    assert f"the newest is {run / 'checkpoints/step-40'}" in error


@COMMANDS
def test_the_error_for_a_missing_checkpoint_names_those_that_exist(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    missing = run / "checkpoints/step-41"
    error = refused(capsys, tmp_path, command, missing)
    assert f"{option} {missing} does not exist; {missing.parent} has step-40, step-9" in error


def test_a_run_without_checkpoints_has_no_model_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("")
    assert "it has none yet" in refused(capsys, tmp_path, "generate", tmp_path)


def test_eval_names_its_option_for_any_folder_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no/such/model"
    assert f"--model {missing}: {missing} does not exist" in refused(capsys, tmp_path, "eval", missing)
