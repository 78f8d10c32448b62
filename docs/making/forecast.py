"""The tables of docs/paper-tables.md, from the predictions of the papers' tables, and of docs/planning.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SCALE = (
    "devices", "engines", "answers_per_step", "steps", "events", "cpu_s",
    "event_us", "event_us_early", "event_us_late", "memory_gb", "simulated_hours",
)  # fmt: skip
TITLES = {"busy_rows": "row utilisation", "moves": "migrations", "what": "input", "gpus": "GPUs"}
SWEPT = ("step_s", "tokens_per_s", "exposed", "busy_rows", "staleness", "moves")


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    return {
        "paper_inputs": partial(of_kind, "inputs", ("what", "value")),
        "paper_fitted": partial(of_kind, "fitted", COMPARED),
        "paper_splits": splits,
        "paper_ratios": partial(
            of_kind, "ratios", ("policy", "gpus", "metric", "paper", "predicted", "error")
        ),
        "paper_asyncflow": partial(of_kind, "asyncflow", COMPARED),
        "paper_moe": partial(of_kind, "moe", COMPARED),
        "paper_bounds": partial(swept, "speed against S"),
        "paper_parts": partial(swept, "parts, S = 2"),
        "scale": lambda: written(rows("scale"), SCALE),
        "paper_tails": partial(of_table, "tail x experts"),
        "validation": validation,
    }


COMPARED = ("policy", "S", "gpus", "trainer", "metric", "paper", "predicted", "error")


def of_kind(kind: str, columns: Sequence[str]) -> str:
    """The rows of one kind that have no table of their own."""
    return written([row for row in rows() if row["kind"] == kind and "table" not in row], columns)


def splits() -> str:
    """Step, throughput and exposed rollout of each policy, with the best split of the devices."""
    shown_metrics = ("step_min", "tokens_per_s", "exposed_min")
    found = [row for row in rows() if row["kind"] == "splits" and row.get("metric") in shown_metrics]
    return written(found, COMPARED)


def swept(table: str) -> str:
    return written([row for row in rows() if row.get("table") == table], ("case", *SWEPT))


def of_table(table: str) -> str:
    """All columns of rows that no printed number is compared with."""
    found = [row for row in rows() if row.get("table") == table]
    return written(found, [column for column in (found or [{}])[0] if column not in ("kind", "table")])


def validation() -> str:
    """Real runs and their predictions."""
    content = json.loads((RESULTS / "validation.json").read_text(encoding="utf-8"))
    columns = (
        "pace", "policy", "S", "lengths", "engines", "calibrates", "tokens_per_s", "predicted", "error",
        "within",
    )  # fmt: skip
    return written([row for row in content["rows"] if "policy" in row], columns)


def written(found: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    cells = [[shown(column, row.get(column, "")) for column in columns] for row in found]
    return markdown.table([TITLES.get(column, column.replace("_", " ")) for column in columns], cells)


def shown(column: str, value: Any) -> str:
    """Three significant digits; errors in per cent."""
    if isinstance(value, str):
        return value
    if column == "error":
        return f"{100 * value:+.0f} %"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rows(name: str = "paper") -> list[dict[str, Any]]:
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = content["rows"]
    return found
