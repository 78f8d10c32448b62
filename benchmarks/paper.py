"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator in virtual time.

`fitted` rows are those that the unknown inputs were fitted on, and `predicted` ones are not; an error is the
forecast over the printed figure, less 1. Each is played in part, with as much of the batch as of the
devices: colocated rows and sweeps a quarter, splits half, and whole at the end. See
docs/paper.md. With --quick one row of each kind is played, with inputs of the last fit.

    python benchmarks/paper.py [--quick] [--again KINDS] [--json FILE]
"""

from __future__ import annotations

import json
import sys
from functools import cache

from report import Row, make_parser, options_of, publish

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
    parser = make_parser(str(__doc__))
    parser.add_argument(
        "--again", metavar="KINDS", help="play only these anew, by commas; the rest is --json's"
    )
    given = parser.parse_args()
    options = options_of(given)
    if options.quick:
        rows = few()
    elif given.again:
        before = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
        rows = paper.everything(play, given.again.split(","), before)
    else:
        rows = paper.everything(play)
    errors = {
        f"error_{row['policy']}_S{row['S']}_{row['gpus']}_{row['metric']}": float(row["error"])
        for row in rows
        if row.get("policy") == "dora" and row.get("metric") in ("step_min", "tokens_per_s")
    }
    publish(options, rows, errors)


if __name__ == "__main__":
    main()
