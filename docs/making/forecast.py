"""The tables of docs/paper.md, from the forecast of the papers' tables, and of docs/simulate.md.

The papers' rows are told apart by their kind, and those of `open` by the table that they name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SWEPT = ("step_s", "tokens_per_s", "exposed", "busy_rows", "staleness", "moves")


def tables() -> dict[str, Callable[[], str]]:
    """What makes each table, by name."""
    return {
        "paper_inputs": partial(of_kind, "inputs", ("what", "value")),
        "paper_fitted": partial(of_kind, "fitted", COMPARED),
        "paper_splits": partial(of_kind, "splits", COMPARED),
        "paper_asyncflow": partial(of_kind, "asyncflow", COMPARED),
        "paper_moe": partial(of_kind, "moe", COMPARED),
        "paper_bounds": partial(swept, "speed against S"),
        "paper_parts": partial(swept, "parts, S = 2"),
        "paper_fleets": partial(swept, "fleets, S = 2"),
        "paper_tails": tails,
        "validation": validation,
    }


COMPARED = ("policy", "S", "gpus", "trainer", "metric", "paper", "predicted", "error")


def of_kind(kind: str, columns: Sequence[str]) -> str:
    """Rows of one kind, with an error as a percentage."""
    return written([row for row in rows() if row["kind"] == kind], columns)


def swept(table: str) -> str:
    return written([row for row in rows() if row.get("table") == table], ("case", *SWEPT))


def tails() -> str:
    found = [row for row in rows() if row.get("table") == "tail x experts"]
    columns = [column for column in found[0] if column not in ("kind", "table")] if found else ["alpha"]
    return written(found, columns)


def validation() -> str:
    """Real runs and what was predicted of them."""
    content = json.loads((RESULTS / "validation.json").read_text(encoding="utf-8"))
    columns = (
        "pace", "policy", "S", "lengths", "engines", "calibrates", "tokens_per_s", "predicted", "error",
        "within",
    )  # fmt: skip
    return written([row for row in content["rows"] if "policy" in row], columns)


def written(found: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    cells = [[shown(column, row.get(column, "")) for column in columns] for row in found]
    return markdown.table([column.replace("_", " ") for column in columns], cells)


def shown(column: str, value: Any) -> str:
    """Three digits that count; errors in percent."""
    if isinstance(value, str):
        return value
    if column == "error":
        return f"{100 * value:+.0f} %"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rows() -> list[dict[str, Any]]:
    content = json.loads((RESULTS / "paper.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = content["rows"]
    return found
