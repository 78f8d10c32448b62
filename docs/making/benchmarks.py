"""Pages of results, one for each JSON file of benchmarks/results.

Rows with the same columns make a table, as the benchmark itself prints them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MAX_ROWS = 120  # of one table
MADE_BY = {
    "engine_grid": "engine",
    "faults_ray": "faults",
    "faults_vllm": "faults",
    "faults_nixl": "faults",
    "faults_sglang": "faults",
    "faults_sglang_nixl": "faults",
    "gpu": "gpu_results",
    "migration_sglang": "migration",
    "migration_vllm": "migration",
    "policies_search": "policies",
    "sglang_fleet": "vllm_fleet",
    "sglang_lora": "vllm_lora",
    "sglang_server": "vllm_server",
}  # results of a script with another name


def pages() -> dict[str, str]:
    """File name -> path of its page."""
    return {file.stem: f"benchmarks/{file.stem}.md" for file in sorted(RESULTS.glob("*.json"))}


def page(name: str) -> str:
    """The results of one benchmark, with machine and state of the code."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    script = f"{MADE_BY.get(name, name)}.py"
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    ratios = [{"ratio": ratio, "value": value} for ratio, value in found["ratios"].items()]
    parts = [
        f"# {name}",
        docstring_of(ROOT / "benchmarks" / script),
        f"[The script](../../benchmarks/{script}), "
        f"[the figures as JSON](../../benchmarks/results/{name}.json). "
        f"Measured on {machine}; state of the code {found['git']}.",
        "## Ratios",
        table(("ratio", "value"), ratios),
        "## Rows",
        *tables(found["rows"]),
    ]
    return "\n\n".join(parts) + "\n"


def docstring_of(script: Path) -> str:
    """The module docstring of a benchmark."""
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each set of columns, with at most MAX_ROWS rows."""
    made = []
    for columns in dict.fromkeys(tuple(row) for row in rows):
        own = [row for row in rows if tuple(row) == columns]
        made.append(table(columns, own[:MAX_ROWS]))
        if len(own) > MAX_ROWS:
            made.append(f"{MAX_ROWS} of {len(own)} rows; the JSON has all.")
    return made


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown; numbers are aligned to the right."""
    is_number = [all(isinstance(row[column], int | float) for row in rows) for column in columns]
    lines = [columns, ["--:" if number else "---" for number in is_number]]
    lines += [[figure(row[column]) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: Any) -> str:
    """A value with four significant digits and separated thousands."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ("" if value is None else str(value)).replace("|", "\\|")
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
