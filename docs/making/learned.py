"""The tables of docs/convergence.md, from what `benchmarks/convergence.py` has measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TASKS = ("chains", "countdown", "stories", "sorting")
SETTING = ("policy", "S", "correction")
POLICIES = ("sync", "dora", "drain", "partial", "inflight", "dropping")  # in the tables' order
Found = Mapping[str, Any]


def tables() -> dict[str, Callable[[], str]]:
    """What makes each table, by name."""
    made = (learning_starts, learning_tests, learning_trajectories, learning_lengths, learning_times)
    return {one.__name__: one for one in (*made, learning_untaught)}


def learning_starts() -> str:
    """Accuracy before and after `sync`."""
    rows = [
        (row["task"], points(row["at_0"]), f"{points(row['at_100'])} ± {points(row['half_100'])}")
        for row in having("seeds", policy="sync")
    ]
    return markdown.table(("task", "before", "after `sync`"), rows)


def learning_tests() -> str:
    """Final accuracy less that of `sync`."""
    return by_task(having("within_noise"), "difference", "half", (*TASKS, "all"))


def learning_trajectories() -> str:
    """Mixed shares, and final accuracy less that of `dora`."""
    mixed = having("trajectories", trajectories="mixed")
    return by_task(mixed, "less_dora", "less_dora_half", TASKS, lambda row: f"{row['mixed_share']:.0%}: ")


def learning_lengths() -> str:
    """What dropping loses, task by task."""
    columns = ("task", "lost, `dora`", "lost, `dropping`", "of the longest tenth", "generated", "trained")
    kept = {row["task"]: row for row in having("trained_over_generated", policy="dora", S=2)}
    return markdown.table(columns, [
        (
            row["task"], f"{kept[row['task']]['dropped_share']:.0%}", f"{row['dropped_share']:.0%}",
            f"{row['dropped_share_of_longest']:.0%}",
            f"{row['generated_mean']:.1f}", f"{row['trained_mean']:.1f}",
        )
        for row in having("trained_over_generated", policy="dropping")
    ])  # fmt: skip


def learning_times() -> str:
    """Samples and seconds to nine tenths of what `sync` gains."""
    found = [row for row in having("samples_to_target", correction="none") if row["policy"] != "dropping"]

    def cell(row: Found) -> str:
        return f"{row['samples_to_target']}, {row['s_to_target']}"

    return markdown.table(
        ("policy", "S", *TASKS),
        [(f"`{key[0]}`", str(key[1]), *cells(found, key, TASKS, cell)) for key in each(found)],
    )


def learning_untaught() -> str:
    """Accuracy on prompts that need longer answers than any that was taught."""
    found = [row for row in having("untaught_at_100") if "half" in row]
    rows = [
        (
            f"`{row['policy']}`", str(row["S"]), correction(row["correction"]), points(row["untaught_at_0"]),
            f"{points(row['untaught_at_100'])} ± {points(row['half'])}",
        )
        for row in sorted(found, key=lambda row: place(setting(row)))
    ]  # fmt: skip
    return markdown.table((*SETTING, "before", "after"), rows)


def having(column: str, **wanted: object) -> list[Found]:
    """Rows of the kind that has a column, and these values."""
    rows = json.loads((RESULTS / "convergence.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if column in row and "seed" not in row and wanted.items() <= row.items()]


def by_task(
    found: Iterable[Found],
    mean: str,
    half: str,
    tasks: Iterable[str],
    before: Callable[[Found], str] = lambda row: "",
) -> str:
    """A row for each setting, with points of accuracy and half of their interval for each task."""
    found, tasks = list(found), tuple(tasks)

    def cell(row: Found) -> str:
        return f"{before(row)}{100 * row[mean]:+.1f} ± {points(row[half])}"

    return markdown.table(
        (*SETTING, *tasks),
        [
            (f"`{key[0]}`", str(key[1]), correction(key[2]), *cells(found, key, tasks, cell))
            for key in each(found)
        ],
    )


def setting(row: Found) -> tuple[Any, ...]:
    """Policy, bound and correction."""
    return tuple(row[name] for name in SETTING)


def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of a setting in a table: those without a correction come first."""
    return key[2] != "none", POLICIES.index(key[0]), key[1]


def each(found: Iterable[Found]) -> list[tuple[Any, ...]]:
    """Settings, each once."""
    return sorted({setting(row) for row in found}, key=place)


def cells(
    found: Iterable[Found], key: tuple[Any, ...], tasks: Iterable[str], cell: Callable[[Found], str]
) -> list[str]:
    """Of one setting, in the order of the tasks."""
    own = {row["task"]: cell(row) for row in found if setting(row) == key}
    return [own.get(task, "") for task in tasks]


def correction(name: str) -> str:
    """As the tables call it."""
    return {"none": "-", "tis": "TIS"}[name]


def points(share: float) -> str:
    """Of accuracy, in hundredths."""
    return f"{100 * share:.1f}"
