"""Record a golden journal again, after a change that alters the orchestrator's actions on purpose.

    python -m tests.golden.record migrations_and_a_killed_engine

Trains the run for about a minute on idle cores, replaces NAME.jsonl.xz beside this file, and prints the
counts for `CONTENT` in `test_golden.py`. Refuses a recording that lacks an event or action of `CONTENT`.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.golden.test_golden import CONTENT, GOLDEN
from tests.runtime.running import Run

from dora.core.codec import to_json
from dora.journal.reader import read_journal

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("gcd.toml", {"run__steps": 48}),
    "migrations_and_a_killed_engine": (
        "gcd.toml",
        {
            "run__steps": 24,
            "trainer__batch_size": 6,
            "sampling__group_size": 6,
            "orchestrator__max_staleness": 3,
            "engine__num_engines": 4,
            "engine__max_num_seqs": 8,
            "engine__version_slots": 1,
            "engine__min_step_time": "8ms",
        },
    ),
    "episodes_with_evaluation": ("calculator/calculator.toml", {"run__steps": 20, "eval__every": 5}),
}


def record(name: str) -> Counter[str]:
    """Train the run named `name`, store its journal, and return how often each kind of record occurs."""
    config, changes = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = Run(EXAMPLES / config, out, **changes)
        try:
            if name == "migrations_and_a_killed_engine":
                run.wait_for_steps(8)
                run.workers()[1].kill()
            ended = run.end()
        finally:
            run.kill_all()
        if ended.code:
            raise SystemExit(ended.err)
        kinds = Counter(str(to_json(line.record)["kind"]) for line in read_journal(out).lines)
        if missing := [kind for kind in CONTENT[name] if not kinds[kind]]:
            raise SystemExit(f"not recorded: the run has no {', '.join(missing)}; repeat it on idle cores")
        (GOLDEN / f"{name}.jsonl.xz").write_bytes(lzma.compress((out / "journal.jsonl").read_bytes()))
        return kinds


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in RUNS:
        raise SystemExit(f"usage: python -m tests.golden.record {{{','.join(RUNS)}}}")
    kinds = record(sys.argv[1])
    print({kind: kinds[kind] for kind in CONTENT[sys.argv[1]]})
