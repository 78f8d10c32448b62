"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator in virtual time.

`fitted` rows are those that the unknown inputs were fitted on; other rows with a printed figure are
predictions; an error is the forecast over that figure, less 1. Each is played in part, with as much of the
batch as of the devices: colocated rows and sweeps a quarter, splits half, and whole at the end. See
docs/paper.md. With --quick one row of each kind is played, with inputs of the last fit.

    python benchmarks/paper.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache

from report import Row, parse_options, publish

from dora.runtime.garbage import no_pauses
from dora.sim.forecast import fit, paper
from dora.sim.forecast.cluster import Setup
from dora.sim.forecast.fit import Figures

LAST = fit.Fitted(0.2242, 144.9, 0.0183, 3, 0.194)  # of paper.json


@cache
def play(setup: Setup) -> Figures:
    with no_pauses():
        found, layout = setup.figures(), setup.layout
    who = f"{layout.policy} S = {layout.max_staleness}, {layout.train[1]} of {layout.num_devices}"
    print(f"{who}: {found['step_s']:.0f} s, {found['exposed_s']:.0f} s exposed", file=sys.stderr, flush=True)
    return found


def few() -> list[Row]:
    """A synchronous row and DORA's at 128 GPUs, from a quarter and a half."""
    sync = fit.colocated(play, LAST, "sync", 128)
    dora = fit.in_part(play, Setup(LAST.job, fit.layout_of("dora", 2, 128, 80), 11), 2)
    return [*paper.compared("sync", 128, 0, 128, sync), *paper.compared("dora", 128, 2, 80, dora)]


def main() -> None:
    options = parse_options(str(__doc__))
    with ProcessPoolExecutor(2) as pool:
        rows = few() if options.quick else paper.everything(play, pool.map)
    errors = {
        f"error_{row['policy']}_S{row['S']}_{row['gpus']}_{row['metric']}": float(row["error"])
        for row in rows
        if row.get("policy") == "dora" and row.get("metric") in ("step_min", "tokens_per_s")
    }
    publish(options, rows, errors)


if __name__ == "__main__":
    main()
