"""`dora plan`: the best layouts for a job on so many devices, as bars, and how sure they are.

`search` finds them; this file tells how it goes and what it found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from dora.sim.forecast.checking import stated
from dora.sim.forecast.compare import Row, check_files, show
from dora.sim.forecast.search import Plan, Question, heavier, search
from dora.sim.forecast.shapes import TRAINED_BYTES

BAR = 40  # characters of the longest


def row_of(plan: Plan) -> Row:
    """A plan as it is printed. Memory in GB of one device, and of the fullest at any time."""
    found, layout, (cost, rows, _) = plan.figures, plan.setup.layout, plan.setup.engines[0]
    weights_gb = cost.rank_bytes / 1e9
    kv_gb = min(1.0, found["kv_peak"]) * cost.kv_tokens * cost.shape.kv_bytes / cost.num_devices / 1e9
    trainer_gb = cost.shape.parameters * TRAINED_BYTES / layout.train[1] / 1e9
    return {
        "policy": layout.policy,
        "S": layout.max_staleness,
        "trainer": layout.train[1],
        "rollout": sum(num for _, num in layout.rollout),
        "TP": layout.tensor,
        "EP": layout.expert,
        "rows": rows,
        "tokens/s": found["tokens_per_s"],
        "step s": found["step_s"],
        "trainer idle": found["exposed"],
        "engines idle": 1 - found["busy_engines"],
        "staleness": found["staleness"],
        "max": found["staleness_max"],
        "weights GB": weights_gb,
        "KV GB": kv_gb,
        "trainer GB": trainer_gb,
        "most GB": max(weights_gb + kv_gb, trainer_gb),  # who takes turns does not have both there
    }


def main(
    asked: Question, num_played: int, num_shown: int, path: Path | None, checked: Sequence[Row] = ()
) -> int:
    """Search, print the best plans, what if the tail doubles, and how far forecasts are off."""
    check_files(path)
    plans = sorted(followed(asked, num_played), key=lambda plan: -plan.tokens_per_s)
    first = {plan.setup.layout.policy: plan for plan in reversed(plans)}
    listed = [plan for k, plan in enumerate(plans) if k < num_shown or plan in first.values()]
    best, rows = plans[0], [row_of(plan) for plan in listed]
    show(rows)
    print(f"\n{bars(rows)}\n")
    heavy = heavier(best)
    print(
        f"If the 99th percentile of answers doubles, the best plan steps in {heavy['step_s']:,.0f} s in "
        f"place of {best.figures['step_s']:,.0f} and trains {heavy['tokens_per_s']:,.0f} tokens/s.\n"
        f"{stated(checked)}"
    )
    if path is not None:
        written = {"rows": rows, "tail_doubled": heavy, "calibration": [*checked]}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


def followed(asked: Question, num_played: int) -> list[Plan]:
    """The search, with a progress bar, and a line for each plan that is better than those before."""
    found: list[Plan] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("playing", total=num_played)
        for plan in search(asked, num_played):
            if plan.tokens_per_s > max((one.tokens_per_s for one in found), default=0.0):
                progress.console.print(
                    f"best so far: {name(row_of(plan))}, {plan.tokens_per_s:,.0f} tokens/s"
                )
            found.append(plan)
            progress.advance(task)
    return found


def bars(rows: Sequence[Row]) -> str:
    """Plans by their tokens a second, the first the best."""
    best, lines = float(rows[0]["tokens/s"]), []
    for row in rows:
        speed = float(row["tokens/s"])
        lines.append(f"{name(row):>36} {'█' * max(1, round(BAR * speed / best))} {speed:,.0f}")
    return "\n".join(lines)


def name(row: Row) -> str:
    """A plan in a few words: its policy and bound, trainer + rollout devices, sizes and rows of an engine."""
    sizes = f"TP{row['TP']}" if row["EP"] == 1 else f"TP{row['TP']} EP{row['EP']}"
    return f"{row['policy']} S={row['S']} {row['trainer']}+{row['rollout']} {sizes} x{row['rows']}"
