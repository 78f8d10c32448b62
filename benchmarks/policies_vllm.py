"""Compare six update policies with vLLM servers as engines, beside DORA-RL's own engines.

The workload is `tail` of `policies.py`, whose forced lengths have a heavy tail, and the measurements are the
same. Unpaced, one engine has all rows and two cores. Paced, there are two engines, and a decode step of each
lasts equally long for one row and for all, as on an accelerator. Both kinds of engines have the same rows.
Policies and kinds of engines take turns.

    python benchmarks/policies_vllm.py --vllm-python PYTHON [--quick] [--rows FILE] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import BREAKS_C1, MIGRATING, ONE_SLOT, UNSTREAMED, Changes, Contender
from policies import Runs, ratios_by_seed, select
from workloads import PACED_TAIL, TAIL, Workload

from report import Row, make_parser, options_of, publish

BOUND = 4
PACE_MS = 20  # of a step; two servers and the trainer share two cores
NUM_SEEDS = 1
BACKENDS = ("dora", "vllm")
TWO_SLOTS: Changes = {"engine.version_slots": 2}
OWN: dict[str, Changes] = {  # by policy
    "sync": {**ONE_SLOT, **UNSTREAMED},
    "one_step": ONE_SLOT,
    "drain": {**ONE_SLOT, "orchestrator.batches_per_version": BOUND + 1},
    "partial": {**TWO_SLOTS, "orchestrator.weight_sync_interval": 3},
    "inflight": TWO_SLOTS,
    "dora": ONE_SLOT,
    "dora, two slots": TWO_SLOTS,
}
BOUNDS = {"sync": 0, "one_step": 1}
QUICK = ("sync", "dora")


@dataclass(frozen=True)
class Backend(Workload):
    """A workload with engines of one kind. The pace of a server is one of its options."""

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        if "engine.backend" in settings:
            settings.pop("engine.min_step_time", None)
        return settings


def workload_on(backend: str, is_paced: bool, vllm_python: Path) -> Backend:
    """`tail` with engines of a backend."""
    base, num_engines = (PACED_TAIL, 2) if is_paced else (TAIL, 1)
    changes: dict[str, object] = {
        **base.changes,
        "engine.num_engines": num_engines,
        "engine.max_num_seqs": 32 // num_engines,
        "orchestrator.prioritize_stragglers": "false",
    }
    if backend == "vllm":
        pace = f", min_step_s = {PACE_MS / 1000}" if is_paced else ""
        changes["engine.backend"] = "vllm"
        changes["engine.options"] = f"{{python = {json.dumps(str(vllm_python))}{pace}}}"
        changes["runtime.start_timeout_s"] = 900
    return Backend(
        base.name, f"{PACE_MS}ms" if is_paced else "none", base.setup_type, base.num_steps, changes
    )


def contender(policy: str, is_paced: bool) -> Contender:
    """A policy at its bound."""
    own = dict(OWN[policy])
    if is_paced and policy not in BREAKS_C1:
        own |= MIGRATING
    return Contender(policy, BOUNDS.get(policy, BOUND), own)


def ratios_of(
    rows: Sequence[Row], workloads: Sequence[tuple[str, Workload]], names: Sequence[str]
) -> dict[str, float]:
    """Trained tokens per second of DORA over those of each other policy with the same engines."""
    ratios = {}
    for backend, workload in workloads:
        own = [row for row in rows if row["engine"] == backend]
        dora = select(own, workload, "dora", BOUND)
        prefix = f"{'paced_' if workload.is_paced else ''}{backend}_"
        for name in names:
            if name != "dora":
                theirs = select(own, workload, name, BOUNDS.get(name, BOUND))
                ratio = statistics.median(ratios_by_seed(dora, theirs, "tokens_per_s"))
                ratios[f"{prefix}dora_over_{name.replace(', ', '_').replace(' ', '_')}"] = ratio
    return ratios


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="PYTHON")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep finished runs in this file, and reuse them"
    )
    given = parser.parse_args()
    options, runs = options_of(given), Runs(given.rows)
    names = QUICK if options.quick else tuple(OWN)
    rows: list[Row] = []
    workloads = []
    for is_paced in (False, True):
        on = [(backend, workload_on(backend, is_paced, given.vllm_python)) for backend in BACKENDS]
        workloads += on
        for seed in range(NUM_SEEDS):
            for name in names:
                for backend, workload in on:
                    row = runs.row(workload, contender(name, is_paced), seed)
                    rows.append({"engine": backend, **row})
    publish(options, rows, ratios_of(rows, workloads, names))


if __name__ == "__main__":
    main()
