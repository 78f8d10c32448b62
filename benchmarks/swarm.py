"""Violations and deadlocks in thousands of random worlds, and the CPU time per event.

Each seed is a whole configuration with faults. An independent checker follows every event and action, and the
whole state of the orchestrator is recomputed every 40 events. Failures are printed with their seed.

python benchmarks/swarm.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys

from report import Row, parse_options, publish


def main() -> None:
    options = parse_options(str(__doc__))
    num_seeds = 2_000 if options.quick else 20_000
    command = [sys.executable, "-m", "dora", "simulate", "swarm", "--seeds", str(num_seeds), "--json"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    *failures, summary = run.stdout.splitlines()
    for failure in failures:
        print(failure)
    row: Row = {
        key: value for key, value in json.loads(summary).items() if not isinstance(value, list | dict)
    }
    ratios = {
        "violations": float(row["violations"]),
        "deadlocks": float(row["deadlocks"]),
        "median_events_per_world": float(row["median_events_per_world"]),
        "events_per_cpu_s": float(row["events"]) / float(row["cpu_s"]),
    }
    publish(options, [row], ratios)


if __name__ == "__main__":
    main()
