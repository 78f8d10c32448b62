"""`dora train` as a command, and the files that a run leaves."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dora.audit import audit
from report import Row


def train_command(config: Path, out: Path, changes: Iterable[str] = ()) -> list[str]:
    """The command of a run with overrides `key=value`."""
    command = [sys.executable, "-m", "dora", "train", str(config), "--out", str(out)]
    return command + [part for change in changes for part in ("--set", change)]


def train(config: Path, out: Path, changes: Iterable[str] = (), *options: str) -> None:
    """A run in a process of its own. Raises CalledProcessError if it fails or breaks a guarantee."""
    subprocess.run([*train_command(config, out, changes), *options], check=True, stdout=subprocess.DEVNULL)


def summary_of(out: Path) -> dict[str, Any]:
    """The summary of a run that has finished."""
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def audited_summary(out: Path) -> dict[str, Any]:
    """The summary of a run that has finished. Asserts that its files show no violation."""
    findings = audit.check(out).findings
    assert findings == (), (out, findings)
    return summary_of(out)


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The lines of the metrics of a run: steps, and evaluations."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def rewards_of(out: Path) -> list[float]:
    """The mean reward of each step."""
    return [line["reward/mean"] for line in metrics_of(out) if "reward/mean" in line]


def median_of(rows: Iterable[Row], column: str, **chosen: object) -> float:
    """The median of a column of the rows that have the chosen values."""
    return statistics.median(
        float(row[column]) for row in rows if all(row.get(name) == value for name, value in chosen.items())
    )
