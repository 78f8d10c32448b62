"""Runs from Python: start one, follow it, and read what it has written.

A run has processes of its own, so it goes on if the notebook or program that started it ends.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dora.config import load as config_files
from dora.config.toml import to_literal, to_toml
from dora.errors import InputError, RunError
from dora.metrics.evaluation import VERSION_KEY, best_first
from dora.metrics.status import RunStatus, driver_of, read_status
from dora.metrics.writer import METRICS_FILE, read_metrics
from dora.report import page
from dora.report.samples import read_responses
from dora.runtime.run_dir import check_out
from dora.trainer.checkpoint_folders import complete_checkpoints, find_best

CONSOLE_FILE = "console.txt"  # what `dora train` prints
CONFIG_FILE = "given.toml"  # a configuration that was given as tables
BAD_INPUT, STOPPED = 2, 130  # exit codes of `dora train`
POLL_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 120.0

Row = Mapping[str, Any]


class Table(Sequence[Row]):
    """Rows with named columns; a row may lack some of them. Notebooks show it as a table."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Table: ...

    def __getitem__(self, index: int | slice) -> Row | Table:
        return Table(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Table({len(self)} rows, {len(self.columns)} columns)"

    @property
    def columns(self) -> list[str]:
        """The names, in the order of their first row."""
        return [*dict.fromkeys(name for row in self._rows for name in row)]

    def column(self, name: str) -> list[Any]:
        """The values of one column, of the rows that have it. Raises KeyError with similar names."""
        if name not in self.columns:
            similar = ", ".join(own for own in self.columns if name.rpartition("/")[2] in own)
            raise KeyError(f"no column {name!r}; " + (f"similar: {similar}" if similar else "see `columns`"))
        return [row[name] for row in self._rows if name in row]

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Raises ImportError without pandas."""
        return import_module("pandas").DataFrame([*map(dict, self._rows)], columns=self.columns)

    def _repr_html_(self) -> str:
        def cells(tag: str, values: Sequence[Any]) -> str:
            texts = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
            return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

        rows = [cells("td", [row.get(name, "") for name in self.columns]) for row in self._rows]
        return f"<table>{cells('th', self.columns)}{''.join(rows)}</table>"


class Run:
    """A run in a folder, which may be in progress. `dora.train` and `dora.load` make it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process` is `dora train`, if this program has started it."""
        self.folder, self._process = folder, process

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def status(self) -> RunStatus:
        """Its state ("running", "finished", "crashed", ...) and a sentence about it."""
        try:
            return read_status(self.folder)
        except InputError:
            if self._process is None or self._process.poll() is not None:
                raise
            return RunStatus("running", "it starts, and has written nothing yet", {})

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration: section -> key -> value."""
        return tomllib.loads(self._read("config.toml"))

    @property
    def summary(self) -> dict[str, Any]:
        """The metrics of the whole run, once it has ended; see docs/metrics.md. Raises InputError before."""
        found: dict[str, Any] = json.loads(self._read("summary.json"))
        return found

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, a folder that transformers loads. Raises InputError if there is none."""
        found = complete_checkpoints(self.folder / "checkpoints")
        if not found:
            raise InputError(f"{self.folder} has no checkpoint yet; trainer.save_freq sets when it is saved")
        return found[max(found)]

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint of the evaluated version with the highest mean reward, of those that have one.

        Rewards are those of sampled responses, or of greedy ones if none were sampled. `trainer.keep_best`
        keeps this checkpoint. Raises InputError if there is none.
        """
        rewards = {
            row[VERSION_KEY]: row.get("val/reward_mean", row.get("val/greedy_reward_mean"))
            for row in self.metrics()
            if VERSION_KEY in row
        }
        checkpoints = self.folder / "checkpoints"
        best = find_best(checkpoints, best_first(rewards))
        if best is None:
            raise InputError(
                f"{self.folder} has no checkpoint of an evaluated version; set trainer.keep_best, and as "
                "trainer.save_freq a divisor of eval.every"
            )
        return checkpoints / f"step-{best}"

    def metrics(self) -> Table:
        """A row for each training step and each evaluation so far; see docs/metrics.md for the columns."""
        return Table(read_metrics(self.folder / METRICS_FILE))

    def samples(self, last: int | None = None) -> Table:
        """Prompts and responses as text, with rewards, of the `last` groups; None: of all."""
        return Table(read_responses(self.folder, last))

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report, by default into the run's folder; returns its path."""
        return page.write_report([self.folder], None if out is None else Path(out))

    def wait(self, progress: bool = True) -> Run:
        """Wait until the run has ended, with a progress bar; returns the run.

        Raises InputError if its input is wrong, RunError if it fails. Ctrl-C stops the run.
        """
        try:
            self._follow(progress)
        except KeyboardInterrupt:
            self.stop()
            raise
        code = 0 if self._process is None else self._process.returncode
        if code in (0, STOPPED):
            return self
        message = self._console().removeprefix("dora: ")
        raise InputError(message) if code == BAD_INPUT else RunError(message)

    def stop(self) -> None:
        """Let the run save a checkpoint and end. `dora train --resume` continues it.

        A run that has written nothing yet ends without a trace.
        """
        if (driver := self._driver()) is not None:
            driver.terminate()
            psutil.wait_procs([driver], STOP_TIMEOUT_S)

    def _follow(self, shows_progress: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, disable=not shows_progress) as progress:
            bar = progress.add_task("starting", total=None)
            while self._driver() is not None:
                self._show(progress, bar)
                time.sleep(POLL_INTERVAL_S)
            self._show(progress, bar)

    def _show(self, progress: Progress, bar: Any) -> None:
        steps = [row for row in self.metrics() if "reward/mean" in row]
        if steps:
            total, reward = self.config["run"]["steps"], steps[-1]["reward/mean"]
            description = f"reward {reward:.3f}"
            progress.update(bar, completed=len(steps), total=total, description=description)

    def _driver(self) -> psutil.Process | None:
        """Its process, if it is alive and on this machine."""
        if self._process is None:
            return driver_of(self.folder)
        return psutil.Process(self._process.pid) if self._process.poll() is None else None

    def _console(self) -> str:
        """The last line that the run has printed."""
        lines = (self.folder / CONSOLE_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("dora: ")), -1)
        return "\n".join(lines[start:])

    def _read(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            raise InputError(f"{self.folder} has no {name} yet: {self.status.sentence}")
        return path.read_text(encoding="utf-8")


def train(
    config: Path | str | Mapping[str, Mapping[str, Any]],
    out: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Train a policy; returns the run when it has ended, or with `wait=False` once its process has started.

    `config` is the path of a TOML file, or its tables as dictionaries: {"run": {"steps": 10}, ...}.
    `overrides` change keys: {"trainer.lr": 1e-4}. Paths in tables and overrides are relative to the working
    directory. `out` is a new folder, by default in `runs/`. Raises InputError if a key, a path or the folder
    is wrong, RunError if the run fails.
    """
    changes = [f"{key}={_to_toml_value(key, value)}" for key, value in (overrides or {}).items()]
    path = Path(config) if isinstance(config, str | Path) else None
    name = "run" if path is None else path.stem
    folder = Path(out) if out is not None else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_out(folder)
    if path is None:
        assert isinstance(config, Mapping)
        resolved = config_files.make_config(config)
    else:
        resolved = config_files.read_config(path, changes)
    folder.mkdir(parents=True, exist_ok=True)
    if path is None:
        path = folder / CONFIG_FILE
        path.write_text(to_toml(resolved), encoding="utf-8")
        config_files.read_config(path, changes)  # a wrong override
    command = [sys.executable, "-m", "dora", "train", str(path), "--out", str(folder)]
    command += [part for change in changes for part in ("--set", change)]
    with (folder / CONSOLE_FILE).open("wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C of a notebook reaches the run through `stop` alone
        )
    run = Run(folder, process)
    return run.wait(progress) if wait else run


def _to_toml_value(key: str, value: object) -> str:
    if isinstance(value, Mapping) and "." not in key:
        flat = {f"{key}.{name}": own for name, own in value.items()}
        raise InputError(f"override {key} = {value!r}: overrides are flat; write {flat!r}")
    try:
        return to_literal(value)
    except TypeError as error:
        raise InputError(
            f"override {key} = {value!r}: {error}; give a TOML value, such as 'file.py:name' for a function"
        ) from error


def load(folder: Path | str) -> Run:
    """The run in a folder, in progress or ended. Raises InputError if there is none."""
    run = Run(Path(folder))
    _ = run.status
    return run
