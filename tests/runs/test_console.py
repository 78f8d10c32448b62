"""The live display of a run on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.runs.conftest import StartRun

from dora.config import load
from dora.config.schema import Config
from dora.config.toml import to_toml
from dora.errors import InputError
from dora.runtime.run import resume, train
from dora.runtime.run_setup import RunSetup

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


def read_all(terminal: int) -> str:
    """Everything a program writes to its terminal until it exits, without control sequences."""
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # Linux: the other end is closed
        pass
    os.close(terminal)
    return CONTROL.sub("", b"".join(parts).decode())


def test_a_terminal_shows_the_progress_of_a_run(start_run: StartRun) -> None:
    terminal, terminal_of_run = pty.openpty()
    run = start_run(
        output=terminal_of_run,
        engine__min_step_time="30ms",
        run__steps=6,
        orchestrator__staleness_mode="adaptive",
    )
    os.close(terminal_of_run)
    shown = read_all(terminal)
    run.succeed()
    assert re.search(r"training \S+ +\d/6 steps, left 0:00:\d\d", shown)
    assert re.search(r"reward +\d\.\d{3} +tokens/s +\d+", shown)
    assert re.search(r"unfinished +versions v\d:\d+ v\d:\d+.* staleness +\d\.\d\d \(max \d\), bound 2", shown)
    assert re.search(r"migrated +\d+ requests +stall +\d+\.\d s", shown)
    assert re.search(r"engine +v\d +v\d.* free rows", shown)
    assert re.search(r"\n *1 +\d", shown)
    assert "C1 kept, C2 kept, C3 kept" in shown


def test_a_run_prints_what_it_reads_before_it_reads_it(task: Path, tmp_path: Path) -> None:
    """Large datasets and journals take minutes to read."""
    output = io.StringIO()

    class StopBeforeReading(RunSetup):
        @classmethod
        def make(cls, config: Config, out: Path) -> RunSetup:
            raise InputError(output.getvalue())

    config, console = load.read_config(task), Console(file=output, width=40)
    inputs = f"model.path = {config.model.path!r} and data.path = {config.data.path!r}"
    with pytest.raises(InputError) as printed:
        train(config, tmp_path / "run", console, StopBeforeReading)
    assert str(printed.value) == f"reading {inputs}\n"
    (tmp_path / "config.toml").write_text(to_toml(config))
    with pytest.raises(InputError) as printed:
        resume(tmp_path, (), console, StopBeforeReading)
    assert str(printed.value).endswith(f"reading {inputs}, and the files of {tmp_path}\n")
