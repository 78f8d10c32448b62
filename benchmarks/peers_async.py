"""DORA and TRL's AsyncGRPOTrainer, both with vLLM on the CPU: throughput, and discarded answers.

The task is the demo's, as in `peers.py`: the same model, prompts, reward, groups, batches, schedule and bound
S, with one vLLM server each and one thread per process. The systems run one after the other on the same
cores. Rates leave out starts and the first steps. `discarded` counts answers that were generated and never
trained. The row of a peer that is missing or fails has the reason. The exit code is 1 if DORA has discarded
an answer or violated its bound.

    python benchmarks/peers_async.py --vllm-python PYTHON [--trl-python PYTHON] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from peers import BEST, metrics_of
from peers_runs import NotMeasured, Peers, Run, Task, run_dora, run_trl, vllm_server

from report import Row, make_parser, options_of, publish

NUM_STEPS, QUICK_STEPS = 60, 12
BOUNDS, QUICK_BOUNDS = (2, 4), (2,)
MAX_ROWS = 256  # of a server, as in peers_runs.py; the bound allows fewer requests
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
    help_of_trl = "an interpreter that can import trl; by default this one, if it has the extra `bench`"
    parser.add_argument("--trl-python", type=Path, metavar="PYTHON", default=here, help=help_of_trl)
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PYTHON", help="an interpreter that can import vllm"
    )
    given = parser.parse_args()
    options, peers = options_of(given), Peers(given.trl_python, given.vllm_python)
    task = Task(QUICK_STEPS if options.quick else NUM_STEPS, 1000, 0)  # no model is saved during training
    with tempfile.TemporaryDirectory() as folder:
        rows = [*compare(task, QUICK_BOUNDS if options.quick else BOUNDS, peers, Path(folder))]
    publish(options, rows, ratios_of(rows))
    if wrong := [row for row in rows if row["system"] == DORA and not is_within_bound(row)]:
        sys.exit(f"DORA has discarded answers or violated its bound: {wrong}")


def compare(task: Task, bounds: Sequence[int], peers: Peers, folder: Path) -> Iterator[Row]:
    """Both systems at each bound."""
    own: Mapping[str, Callable[[int], Run]] = {
        DORA: lambda bound: run_dora(task, folder / f"dora-{bound}", bound, on_vllm(peers)),
        TRL: lambda bound: with_trl(task, folder / f"trl-{bound}", bound, peers),
    }
    for bound in bounds:
        for name, run in own.items():
            row: dict[str, str | int | float] = {"system": name, "S": bound, "steps": task.num_steps}
            try:
                row |= metrics_of(run(bound), task)
            except NotMeasured as reason:
                row["not_measured"] = str(reason)
            print(json.dumps(row), flush=True)
            yield row


def on_vllm(peers: Peers) -> tuple[str, ...]:
    """Overrides with which DORA generates with its own vLLM server."""
    return (*ON_VLLM, f"engine.options={{python = {json.dumps(str(peers.python('vllm')))}}}")


def with_trl(task: Task, out: Path, bound: int, peers: Peers) -> Run:
    """AsyncGRPOTrainer with a vLLM server."""
    peers.python("trl")  # raises before a server is started
    with vllm_server(peers, out / "server", 1) as served:
        return run_trl(task, out / "run", served, "async", {**BEST["async"], "max_staleness": bound})


def is_within_bound(row: Row) -> bool:
    """Whether every answer was trained, and none was staler than the bound."""
    return "not_measured" not in row and row["discarded"] == 0 and int(row["staleness_max"]) <= int(row["S"])


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """Throughput per second of wall and CPU time, DORA over TRL, and discarded answers, at each bound."""
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
