"""The output of every benchmark: the machine, the commit, rows and ratios.

The JSON is {"machine": {...}, "git": "...", "rows": [{...}], "ratios": {"name": number}}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Row = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Options:
    """The common options: --quick ends within 50 s on two cores, --json names the output file."""

    quick: bool
    json: Path | None


def parse_options(description: str) -> Options:
    """Parse the common options, and limit torch to one thread."""
    return options_of(make_parser(description).parse_args())


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the common options, to which a benchmark may add others."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, git, rows and ratios")
    return parser


def options_of(given: argparse.Namespace) -> Options:
    """The common options of parsed arguments; limits torch to one thread."""
    torch.set_num_threads(1)
    return Options(given.quick, given.json)


def machine() -> dict[str, str | int]:
    """The machine on which the benchmark runs."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return gpu | {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def git() -> str:
    """The current commit, with "+changes" if the working tree differs from it."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def publish(options: Options, rows: Sequence[Row], ratios: Mapping[str, float]) -> None:
    """Print everything as tables, and write it as JSON if --json is given."""
    print("  ".join(f"{name} {value}" for name, value in machine().items()), f" git {git()}")
    for columns in dict.fromkeys(tuple(row) for row in rows):
        print()
        _print_table(columns, [row for row in rows if tuple(row) == columns])
    print()
    _print_table(("ratio", "value"), [{"ratio": name, "value": ratio} for name, ratio in ratios.items()])
    if options.json:
        content = {"machine": machine(), "git": git(), "rows": list(rows), "ratios": dict(ratios)}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _print_table(columns: Sequence[str], rows: Sequence[Row]) -> None:
    cells = [list(columns)] + [[_shown(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(value: str | int | float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
