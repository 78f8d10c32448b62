"""What it brings that a trainer lends itself as an engine while it waits: one engine, two cores.

The demo's task with one engine beside the trainer, three ways in turn: the trainer rests while
it waits for its batch (`apart`), it decodes meanwhile (`elastic`), or engine and trainer share
one device in turns (`colocated`).

    python benchmarks/elastic.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from report import Row, parse_options, publish
from rich.console import Console

from dora import settings
from dora.observe import audit
from dora.runtime import run

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
WAYS = {
    "apart": {},
    "elastic": {"trainer.elastic": "true"},
    "colocated": {"orchestrator.placement": "colocated"},
}
COLUMNS = {
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "trainer_idle": "trainer_idle_ratio",
    "busy": "engine_busy_ratio",
    "stall_s": "stall_s",
    "staleness": "staleness_mean",
    "migrations": "migrations",
    "reprefill_tokens": "reprefill_tokens",
}


def measure(way: str, num_steps: int, seed: int) -> Row:
    """One run; its summary in the columns above."""
    changes = {"run.steps": num_steps, "engine.num_engines": 1, "eval.num_prompts": 0, "run.seed": seed}
    config = settings.read(EXAMPLE, [f"{key}={value}" for key, value in (changes | WAYS[way]).items()])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run.train(config, out, Console(quiet=True))
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        verdict = audit.check(out)
    assert verdict.c1
    assert verdict.c2
    assert verdict.c3
    return {"way": way, "seed": seed, "steps": num_steps} | {c: summary[key] for c, key in COLUMNS.items()}


def main() -> None:
    options = parse_options(str(__doc__))
    num_steps, seeds = (20, (0,)) if options.quick else (100, (0, 1, 2))
    rows = [measure(way, num_steps, seed) for seed in seeds for way in WAYS]

    def median(way: str, column: str) -> float:
        return statistics.median(float(row[column]) for row in rows if row["way"] == way)

    ratios = {
        "apart_over_elastic_wall_s": median("apart", "wall_s") / median("elastic", "wall_s"),
        "apart_over_colocated_wall_s": median("apart", "wall_s") / median("colocated", "wall_s"),
        "apart_over_elastic_idle": median("apart", "trainer_idle") / median("elastic", "trainer_idle"),
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
