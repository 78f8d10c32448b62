"""DORA and TRL's AsyncGRPOTrainer, both with vLLM on the CPU: throughput, and discarded answers.

The task is the demo's, as in `peers.py`: the same model, prompts, reward, groups, batches, schedule and bound
S, with one vLLM server each and one thread per process. DORA's server holds two versions, or one. The systems
run one after the other on the same cores, with each seed. Rates leave out starts and the first steps.
`discarded` counts answers that were generated and never trained. The row of a peer that is missing or fails
has the reason. The exit code is 1 if DORA has discarded an answer or violated its bound.

    python benchmarks/peers_async.py --vllm-python PYTHON [--trl-python PYTHON] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from peers import BEST, metrics_of
from peers_runs import NotMeasured, Peers, Run, Task, run_dora, run_trl, vllm_server

from report import Row, make_parser, options_of, publish

NUM_STEPS, QUICK_STEPS = 60, 12
NUM_SEEDS = 3
BOUNDS, QUICK_BOUNDS = (2, 4), (2,)
MAX_ROWS = 256  # of a server, as in peers_runs.py; the bound allows fewer requests
ON_VLLM = (
    "engine.backend=vllm",
    "engine.num_engines=1",
    f"engine.max_num_seqs={MAX_ROWS}",
    "orchestrator.placement=static",
    "orchestrator.prioritize_stragglers=false",
    "runtime.start_timeout_s=900",
)
DORA, DORA_ONE, TRL = "dora, vLLM", "dora, vLLM, one version", "trl async, vLLM"
SLOTS = {DORA: 2, DORA_ONE: 1}


def main() -> None:
    parser = make_parser(__doc__ or "")
    Peers.add_options(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds")
    given = parser.parse_args()
    options, peers = options_of(given), Peers(given.trl_python, given.vllm_python)
    rows = list[Row]()
    for seed in range(given.seeds or (1 if options.quick else NUM_SEEDS)):
        # No model is saved during training.
        task = Task(QUICK_STEPS if options.quick else NUM_STEPS, 1000, seed)
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(task, QUICK_BOUNDS if options.quick else BOUNDS, peers, Path(folder))
    publish(options, rows, ratios_of(rows))
    if wrong := [row for row in rows if row["system"] in SLOTS and not is_within_bound(row)]:
        sys.exit(f"DORA has discarded answers or violated its bound: {wrong}")


def compare(task: Task, bounds: Sequence[int], peers: Peers, folder: Path) -> Iterator[Row]:
    """All systems at each bound."""

    def with_dora(num_slots: int, bound: int) -> Run:
        return run_dora(task, folder / f"dora-{num_slots}-{bound}", bound, on_vllm(peers, num_slots))

    own: Mapping[str, Callable[[int], Run]] = {
        **{name: partial(with_dora, num_slots) for name, num_slots in SLOTS.items()},
        TRL: lambda bound: with_trl(task, folder / f"trl-{bound}", bound, peers),
    }
    for bound in bounds:
        for name, run in own.items():
            row: dict[str, str | int | float] = {"system": name, "S": bound, "seed": task.seed}
            row["steps"] = task.num_steps
            try:
                row |= metrics_of(run(bound), task)
            except NotMeasured as reason:
                row["not_measured"] = str(reason)
            print(json.dumps(row), flush=True)
            yield row


def on_vllm(peers: Peers, num_slots: int) -> tuple[str, ...]:
    """Overrides with which DORA generates with its own vLLM server, with slots for `num_slots` versions."""
    return (
        *ON_VLLM,
        f"engine.version_slots={num_slots}",
        f"engine.options={{python = {json.dumps(str(peers.python('vllm')))}}}",
    )


def with_trl(task: Task, out: Path, bound: int, peers: Peers) -> Run:
    """AsyncGRPOTrainer with a vLLM server."""
    peers.python("trl")  # raises before a server is started
    with vllm_server(peers, out / "server", 1) as served:
        return run_trl(task, out / "run", served, "async", {**BEST["async"], "max_staleness": bound})


def is_within_bound(row: Row) -> bool:
    """Whether every answer was trained, and none was staler than the bound."""
    return "not_measured" not in row and row["discarded"] == 0 and int(row["staleness_max"]) <= int(row["S"])


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """Throughput per second of wall and CPU time, DORA over TRL, and discarded answers, at each bound.

    Medians over the seeds.
    """
    ratios, names = dict[str, float](), {DORA: "dora", DORA_ONE: "dora_one_version", TRL: "trl"}
    for bound in dict.fromkeys(int(row["S"]) for row in rows):
        measured = [row for row in rows if row["S"] == bound and "not_measured" not in row]
        found = {name: [row for row in measured if row["system"] == name] for name in names}
        rates = {name: median_rates(runs) for name, runs in found.items() if runs}
        for name in SLOTS.keys() & rates.keys():
            if other := rates.get(TRL):
                ratios |= {
                    f"{key}_{names[name]}_vs_trl_s{bound}": rate / other[key]
                    for key, rate in rates[name].items()
                }
        ratios |= {
            f"discarded_{names[name]}_s{bound}": median(float(row["discarded"]) for row in runs)
            for name, runs in found.items()
            if runs
        }
    return ratios


def median_rates(runs: Sequence[Row]) -> dict[str, float]:
    """Medians of the rates of several runs of a system."""
    rates = [*map(rates_of, runs)]
    return {key: median(each[key] for each in rates) for key in rates[0]}


def rates_of(row: Row) -> dict[str, float]:
    """Rates by wall time and by CPU time, which other load on the cores affects less."""
    per_cpu_s = float(row["steps"]) / float(row["cpu_s"])  # all batches have the same size
    length = float(row["trained_tokens"])
    return {
        "samples_per_s": float(row["samples_per_s"]),
        "trained_tokens_per_s": float(row["samples_per_s"]) * length,
        "samples_per_cpu_s": per_cpu_s,
        "trained_tokens_per_cpu_s": per_cpu_s * length,
    }


if __name__ == "__main__":
    main()
