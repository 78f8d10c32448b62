"""Layouts of one job side by side: what `dora simulate run` prints.

All are checked before the first is played.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dora.errors import InputError
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.hardware import Device
from dora.sim.forecast.pictures import Timeline, speed_svg, timeline_svg
from dora.sim.forecast.rules import policy_of

WIDTH = 160  # of the table, also where nobody looks
Row = dict[str, str | int | float]
SHOWN = {
    "policy": "policy", "S": "S", "trainer": "trainer", "rollout": "rollout", "step_s": "step s",
    "tokens_per_s": "tokens/s", "exposed": "exposed", "busy_engines": "engines busy",
    "busy_rows": "rows busy", "staleness": "staleness", "staleness_max": "max", "versions": "versions",
    "moves": "moves", "refilled": "refilled", "dropped": "dropped",
}  # fmt: skip


def layouts(
    policies: Sequence[str], bounds: Sequence[int], train: tuple[Device, int], num_rollout: int, base: Layout
) -> Iterator[Layout]:
    """Every policy at its own bound, or at each of `bounds`; colocated ones have all devices for both.

    Raises InputError where what is asked for has no effect on any of them.
    """
    device, num_train = train
    if base.without and "dora" not in policies:
        raise InputError(
            f"without {', '.join(base.without)} is of policy dora, and {', '.join(policies)} are played"
        )
    if all(policy_of(name).is_colocated for name in policies):
        if base.is_elastic or base.rollout:
            raise InputError(f"{', '.join(policies)} share all devices: elastic and rollout would do nothing")
    elif not base.rollout and num_rollout < 1:
        raise InputError(
            f"{num_train + num_rollout} devices leave none for rollout beside {num_train} that train"
        )
    own = {name: policy_of(name).max_staleness for name in policies}
    bounds_of = {name: bounds if bound is None else [bound] for name, bound in own.items()}
    asked = [bound for found in bounds_of.values() for bound in found]
    if base.slack and asked and not any(asked):
        raise InputError(f"slack = {base.slack} groups are kept below the bound, and S = 0 has none below it")
    for name in policies:
        policy = policy_of(name)
        for staleness in bounds_of[name]:
            without = base.without if name == "dora" else ()
            one = replace(base, policy=name, max_staleness=staleness, without=without)
            if policy.is_colocated:
                yield replace(one, train=(device, num_train + num_rollout), rollout=(), is_elastic=False)
            else:
                yield replace(one, train=train, rollout=base.rollout or ((device, num_rollout),))


def row_of(setup: Setup) -> Row:
    """One layout's figures, and what it is. Times in seconds, per training step."""
    layout = setup.layout
    return {
        "policy": " - ".join((layout.policy, *layout.without)),
        "S": layout.max_staleness,
        "trainer": layout.train[1],
        "rollout": sum(num for _, num in layout.rollout),
        "rows": setup.num_rows,
        **setup.figures(),
    }


@dataclass(frozen=True)
class Pictures:
    """Files to draw: the last layout's engines over time, and tokens a second against S."""

    timeline: Path | None = None
    plot: Path | None = None

    def draw(self, last: Setup, rows: Sequence[Row]) -> None:
        if self.timeline is not None:
            run = Timeline()
            last.player(run.hear).play()
            title = f"{last.layout.policy}, S = {last.layout.max_staleness}: rows by version"
            self.timeline.write_text(timeline_svg(run, title), encoding="utf-8")
        if self.plot is not None:
            points = [(str(row["policy"]), int(row["S"]), float(row["tokens_per_s"])) for row in rows]
            self.plot.write_text(speed_svg(points), encoding="utf-8")


def check_files(*paths: Path | None) -> None:
    """What is written when all is played must have a place. Raises InputError."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: {path.parent} is no folder")


def check_pictures(*paths: Path | None) -> None:
    """They are drawn as SVG, which a page may have, too. Raises InputError."""
    check_files(*paths)
    for path in filter(None, paths):
        if path.suffix.lower() not in (".svg", ".html"):
            raise InputError(
                f"{path} would be no SVG, as pictures are; name it {path.with_suffix('.svg').name}"
            )


def compare(job: Job, found: Sequence[Layout], num_steps: int, path: Path | None, pictures: Pictures) -> int:
    """Play each, print the table, and write it if asked to."""
    if not found:
        raise InputError("nothing to simulate: give at least one policy and one S")
    check_files(path)
    check_pictures(pictures.timeline, pictures.plot)
    setups = [Setup(job, layout, num_steps) for layout in found]
    for setup in setups:
        setup.check()
    console = Console(stderr=True)
    rows: list[Row] = []
    for setup in setups:
        with console.status(f"{setup.layout.policy}, S = {setup.layout.max_staleness}"):
            rows.append(row_of(setup))
    show([{title: row[key] for key, title in SHOWN.items()} for row in rows])
    pictures.draw(setups[-1], rows)
    if path is not None:
        path.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


def show(rows: Sequence[Row]) -> None:
    """Print rows that have the same columns as a table."""
    table = Table(box=None, pad_edge=False)
    for column, value in rows[0].items():
        table.add_column(column, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(shown, row.values()))
    Console(width=WIDTH).print(table)


def shown(value: str | int | float) -> str:
    """Three digits that count; whole numbers whole."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 or value.is_integer() else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value
