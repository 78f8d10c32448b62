"""Six update policies side by side: same engine, trainer, model, prompts, lengths and number of cores.

Three workloads (`workloads.py`), as fast as two cores go, and with engines paced like accelerators, whose
step takes as long for one row as for all; every policy (`contenders.py`) has its own best settings. Policies
run in turn, so that a busy machine disturbs all alike. Figures are of the steps between the first few and
those in which nothing is admitted any more; every comparison names both bounds S. A ladder, not in --quick,
adds DORA's parts to `sync` one by one. With --rows, finished runs are kept in a file, and the next call takes
them from there.

    python benchmarks/policies.py [--quick] [--search] [--rows FILE] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import (
    BOUNDS,
    BREAKS_C1,
    CHOICES,
    FIXED,
    RIVALS,
    Contender,
    contender,
    entrants,
    is_free,
    parts,
)
from report import Row, make_parser, options_of, publish
from rich.console import Console
from workloads import DEMO, EXAMPLE, LIGHT, PACED_TAIL, TAIL, WORKLOADS, Workload, shape_of

from dora import settings
from dora.observe import audit
from dora.runtime import run

SKIPPED = 5  # steps at the beginning, in which the pipeline fills
ENDING = 5  # steps at the end: with S = 4 nothing is admitted any more
WINDOW = 5  # steps over which sampled accuracy is averaged


class Runs:
    """Makes runs, each once: those in the file are taken from there."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._found = path, dict[str, dict[str, Any]]()
        if path and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._found = {line["key"]: line["row"] for line in map(json.loads, lines)}

    def row(self, workload: Workload, who: Contender, seed: int) -> dict[str, Any]:
        """One run's figures."""
        key = json.dumps([workload.name, workload.settings(), who.settings(), seed])
        if key not in self._found:
            self._found[key] = measure(workload, who, seed)
            if self._path:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "row": self._found[key]}) + "\n")
        return self._found[key]


def measure(workload: Workload, who: Contender, seed: int) -> dict[str, Any]:
    """One run, in the columns of the tables. Raises AssertionError where a guarantee is broken."""
    changes = {**workload.settings(), **who.settings(), "run.seed": seed}
    config = settings.read(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run.train(config, out, Console(quiet=True), workload.plan)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        verdict = audit.check(out)
    assert verdict.c1 or who.name in BREAKS_C1
    assert verdict.c2
    assert verdict.c3
    steps = [json.loads(line) for line in lines]
    return {
        **named(workload, who, seed),
        **figures(steps),
        "to_accuracy_s": seconds_to(steps, workload.accuracy),
        "staleness_max": summary["staleness_max"],
        "migrations": summary["migrations"],
        "reprefilled": summary["reprefill_tokens"],
        "regenerated": summary["regenerated_tokens"],
        "discarded": summary["aborted_tokens"],
    }


def named(workload: Workload, who: Contender, seed: int) -> dict[str, Any]:
    """The columns that say what a row is of."""
    own = {"policy": who.name, "S": who.max_staleness, "seed": seed}
    return {"workload": workload.name, "pace": workload.pace, **own}


def figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the steps in the middle; times are seconds of a step.

    Exposed is what a step lasts beyond the trainer's work, early gradients included.
    """
    inner = steps[SKIPPED : len(steps) - ENDING]
    took_s = inner[-1]["t_s"] - steps[SKIPPED - 1]["t_s"]

    def total(key: str) -> float:
        return sum(step[key] for step in inner)

    def mean(key: str) -> float:
        """Steps count by their time."""
        return sum(step[key] * step["timing_s/step"] for step in inner) / total("timing_s/step")

    exposed_s = max(0.0, took_s - total("timing_s/update_actor") - total("timing_s/publish"))
    return {
        "tokens_per_s": total("tokens") / took_s,
        "step_s": took_s / len(inner),
        "occupancy": mean("rollout/busy_ratio"),
        "stall_s": total("timing_s/stall") / len(inner),
        "exposed_s": exposed_s / len(inner),
        "trainer_idle": exposed_s / took_s,
        "versions": mean("rollout/num_versions"),
        "staleness": total("staleness/mean") / len(inner),
    }


def seconds_to(steps: Sequence[Mapping[str, float]], accuracy: float | None) -> float | str:
    """When the accuracy of sampled answers, over a few steps, first was so high; "-": never, or not asked."""
    if accuracy is not None:
        rewards = [step["reward/mean"] for step in steps]
        for end in range(WINDOW, len(steps) + 1):
            if statistics.fmean(rewards[end - WINDOW : end]) >= accuracy:
                return steps[end - 1]["t_s"]
    return "-"


def of(rows: Iterable[Row], workload: Workload, name: str, max_staleness: int) -> list[Row]:
    """The repeats of one contender."""
    wanted = {"workload": workload.name, "pace": workload.pace, "policy": name, "S": max_staleness}
    return [row for row in rows if wanted.items() <= dict(row).items()]


def median(rows: Iterable[Row], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def compare(rows: Sequence[Row], workload: Workload, bounds: Sequence[int]) -> list[Row]:
    """How many times as many tokens `dora` trains as each rival, by its own bound or at the same one."""
    found: list[Row] = []
    for bound in bounds:
        speed = median(of(rows, workload, "dora", bound), "tokens_per_s")
        for rival, own in {name: RIVALS[name] if name in FIXED else bound for name in RIVALS}.items():
            if others := of(rows, workload, rival, own):
                both = {"dora S": bound, "rival": rival, "rival S": own}
                ratio = speed / median(others, "tokens_per_s")
                found.append(
                    {"workload": workload.name, "pace": workload.pace, **both, "dora over rival": ratio}
                )
    return found


def climb(runs: Runs, workload: Workload) -> list[Row]:
    """The ladder: what each part gains over the ones before it."""
    speeds = {part: runs.row(workload, who, 0)["tokens_per_s"] for part, who in parts(workload).items()}
    found: list[Row] = []
    before = base = speeds["sync"]
    for part, speed in speeds.items():
        row = {"workload": workload.name, "pace": workload.pace, "part": part, "tokens_per_s": speed}
        found.append({**row, "gain": speed / before, "over sync": speed / base})
        before = speed
    return found


def search(runs: Runs, workload: Workload) -> list[Row]:
    """Try each policy's free settings one after another, keeping the faster value; every try is a row."""
    found: list[Row] = []
    for name, bound in {**RIVALS, "dora": 4}.items():
        best, speed = contender(workload, name, bound), 0.0
        tries = {"as it is": ("",)} | {key: vs for key, vs in CHOICES.items() if is_free(workload, name, key)}
        for key, value in ((key, value) for key, values in tries.items() for value in values):
            who = Contender(name, bound, {**best.own, **({key: value} if value else {})})
            tokens_per_s = runs.row(workload, who, 0)["tokens_per_s"]
            row = {"workload": workload.name, "pace": workload.pace, "policy": name, "S": bound}
            found.append({**row, "setting": key, "value": str(value), "tokens_per_s": tokens_per_s})
            if tokens_per_s > speed:
                best, speed = who, tokens_per_s
    return found


def headline(rows: Sequence[Row], workload: Workload, prefix: str) -> dict[str, float]:
    """`dora` at S = 4 over each rival at the bound in `RIVALS`, and what it leaves idle."""
    dora = of(rows, workload, "dora", 4)
    ratios = {
        f"{prefix}dora_vs_{rival.replace(', ', '_')}": median(dora, "tokens_per_s")
        / median(of(rows, workload, rival, bound), "tokens_per_s")
        for rival, bound in RIVALS.items()
    }
    exposed_s = median(of(rows, workload, "sync", 0), "exposed_s")
    ratios[f"{prefix}sync_over_dora_exposed_s"] = exposed_s / max(1e-3, median(dora, "exposed_s"))
    ratios[f"{prefix}occupancy_dora"] = median(dora, "occupancy")
    return ratios


def main() -> None:
    parser = make_parser(str(__doc__))
    parser.add_argument("--search", action="store_true", help="try the free settings of each policy instead")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep finished runs here, and use them")
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
        runs.row(workload, who, seed)
        for seed in range(most)
        for workload in workloads
        for who in (entrants(workload, bounds) if seed < workload.num_repeats else ())
    ]
    compared = [row for workload in workloads for row in compare(rows, workload, bounds)]
    ratios = {**headline(rows, TAIL, ""), **headline(rows, PACED_TAIL, "paced_")}
    if not options.quick:
        ratios |= {**headline(rows, LIGHT, "light_"), **headline(rows, DEMO, "demo_")}
    shapes = [shape_of(workload) for workload in (TAIL, LIGHT)]
    climbed = [] if options.quick else climb(runs, PACED_TAIL)
    publish(options, [*shapes, *rows, *compared, *climbed], ratios)


if __name__ == "__main__":
    main()
