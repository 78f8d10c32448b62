"""Fixtures of whole runs: a tiny task, and runs that are killed at the end of their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.runs.resumable import ResumableRun
from tests.runtime.running import Run, undocumented
from tests.runtime.tiny import drop_engine_settings, write_task

StartRun = Callable[..., Run]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the tiny task."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def plain_task(tmp_path: Path) -> Path:
    """The tiny task without settings of DORA's own engine."""
    return drop_engine_settings(write_task(tmp_path))


@pytest.fixture
def start_run(task: Path, tmp_path: Path) -> Iterator[StartRun]:
    """Starts a run of the tiny task, or of `config`, in `tmp_path/run`; kills it at the end of the test."""
    runs: list[Run] = []

    def start(config: Path = task, **changes: object) -> Run:
        runs.append(Run(config, tmp_path / "run", **changes))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()
        assert undocumented(run.out) == set()


@pytest.fixture
def resumable(task: Path, tmp_path: Path) -> Iterator[ResumableRun]:
    """A run of the tiny task in `tmp_path/run`, to be killed and resumed."""
    run = ResumableRun(task, tmp_path / "run")
    yield run
    run.kill_all()
