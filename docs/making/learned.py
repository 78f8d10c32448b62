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
    """Table name -> function that writes it."""
    made = (learning_starts, learning_tests, learning_trajectories, learning_lengths, learning_times)
    return {function.__name__: function for function in (*made, learning_untaught)}


def learning_starts() -> str:
    """Accuracy before and after `sync`."""
    rows = [
        (row["task"], points(row["at_0"]), f"{points(row['at_100'])} ± {points(row['half_100'])}")
        for row in having("seeds", policy="sync")
    ]
    return markdown.table(("task", "before", "after `sync`"), rows)


def learning_tests() -> str:
    """Final accuracy minus that of `sync`."""
    return by_task(having("within_noise"), "difference", "half", (*TASKS, "all"))


def learning_trajectories() -> str:
    """The share of responses with several versions, and final accuracy minus that of `dora`."""
    mixed = having("trajectories", trajectories="mixed")
    return by_task(mixed, "less_dora", "less_dora_half", TASKS, lambda row: f"{row['mixed_share']:.0%}: ")


def learning_lengths() -> str:
    """The share of discarded responses, and lengths, by task."""
    columns = (
        *("task", "discarded, `dora`", "discarded, `dropping`", "of the longest tenth"),
        *("length generated", "length trained"),
    )
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
    """Samples and seconds to nine tenths of the gain of `sync`."""
    found = [row for row in having("samples_to_target", correction="none") if row["policy"] != "dropping"]

    def cell(row: Found) -> str:
        return f"{row['samples_to_target']}, {row['s_to_target']}"

    return markdown.table(
        ("policy", "S", *TASKS),
        [(f"`{key[0]}`", str(key[1]), *cells(found, key, TASKS, cell)) for key in each(found)],
    )


def learning_untaught() -> str:
    """Accuracy on prompts that need longer responses than those of the initial model's data."""
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
    """Rows that have `column` and the values `wanted`."""
    rows = json.loads((RESULTS / "convergence.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if column in row and "seed" not in row and wanted.items() <= row.items()]


def by_task(
    found: Iterable[Found],
    mean: str,
    half: str,
    tasks: Iterable[str],
    before: Callable[[Found], str] = lambda row: "",
) -> str:
    """One line for each setting, with points of accuracy ± half of their interval for each task."""
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
    """Sort key of a setting; those without a correction come first."""
    return key[2] != "none", POLICIES.index(key[0]), key[1]


def each(found: Iterable[Found]) -> list[tuple[Any, ...]]:
    """The settings, each once."""
    return sorted({setting(row) for row in found}, key=place)


def cells(
    found: Iterable[Found], key: tuple[Any, ...], tasks: Iterable[str], cell: Callable[[Found], str]
) -> list[str]:
    """The cells of one setting, in the order of the tasks."""
    own = {row["task"]: cell(row) for row in found if setting(row) == key}
    return [own.get(task, "") for task in tasks]


def correction(name: str) -> str:
    """The name of a correction in the tables."""
    return {"none": "-", "tis": "TIS"}[name]


def points(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.1f}"
