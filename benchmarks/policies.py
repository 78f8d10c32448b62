"""Compare six update policies with the same engine, trainer, model, prompts, lengths and number of cores.

There are three workloads (`workloads.py`). They run at the full speed of two cores, and with engines paced
like accelerators, whose decode step lasts equally long for one row and for all. Every policy
(`contenders.py`) has its own best settings, which --search finds. Policies take turns, so that other load on
the machine affects them equally, and ratios compare runs with the same seed. Measurements leave out the first
steps and the last ones, in which nothing is admitted any more. Every comparison names both bounds S. The pace
applies to decoding only: the KV that `partial` recomputes costs time of a core, which the trainer may need.
An ablation, not in --quick, adds DORA's parts to `sync` one by one. With --rows, finished runs are kept in a
file for the next call.

    python benchmarks/policies.py [--quick] [--search] [--rows FILE] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import (
    BOUNDS,
    BREAKS_C1,
    FIXED,
    OTHERS,
    RIVALS,
    Contender,
    choices,
    contenders_for,
    parts,
)
from finished_run import metrics_of, summary_of
from rich.console import Console
from workloads import DEMO, EXAMPLE, LIGHT, PACED_TAIL, TAIL, WORKLOADS, Workload, shape_of

from dora.audit import audit
from dora.config import load
from dora.runtime import run
from report import Row, git, make_parser, options_of, publish

SKIPPED = 5  # first steps, in which the pipeline fills
ENDING = 5  # last steps, in which nothing is admitted any more with S = 4
WINDOW = 5  # steps over which sampled accuracy is averaged
NUM_TRIES = 2  # runs of each choice with --search
RESOLUTION_S = 0.01  # lower limit of the exposed time of a step, in ratios


class Runs:
    """Executes each run once; reuses the runs in the file."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._found = path, dict[str, dict[str, Any]]()
        if path and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._found = {line["key"]: line["row"] for line in map(json.loads, lines)}

    def row(self, workload: Workload, contender: Contender, seed: int) -> dict[str, Any]:
        """The measurements of one run."""
        key = json.dumps([workload.name, workload.settings(), contender.settings(), seed])
        if key not in self._found:
            self._found[key] = measure(workload, contender, seed)
            if self._path:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "row": self._found[key]}) + "\n")
        return self._found[key]


def measure(workload: Workload, contender: Contender, seed: int) -> dict[str, Any]:
    """One run as a row of the tables. Raises AssertionError if a guarantee is violated."""
    changes = {**workload.settings(), **contender.settings(), "run.seed": seed}
    config = load.read_config(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run.train(config, out, Console(quiet=True), workload.setup_type)
        summary, steps = summary_of(out), metrics_of(out)
        verdict = audit.check(out)
    assert verdict.c1 or contender.name in BREAKS_C1
    assert verdict.c2
    assert verdict.c3
    return {
        **identity(workload, contender),
        "settings": contender.settings_text(),
        "seed": seed,
        "git": git(),
        **figures(steps),
        "versions": summary["live_versions_mean"],
        "to_accuracy_s": seconds_to(steps, workload.accuracy),
        "staleness_max": summary["staleness_max"],
        "migrations": summary["migrations"],
        "reprefilled": summary["reprefill_tokens"],
        "regenerated": summary["regenerated_tokens"],
        "discarded": summary["aborted_tokens"],
    }


def identity(workload: Workload, contender: Contender) -> dict[str, Any]:
    """The columns that identify what a row measures."""
    return {
        "workload": workload.name,
        "pace": workload.pace,
        "policy": contender.name,
        "S": contender.max_staleness,
    }


def figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the steps in the middle; times are seconds per step.

    Exposed time is a step's duration without the trainer's work, early gradients included.
    """
    inner = steps[SKIPPED : len(steps) - ENDING]
    total_s = inner[-1]["t_s"] - steps[SKIPPED - 1]["t_s"]

    def total(key: str) -> float:
        return sum(step[key] for step in inner)

    def mean(key: str) -> float:
        """Weighted by the duration of the steps."""
        return sum(step[key] * step["timing_s/step"] for step in inner) / total("timing_s/step")

    exposed_s = max(0.0, total_s - total("timing_s/update_actor") - total("timing_s/publish"))
    return {
        "tokens_per_s": total("num_response_tokens") / total_s,
        "step_s": total_s / len(inner),
        "occupancy": mean("rollout/utilization"),
        "stall_s": total("timing_s/stall") / len(inner),
        "exposed_s": exposed_s / len(inner),
        "trainer_idle": exposed_s / total_s,
        "update_s": total("timing_s/update_actor") / len(inner),
        "staleness": total("staleness/mean") / len(inner),
    }


def seconds_to(steps: Sequence[Mapping[str, float]], accuracy: float | None) -> float | str:
    """When the moving average of sampled accuracy first reached `accuracy`; "-": never, or it is None."""
    if accuracy is not None:
        rewards = [step["reward/mean"] for step in steps]
        for end in range(WINDOW, len(steps) + 1):
            if statistics.fmean(rewards[end - WINDOW : end]) >= accuracy:
                return steps[end - 1]["t_s"]
    return "-"


def select(rows: Iterable[Row], workload: Workload, name: str, max_staleness: int) -> dict[int, Row]:
    """The runs of one contender, by seed."""
    wanted = {"workload": workload.name, "pace": workload.pace, "policy": name, "S": max_staleness}
    return {int(row["seed"]): row for row in rows if wanted.items() <= dict(row).items()}


def ratios_by_seed(ours: Mapping[int, Row], theirs: Mapping[int, Row], column: str) -> list[float]:
    """Ours over theirs for each seed that has both numbers, sorted."""
    pairs = [(ours[seed][column], theirs[seed][column]) for seed in ours.keys() & theirs.keys()]
    return sorted(float(a) / float(b) for a, b in pairs if a != "-" and b != "-")


def compare(rows: Sequence[Row], workload: Workload, bounds: Sequence[int]) -> list[Row]:
    """DORA's trained tokens per second over each rival's, at the rival's own bound or the same one.

    `sooner` is the rival's time to the workload's accuracy over DORA's, where the workload has one.
    """
    found: list[Row] = []
    for name, bound in [
        *(("dora", bound) for bound in bounds),
        *((name, 4) for name in OTHERS[workload.is_paced]),
    ]:
        ours = select(rows, workload, name, bound)
        for rival, own in {name: RIVALS[name] if name in FIXED else bound for name in RIVALS}.items():
            theirs = select(rows, workload, rival, own)
            if ratios := ratios_by_seed(ours, theirs, "tokens_per_s"):
                sooner = ratios_by_seed(theirs, ours, "to_accuracy_s")
                found.append({
                    **identity(workload, Contender(name, bound)), "rival": rival, "rival S": own,
                    "faster": statistics.median(ratios), "least": ratios[0], "most": ratios[-1],
                    "sooner": statistics.median(sooner) if sooner else "-",
                })  # fmt: skip
    return found


def ablation(runs: Runs, workload: Workload) -> list[Row]:
    """The gain of each part over the parts before it; medians."""
    seeds = range(workload.num_repeats)
    speeds = {
        part: statistics.median(runs.row(workload, contender, seed)["tokens_per_s"] for seed in seeds)
        for part, contender in parts(workload).items()
    }
    found: list[Row] = []
    before = base = speeds["sync"]
    for (part, speed), contender in zip(speeds.items(), parts(workload).values(), strict=True):
        row = {"part": part, **identity(workload, contender)}
        found.append({**row, "tokens_per_s": speed, "gain": speed / before, "over sync": speed / base})
        before = speed
    return found


def search(runs: Runs, workload: Workload) -> list[Row]:
    """Run all choices of each policy in turn; the best comes first."""
    found: list[Row] = []
    for name in (*RIVALS, "dora"):
        tries = choices(workload, name)
        speeds: list[list[float]] = [[] for _ in tries]
        for seed in range(NUM_TRIES if len(tries) > 1 else 0):
            for contender, own in zip(tries, speeds, strict=True):
                insort(own, runs.row(workload, contender, seed)["tokens_per_s"])
        tried = [
            (statistics.median(own), own, contender)
            for contender, own in zip(tries, speeds, strict=True)
            if own
        ]
        for speed, own, contender in sorted(tried, key=lambda each: each[0], reverse=True):
            settings = contender.settings_text()
            found.append(
                {
                    **identity(workload, contender),
                    "settings": settings,
                    "tokens_per_s": speed,
                    "least": own[0],
                    "most": own[-1],
                }
            )
    return found


def headline(rows: Sequence[Row], workload: Workload, prefix: str) -> dict[str, float]:
    """`dora` at S = 4 over each rival at the bound in `RIVALS`, and its utilisation; medians over seeds."""
    dora = select(rows, workload, "dora", 4)
    theirs = {name: select(rows, workload, name, bound) for name, bound in RIVALS.items()}
    ratios = {
        f"{prefix}dora_vs_{name.replace(', ', '_')}": statistics.median(
            ratios_by_seed(dora, own, "tokens_per_s")
        )
        for name, own in theirs.items()
    }
    exposed_s = statistics.median(float(row["exposed_s"]) for row in theirs["sync"].values())
    own_s = statistics.median(float(row["exposed_s"]) for row in dora.values())
    ratios[f"{prefix}sync_over_dora_exposed_s"] = exposed_s / max(RESOLUTION_S, own_s)
    ratios[f"{prefix}occupancy_dora"] = statistics.median(float(row["occupancy"]) for row in dora.values())
    return ratios


def main() -> None:
    parser = make_parser(str(__doc__))
    parser.add_argument("--search", action="store_true", help="try the free settings of each policy instead")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep finished runs in this file, and reuse them"
    )
    given = parser.parse_args()
    options, runs = options_of(given), Runs(given.rows)
    if given.search:
        publish(options, [row for workload in (TAIL, PACED_TAIL) for row in search(runs, workload)], {})
        return
    workloads = (TAIL, PACED_TAIL) if options.quick else WORKLOADS
    bounds, most = (
        ((4,), 1) if options.quick else (BOUNDS, max(workload.num_repeats for workload in WORKLOADS))
    )
    rows = [
        runs.row(workload, contender, seed)
        for seed in range(most)
        for workload in workloads
        for contender in (contenders_for(workload, bounds) if seed < workload.num_repeats else ())
    ]
    compared = [row for workload in workloads for row in compare(rows, workload, bounds)]
    ratios = {**headline(rows, TAIL, ""), **headline(rows, PACED_TAIL, "paced_")}
    if not options.quick:
        ratios |= {**headline(rows, LIGHT, "light_"), **headline(rows, DEMO, "demo_")}
    shapes = [shape_of(workload) for workload in (TAIL, LIGHT)]
    ablated = [] if options.quick else ablation(runs, PACED_TAIL)
    publish(options, [*shapes, *rows, *compared, *ablated], ratios)


if __name__ == "__main__":
    main()
