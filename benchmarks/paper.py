"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator in virtual time.

Unknown inputs are fitted to the rows of kind `fitted`. Other rows with a printed figure are predictions;
their error is the forecast over that figure, less 1. Each row is simulated in part, with the same part of the
batch as of the devices: colocated rows and sweeps a quarter, splits a half, and the whole at the end. See
docs/paper-tables.md. --quick simulates one row of each kind, with the inputs of the last fit.

python benchmarks/paper.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache

from paper import fit, tables  # the package beside this script

from dora.planner.cluster import Deployment
from dora.planner.simulator import Metrics
from dora.runtime.run import low_latency
from report import Row, parse_options, publish

LAST_FIT = fit.FittedInputs(0.2242, 144.9, 0.0183, 3, 0.194)  # as in results/paper.json


@cache
def simulate(deployment: Deployment) -> Metrics:
    with low_latency():
        metrics, layout = deployment.metrics(), deployment.layout
    label = f"{layout.policy} S = {layout.max_staleness}, {layout.trainer[1]} of {layout.num_devices}"
    line = f"{label}: {metrics['step_s']:.0f} s, {metrics['exposed_s']:.0f} s exposed"
    print(line, file=sys.stderr, flush=True)
    return metrics


def quick_rows() -> list[Row]:
    """A synchronous row and DORA's at 128 GPUs, from a quarter and a half."""
    sync = fit.simulate_colocated(simulate, LAST_FIT, "sync", 128)
    dora_layout = fit.make_layout("dora", 2, 128, tables.NUM_TRAIN)
    dora = fit.simulate_part(simulate, Deployment(LAST_FIT.workload, dora_layout, 11), 2)
    return [
        *tables.compare("sync", 128, 0, 128, sync),
        *tables.compare("dora", 128, 2, tables.NUM_TRAIN, dora),
    ]


def main() -> None:
    options = parse_options(str(__doc__))
    with ProcessPoolExecutor(2) as pool:
        rows = quick_rows() if options.quick else tables.all_rows(simulate, pool.map)
    errors = {
        f"error_{row['policy']}_S{row['S']}_{row['gpus']}_{row['metric']}": float(row["error"])
        for row in rows
        if row.get("policy") == "dora" and row.get("metric") in ("step_min", "tokens_per_s")
    }
    publish(options, rows, errors)


if __name__ == "__main__":
    main()
