"""The command line starts fast, and exits with 0, 1 or 2 and a message without a traceback."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dora import __version__
from dora.cli.main import main

COUNTDOWN = f"{Path(__file__).parents[1] / 'envs' / 'countdown.py'}:Countdown"
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task" / "sevens.toml"


def exit_code(*arguments: str | Path) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = exit_code(*arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Stderr of a command that exits with 2 and prints nothing else."""
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    return err


def test_help_takes_under_a_second_of_cpu() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from dora.cli.main import main; main(['--help'])"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train" in finished.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_the_help_groups_all_commands_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    titles = re.findall(r"^╭─ (.+?) ─", out, flags=re.MULTILINE)
    assert titles == ["Options", "Run", "Inspect a run", "Simulate and plan", "Tools"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, __version__ + "\n", "")


def test_defaults_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "config", "--defaults")
    assert code == 0
    assert "group_size = 8" in out


def test_a_resolved_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "config", str(EXAMPLE), "--set", "run.seed=5")
    assert code == 0
    assert "seed = 5" in out


@pytest.mark.parametrize("command", [["list"], ["add"], ["drain", "0"]])
def test_engines_of_a_folder_without_a_run_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    name, *engine = command
    err = refusal(capsys, "engines", name, str(tmp_path), *engine)
    assert "is not the folder of a run: it has no journal.jsonl" in err


@pytest.mark.parametrize(
    "command",
    [["audit"], ["replay"], ["why", "0/0/0"], ["report"], ["trace"], ["dash"], ["engines", "list"]],
    ids=" ".join,
)
def test_the_error_for_a_folder_without_a_run_names_the_newest_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "journal.jsonl").touch()
    num_words = 2 if command[0] == "engines" else 1
    err = refusal(capsys, *command[:num_words], "runs", *command[num_words:])
    missing = "runs is not the folder of a run: it has no journal.jsonl"
    assert err == f"dora: {missing}; the newest run nearby is runs/a\n"


@pytest.mark.parametrize(
    "arguments", [["config"], ["config", str(EXAMPLE), "--defaults"], ["tarin"], ["engines", "drain"]]
)
def test_a_usage_error_exits_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "Usage" in refusal(capsys, *arguments)


def test_bad_input_exits_with_2_and_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    err = refusal(capsys, "train", str(EXAMPLE), "--out", str(tmp_path / "run"), "--steps", "-1")
    assert "run.steps = -1" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
@pytest.mark.parametrize("key", ["engine.device", "trainer.device"])
def test_a_missing_gpu_is_one_line_before_anything_starts(
    key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    static = ("--set", "orchestrator.placement=static")
    code, out, err = call(capsys, "train", str(EXAMPLE), "--set", f"{key}=cuda", *static, "--out", str(run))
    assert (code, out, run.exists()) == (2, "", False)
    assert re.fullmatch(
        rf"dora: {key} = 'cuda': this needs a GPU, and torch .*; set {key} = cpu, or .*\n", err
    )


def test_environments_are_not_served_at_an_occupied_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, token = str(server.getsockname()[1]), str(tmp_path / "token")
        code, _, err = call(capsys, "env-server", COUNTDOWN, "--port", port, "--token-file", token)
    assert code == 2
    assert err.startswith(
        f"dora: --host 127.0.0.1 --port {port}: cannot listen there: Address already in use"
    )


def test_a_class_that_is_no_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "it needs a method `async def reset`" in refusal(capsys, "env-server", "pathlib:Path")
