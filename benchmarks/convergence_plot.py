"""The plot of `convergence.py`: accuracy against samples and against time, with bands over seeds.

python benchmarks/convergence_plot.py benchmarks/results/convergence.json docs/images/convergence.svg
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bands import band
from convergence_run import TASKS
from convergence_tables import POINTS, SAMPLES_PER_STEP

Rows = Sequence[dict[str, Any]]
LINES = {  # policy and bound -> colour (distinguishable by the colour-blind) and dashes
    ("sync", 0): ("#0072b2", ""),
    ("dora", 2): ("#d55e00", ""),
    ("dora", 4): ("#d55e00", "6 3"),
    ("drain", 2): ("#009e73", "6 3"),
    ("partial", 2): ("#cc79a7", ""),
    ("inflight", 2): ("#cc79a7", "2 3"),
    ("dropping", 2): ("#8a8a8a", "2 3"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 150, 50, 64, 44  # of a panel, and around it
STYLE = """text{font:12px sans-serif;fill:#222}.axis{stroke:#999;fill:none}.small{font-size:10px}
@media(prefers-color-scheme:dark){text{fill:#ddd}}"""


def picture(rows: Rows) -> str:
    """The plot as SVG: a column for each task, samples above, time below."""
    rows = [row for row in rows if "at_0" in row and "seed" in row and row["correction"] == "none"]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    width = LEFT + len(tasks) * (WIDTH + GAP)
    parts = [*_legend()]
    for column, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        for line, is_time in enumerate((False, True)):
            x, y = LEFT + column * (WIDTH + GAP), TOP + line * (HEIGHT + 2 * GAP)
            parts.append(f'<g transform="translate({x},{y})">{_panel(task, own, is_time)}</g>')
    height = TOP + 2 * HEIGHT + 3 * GAP
    title = "Accuracy against samples and against time on four tasks, by update policy, with 95 % bands"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend() -> list[str]:
    parts = []
    for place, ((policy, staleness), (colour, dashes)) in enumerate(LINES.items()):
        x = LEFT + place * 120
        parts.append(f'<path d="M{x} 20h26" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        parts.append(f'<text x="{x + 32}" y="24">{policy}, S = {staleness}</text>')
    return parts


def _panel(task: str, rows: Rows, is_time: bool) -> str:
    """One pair of axes, and a line with its band for each policy.

    Axes of accuracy go from what is least to what is most among the means, in steps of five points.
    """
    curves = {key: found for key in LINES if (found := _curve(rows, key, is_time))}
    farthest = max(x for curve in curves.values() for x, _, _ in curve)
    unit = "s" if is_time else "samples"
    parts = [f'<text x="0" y="-10">{task}</text>'] if not is_time else []
    parts.append(f'<path class="axis" d="M0 0V{HEIGHT}H{WIDTH}"/>')
    means = [mean for curve in curves.values() for _, mean, _ in curve]
    low, high = math.floor(20 * min(means)) / 20, math.ceil(20 * max(means)) / 20
    for share in (0.0, 0.5, 1.0):
        y, tick = HEIGHT * (1 - share), low + share * (high - low)
        parts.append(f'<text class="small" x="-6" y="{y + 4:g}" text-anchor="end">{tick:.3g}</text>')
    label = f"{farthest:.0f} {unit}"
    parts.append(f'<text class="small" x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{label}</text>')
    for key, curve in curves.items():
        scaled = [(x / farthest, (mean - low) / (high - low), half / (high - low)) for x, mean, half in curve]
        parts += _drawn(scaled, *LINES[key])
    return "".join(parts)


def _curve(rows: Rows, key: tuple[str, int], is_time: bool) -> list[tuple[float, float, float]]:
    """Samples or seconds, mean accuracy, and half of its band (0 for one seed) at each point."""
    own = [row for row in rows if (row["policy"], row["S"]) == key]
    if not own:
        return []
    found = []
    for point in POINTS:
        mean, half = band([row[f"at_{point}"] for row in own])
        x = point / 100 * own[0]["steps"] * SAMPLES_PER_STEP
        if is_time:
            x = statistics.fmean(row[f"s_at_{point}"] if point else 0.0 for row in own)
        found.append((x, mean, half if len(own) > 1 else 0.0))
    return found


def _drawn(curve: list[tuple[float, float, float]], colour: str, dashes: str) -> list[str]:
    """A band and its middle; x and y from 0 to 1."""

    def at(x: float, y: float) -> str:
        return f"{x * WIDTH:.1f} {HEIGHT * (1 - min(1.0, max(0.0, y))):.1f}"

    upper = [at(x, mean + half) for x, mean, half in curve]
    lower = [at(x, mean - half) for x, mean, half in reversed(curve)]
    middle = "L".join(at(x, mean) for x, mean, _ in curve)
    return [
        f'<path d="M{"L".join([*upper, *lower])}Z" fill="{colour}" opacity="0.08"/>',
        f'<path d="M{middle}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>',
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="rows, the JSON of convergence.py")
    parser.add_argument("target", type=Path, help="the SVG file to write")
    given = parser.parse_args()
    given.target.write_text(
        picture(json.loads(given.source.read_text(encoding="utf-8"))["rows"]), encoding="utf-8"
    )
