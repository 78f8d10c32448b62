"""The tables and curves of docs/gallery.md, from what `benchmarks/gallery.py` has measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.making import markdown

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "gallery.json"
WIDTH, HEIGHT, MARGIN = 260, 110, 26  # of a curve's axes, and around them
COLOUR = "#4051b5"
STYLE = """text{font:10px sans-serif;fill:#555}.axis{stroke:#999;fill:none}
@media(prefers-color-scheme:dark){text{fill:#bbb}}"""
NAMES = (
    *("gcd", "own_task", "second_reward", "calculator", "game", "chains", "countdown", "stories", "sorting"),
    *("agents", "external_trainer", "synchronous"),
)
NOT_MEASURED = "Not measured yet: `python benchmarks/gallery.py --json benchmarks/results/gallery.json` does."
Row = dict[str, Any]


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it: one of all examples, and one for each."""
    each = {f"gallery_{name}": partial(result_table, name) for name in NAMES}
    return {"gallery": gallery, **each, "gallery_machine": machine}


def pictures() -> dict[str, str]:
    """File name in docs/images -> SVG of the curve of an example."""
    return {f"gallery-{name.replace('_', '-')}.svg": curve(name) for name in results()}


def gallery() -> str:
    """All examples with their figures."""
    columns = ("example", "steps", "minutes", "before", "after", "curve")
    lines = [(_link(name), *_figures(row), _image(name)) for name, row in results().items()]
    return markdown.table(columns, lines) if lines else NOT_MEASURED


def result_table(name: str) -> str:
    """The figures and the curve of one example."""
    row = results().get(name)
    if row is None:
        return NOT_MEASURED
    columns = ("steps", "minutes", "before", "after", "mean reward of")
    steps, minutes, *accuracy = _figures(row)
    cells = (steps, minutes, *accuracy, row["measure"])
    return f"{markdown.table(columns, [cells])}\n\n{_image(name)}"


def machine() -> str:
    """Where the examples ran."""
    found = _read()
    if not found["rows"]:
        return NOT_MEASURED
    about = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    return f"Measured on {about}; commit {found['git']}."


def results() -> dict[str, Row]:
    """The figures of each example that has run."""
    rows = {row["example"]: row for row in _read()["rows"] if "minutes" in row}
    return {name: rows[name] for name in NAMES if name in rows}


def curve(name: str) -> str:
    """Mean reward of the trained samples against steps, as SVG."""
    rows = [row for row in _read()["rows"] if row["example"] == name and "reward" in row]
    return draw(name, [(row["step"], row["reward"]) for row in rows])


def draw(example: str, points: Sequence[tuple[int, float]]) -> str:
    """An SVG that needs no other file; rewards outside 0 to 1 widen the vertical axis."""
    last = max(step for step, _ in points)
    low = min(0.0, *(reward for _, reward in points))
    high = max(1.0, *(reward for _, reward in points))

    def place(step: float, reward: float) -> str:
        x = MARGIN + WIDTH * step / last
        return f"{x:.1f},{MARGIN + HEIGHT * (high - reward) / (high - low):.1f}"

    line = " ".join(place(step, reward) for step, reward in points)
    bottom = MARGIN + HEIGHT
    size = f'viewBox="0 0 {WIDTH + 2 * MARGIN} {HEIGHT + 2 * MARGIN}" width="{WIDTH + 2 * MARGIN}"'
    title = f"Mean reward of the trained samples of {example} over {last} steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
        f"<style>{STYLE}</style>\n"
        f'<path class="axis" d="M{MARGIN} {MARGIN}V{bottom}H{MARGIN + WIDTH}"/>\n'
        f'<text x="2" y="{MARGIN + 4}">{high:g}</text><text x="2" y="{bottom + 4}">{low:g}</text>\n'
        f'<text x="{MARGIN + WIDTH}" y="{bottom + 14}" text-anchor="end">step {last}</text>\n'
        f'<text x="{MARGIN}" y="{MARGIN - 10}">mean reward</text>\n'
        f'<polyline points="{line}" fill="none" stroke="{COLOUR}" stroke-width="2"/>\n</svg>\n'
    )


def _figures(row: Row) -> tuple[str, ...]:
    return f"{row['steps']}", f"{row['minutes']:.1f}", f"{row['before']:.2f}", f"{row['after']:.2f}"


def _link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _image(name: str) -> str:
    return f"![{name}: mean reward over steps](images/gallery-{name.replace('_', '-')}.svg)"


def _read() -> Row:
    """The benchmark's file; without it, no rows."""
    if not RESULT.is_file():
        return {"rows": []}
    found: Row = json.loads(RESULT.read_text(encoding="utf-8"))
    return found
