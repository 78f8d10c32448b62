"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator in virtual time.

`fitted` rows are those that the unknown inputs were fitted on, and `predicted` ones are not; an error is the
forecast over the printed figure, less 1. Each is played in part, with as much of the batch as of the
devices: colocated rows and sweeps a quarter, others half. See docs/paper.md. With --quick one
row of each kind is played, with inputs of the last fit.

    python benchmarks/paper.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from functools import cache

from report import Row, parse_options, publish

from dora.runtime.garbage import no_pauses
from dora.sim.forecast import fit, paper
from dora.sim.forecast.cluster import Setup
from dora.sim.forecast.fit import Figures

LAST = {"step_s": 0.016, "train": 0.224, "train_s": 145.0, "alike": 0.6}


@cache
def play(setup: Setup) -> Figures:
    with no_pauses():
        found, layout = setup.figures(), setup.layout
    who = f"{layout.policy} S = {layout.max_staleness}, {layout.train[1]} of {layout.num_devices}"
    print(f"{who}: {found['step_s']:.0f} s, {found['exposed_s']:.0f} s exposed", file=sys.stderr, flush=True)
    return found


def few() -> list[Row]:
    """A synchronous row and DORA's, at 64 GPUs."""
    job = fit.job_with(**LAST)
    sync = fit.colocated(play, job, "sync", 64)
    dora = fit.in_part(play, Setup(job, fit.layout_of("dora", 2, 64, 48), 9), 4)
    return [*paper.compared("sync", 64, 0, 64, sync), *paper.compared("dora", 64, 2, 48, dora)]


def main() -> None:
    options = parse_options(str(__doc__))
    if options.quick:
        rows = few()
    else:
        found = paper.everything(play)
        rows = [{"kind": kind, **row} for kind, own in found.items() for row in own]
    errors = {
        f"{row['policy']}_S{row['S']}_{row['gpus']}_{row['metric']}": float(row["error"])
        for row in rows
        if row.get("policy") == "dora" and row.get("metric") in ("step_min", "tokens_per_s")
    }
    publish(options, rows, {f"error_{name}": error for name, error in errors.items()})


if __name__ == "__main__":
    main()
