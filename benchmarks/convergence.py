"""What update policies learn: accuracy against samples and time, over seeds, on four verifiable tasks.

Each run of a task of examples/verifiable has one engine and one trainer. Seeds are paired: all settings have
the same prompts in the same order, and evaluation uses the same random numbers. A difference from `sync` is
within noise if the 95 % interval of the paired t-test contains 0. That does not prove equality, so the tables
also show whether the interval excludes differences of three points and more. Tests are not corrected for
their number. `dropping` is DORA with a trainer that drops samples staler than two versions. Runs in the file
--kept are not repeated.

    python benchmarks/convergence.py [--quick] [--json FILE] [--kept FILE] [--minutes M]
        [--task NAME ...] [--policy NAME ...]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from convergence_run import TASKS, Setting, run
from convergence_tables import ratios_of, tables

from report import make_parser, options_of, publish

SEEDS = range(5)
NUM_STEPS, NUM_PROMPTS = 60, 256
QUICK_STEPS, QUICK_PROMPTS = 20, 64
RIVALS = [("dora", 2), ("partial", 2), ("inflight", 2), ("dora", 4), ("dora", 1)]
SETTINGS = [  # the most important ones first, in case --minutes ends the benchmark early
    Setting("sync", 0),
    *(Setting(*rival) for rival in RIVALS),
    Setting("dropping", 2),
    Setting("dora", 0),
    Setting("drain", 2),
    *(Setting(*rival, "tis") for rival in RIVALS),
]
QUICK = [Setting("sync", 0), *(Setting(policy, 2) for policy in ("dora", "partial", "inflight", "dropping"))]
IDENTITY = ("task", "policy", "S", "correction", "seed", "steps")


class Kept:
    """Rows of finished runs, one JSON line each; without a file, in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, *identity: Any) -> bool:
        return any(tuple(row[key] for key in IDENTITY) == identity for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def runs(given: argparse.Namespace) -> Iterator[tuple[str, Setting, int]]:
    """All runs, seed by seed, so that an unfinished set has about as many seeds of each setting."""
    chosen, seeds = (QUICK, SEEDS[:1]) if given.quick else (SETTINGS, SEEDS)
    settings = [setting for setting in chosen if setting.policy in (given.policy or [setting.policy])]
    for seed, setting, task in product(seeds, settings, given.task or TASKS):
        yield task, setting, seed


def fill(kept: Kept, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Execute missing runs until --minutes are over; returns the rows of all selected runs."""
    until_s = time.monotonic() + 60 * given.minutes
    num_steps, num_prompts = (QUICK_STEPS, QUICK_PROMPTS) if given.quick else (NUM_STEPS, NUM_PROMPTS)
    wanted = []
    for task, setting, seed in runs(given):
        identity = (task, setting.policy, setting.max_staleness, setting.correction, seed, num_steps)
        wanted.append(identity)
        if not kept.has(*identity) and time.monotonic() < until_s:
            kept.add(run(task, setting, seed, num_steps, num_prompts))
            print(*identity, kept.rows[-1]["at_100"], flush=True)
    return [row for row in kept.rows if tuple(row[key] for key in IDENTITY) in wanted]


def options() -> argparse.Namespace:
    parser = make_parser(str(__doc__))
    parser.add_argument("--kept", type=Path, metavar="FILE", help="rows of finished runs, JSON lines")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--task", action="append", choices=TASKS, help="only this task; may be repeated")
    policies: Sequence[str] = [*dict.fromkeys(setting.policy for setting in SETTINGS)]
    parser.add_argument(
        "--policy", action="append", choices=policies, help="only this policy; may be repeated"
    )
    return parser.parse_args()


def main() -> None:
    given = options()
    shared = options_of(given)
    rows = fill(Kept(given.kept), given)
    publish(shared, [*tables(rows), *rows], ratios_of(rows))


if __name__ == "__main__":
    main()
