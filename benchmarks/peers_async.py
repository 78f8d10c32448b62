"""DORA and TRL's AsyncGRPOTrainer, both on vLLM for the CPU: how much is trained, and how much is lost.

The demo's task, as in `peers.py`: the same model, prompts, reward, groups, batches, schedule and bound S, one
vLLM server for each, one thread per process. One after the other on the same cores. Rates
leave out starts and the first steps; `discarded` counts answers that were generated and never trained. A peer
that is not there, or fails, has a line that says why. It fails if DORA has discarded an answer, or has broken
its bound.

    python benchmarks/peers_async.py --vllm-python PYTHON [--trl-python PYTHON] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from peers import BEST, figures
from peers_runs import NotMeasured, Peers, Run, Task, run_dora, run_trl, vllm_server

from report import Row, make_parser, options_of, publish

NUM_STEPS, QUICK_STEPS = 60, 12
BOUNDS, QUICK_BOUNDS = (2, 4), (2,)
MAX_ROWS = 256  # of a server, as in peers_runs.py; the bound lets through fewer
ON_VLLM = (
    "engine.backend=vllm",
    "engine.num_engines=1",
    "engine.version_slots=1",
    f"engine.max_num_seqs={MAX_ROWS}",
    "orchestrator.placement=static",
    "orchestrator.prioritize_stragglers=false",
    "runtime.start_timeout_s=900",
)
DORA, TRL = "dora, vLLM", "trl async, vLLM"


def main() -> None:
    parser = make_parser(__doc__ or "")
    here = Path(sys.executable) if find_spec("trl") else None
    help_of_trl = "one that can import trl; with the extra `bench` it is this one"
    parser.add_argument("--trl-python", type=Path, metavar="PYTHON", default=here, help=help_of_trl)
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="one that can import vllm")
    given = parser.parse_args()
    options, peers = options_of(given), Peers(given.trl_python, given.vllm_python)
    task = Task(QUICK_STEPS if options.quick else NUM_STEPS, 1000, 0)  # no model is kept on the way
    with tempfile.TemporaryDirectory() as folder:
        rows = [*compare(task, QUICK_BOUNDS if options.quick else BOUNDS, peers, Path(folder))]
    publish(options, rows, ratios_of(rows))
    if wrong := [row for row in rows if row["system"] == DORA and not is_as_promised(row)]:
        sys.exit(f"DORA has lost answers, or broken its bound: {wrong}")


def compare(task: Task, bounds: Sequence[int], peers: Peers, folder: Path) -> Iterator[Row]:
    """Both at each bound."""
    own: Mapping[str, Callable[[int], Run]] = {
        DORA: lambda bound: run_dora(task, folder / f"dora-{bound}", bound, on_vllm(peers)),
        TRL: lambda bound: with_trl(task, folder / f"trl-{bound}", bound, peers),
    }
    for bound in bounds:
        for name, run in own.items():
            row: dict[str, str | int | float] = {"system": name, "S": bound, "steps": task.num_steps}
            try:
                row |= figures(run(bound), task)
            except NotMeasured as reason:
                row["not_measured"] = str(reason)
            print(json.dumps(row), flush=True)
            yield row


def on_vllm(peers: Peers) -> tuple[str, ...]:
    """What DORA is told to generate with a vLLM server of its own."""
    return (*ON_VLLM, f"engine.options={{python = {json.dumps(str(peers.python('vllm')))}}}")


def with_trl(task: Task, out: Path, bound: int, peers: Peers) -> Run:
    """AsyncGRPOTrainer and its server, of which only the trainer's start counts no time."""
    peers.python("trl")  # before a server comes up for nothing
    with vllm_server(peers, out / "server", 1) as served:
        return run_trl(task, out / "run", served, "async", {**BEST["async"], "max_staleness": bound})


def is_as_promised(row: Row) -> bool:
    """Every answer trained, none of them older than the bound."""
    return "not_measured" not in row and row["discarded"] == 0 and int(row["staleness_max"]) <= int(row["S"])


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """At each bound: what is trained in a second, of CPU time too, DORA over TRL; what is discarded."""
    ratios: dict[str, float] = {}
    for bound in dict.fromkeys(int(row["S"]) for row in rows):
        found = {str(row["system"]): row for row in rows if row["S"] == bound and "not_measured" not in row}
        if DORA in found and TRL in found:
            own, other = (rates_of(found[name]) for name in (DORA, TRL))
            ratios |= {f"{key}_dora_vs_trl_s{bound}": own[key] / other[key] for key in own}
        names = {DORA: "dora", TRL: "trl"}
        ratios |= {
            f"discarded_{names[name]}_s{bound}": float(row["discarded"]) for name, row in found.items()
        }
    return ratios


def rates_of(row: Row) -> dict[str, float]:
    """CPU time is steadier than wall time where others work on the same cores."""
    per_cpu_s = float(row["steps"]) / float(row["cpu_s"])  # batches are of one size
    length = float(row["trained_tokens"])
    return {
        "samples_per_s": float(row["samples_per_s"]),
        "trained_tokens_per_s": float(row["samples_per_s"]) * length,
        "samples_per_cpu_s": per_cpu_s,
        "trained_tokens_per_cpu_s": per_cpu_s * length,
    }


if __name__ == "__main__":
    main()
