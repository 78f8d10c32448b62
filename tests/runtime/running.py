"""Start whole runs of `dora train` as a user does, and read what they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.runtime.command_server import ForkedCommand

from dora.metrics.catalog import SECTIONS

TIMEOUT_S = 100.0  # machines that run tests may be busy


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def dora(*arguments: str | Path, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run a command to its end."""
    command = ForkedCommand([*map(str, arguments)], environment())
    out, err = command.communicate(timeout_s)
    assert command.returncode is not None
    return CommandResult(command.returncode, out, err)


def environment() -> dict[str, str]:
    """A wide plain terminal, so that no line is wrapped."""
    return {**os.environ, "COLUMNS": "200", "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def settings(changes: dict[str, object]) -> list[str]:
    """`--set section.key=value` for each change."""
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


class Run:
    """A training run in its own process."""

    def __init__(
        self,
        config: Path | None,
        out: Path,
        output: int | None = None,
        command: str = "train",
        options: Sequence[str] = (),
        **changes: object,
    ) -> None:
        """`section__key=value` changes a setting; `output` is a file descriptor for stdout.

        Without a configuration, resume the run in `out`.
        """
        sets = settings({key.replace("__", "."): value for key, value in changes.items()})
        what = ["--resume", str(out)] if config is None else [str(config), "--out", str(out)]
        self.out = out
        self._process = ForkedCommand([command, *what, *options, *sets], environment(), output)
        self.pid = self._process.pid
        self._ended: CommandResult | None = None

    def workers(self) -> list[psutil.Process]:
        """The worker processes in the order of their start: engines, trainer, reward worker."""
        servers = psutil.Process(self.pid).children()  # the fork server is one of them
        workers = [child for server in servers for child in server.children()]
        return sorted(workers, key=lambda child: (child.create_time(), child.pid))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until the condition holds; fail with the stderr of a run that ends before."""

        def met() -> bool:
            if condition():
                return True
            assert self._process.poll() is None, f"the run ended before {what}: {self.end()}"
            return False

        wait_until(met, what=what)

    def wait_for_steps(self, count: int) -> None:
        """Wait until that many steps are trained."""
        self.wait_until(lambda: len(metrics(self.out)) >= count, f"step {count}")

    def end(self, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Wait for the end. Later calls return the same result."""
        if self._ended is None:
            out, err = self._process.communicate(timeout_s)
            assert self._process.returncode is not None
            self._ended = CommandResult(self._process.returncode, out, err)
        return self._ended

    def succeed(self, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Wait for the end, which must be with code 0."""
        ended = self.end(timeout_s)
        assert ended.code == 0, ended
        return ended

    def audit(self, *options: str, timeout_s: float = TIMEOUT_S) -> str:
        """The output of `dora audit`, which must find nothing."""
        audit = dora("audit", self.out, *options, timeout_s=timeout_s)
        assert audit.code == 0, audit
        return audit.out

    def check_records(self) -> str:
        """The output of `dora audit`. Audit and replay accept the journal, and the guarantees hold."""
        replay, s = dora("replay", self.out), summary(self.out)
        assert replay.code == 0, replay
        assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
        return self.audit()

    def kill(self) -> None:
        """Kill the driver and its workers at once, and wait for their end."""
        workers = self.workers()
        os.killpg(self.pid, signal.SIGKILL)
        self.end()
        assert wait_until_gone(workers) == []

    def kill_all(self) -> None:
        """End the run and all its processes, also after a failed test."""
        if self._process.poll() is None:
            driver = psutil.Process(self.pid)
            for process in (*driver.children(recursive=True), driver):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has exited meanwhile
                    process.kill()
        self.end()

    def weight_folders(self) -> list[Path]:
        """Folders in memory with the weight versions of this run."""
        parents = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        return [folder for parent in parents for folder in parent.glob(f"dora-weights-{self.pid}-*")]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def undocumented(out: Path) -> set[str]:
    """Names in metrics.jsonl that `dora metrics` does not describe."""
    known = [metric for part in SECTIONS for metric in part.metrics]
    return {name for line in metrics(out) for name in line if not any(m.matches(name) for m in known)}


def journal(out: Path) -> list[dict[str, Any]]:
    """The events and actions in the complete lines of journal.jsonl so far."""
    path = out / "journal.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.is_file() else []
    return [line for line in map(json.loads, lines) if "seq" in line]


def query(out: Path, statement: str, *values: object) -> list[Any]:
    """The rows of a statement on the sample store, which it may also change."""
    with contextlib.closing(sqlite3.connect(out / "samples.sqlite")) as store, store:
        return store.execute(statement, values).fetchall()


def summary(out: Path) -> dict[str, Any]:
    """The content of summary.json."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def wait_until(
    condition: Callable[[], bool], timeout_s: float = TIMEOUT_S, what: str = "the condition holds"
) -> None:
    """Poll until the condition holds. It may read a long journal: most of the time is left to the run."""
    began_s = time.monotonic()
    deadline_s = began_s + timeout_s
    while not condition():
        now_s = time.monotonic()
        assert now_s < deadline_s, f"timed out before {what}"
        time.sleep(max(0.02, 4 * (now_s - began_s)))
        began_s = time.monotonic()


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = TIMEOUT_S) -> list[psutil.Process]:
    """Wait for the end of processes; those that still run after the time. Zombies have ended."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [p for p in processes if _is_alive(p)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
