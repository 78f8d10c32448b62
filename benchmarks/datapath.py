"""The way of a response through the driver: from its engine to the trainer, and its reward.

A run of the demo without evaluation, whose driver counts the bytes and messages that pass through it, the
transactions of the sample store and its own CPU time. `reward_to_event_ms` is the time from the last reward
of a group to its event. `reward_to_train_ms` is that to `Train`, for steps that waited for this reward only.
Figures are per trained response, from the first step to the last.

    python benchmarks/datapath.py --json benchmarks/results/datapath.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from finished_run import audited_summary

from report import Row, parse_options, publish

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
GROUP_SIZE, BATCH_SIZE = 8, 8
CONFIG = """\
[run]
steps = {steps}
seed = {seed}
[model]
path = "{model}"
[data]
path = "gcd"
max_prompt_length = 8
[sampling]
group_size = {group_size}
max_response_length = 400
[engine]
num_engines = 2
max_num_seqs = 16
[reward]
function = "datapath_child:reward"
[algorithm]
filter_groups = false
[trainer]
batch_size = {batch_size}
lr = 2e-4
micro_batch_tokens = 1024
[orchestrator]
update_policy = "{policy}"
max_staleness = 2
"""
COUNTS = ("pipe_bytes", "socket_bytes", "block_bytes", "sqlite_bytes")
PER_GROUP = ("messages", "socket_messages", "transactions")


def run(policy: str, seed: int, steps: int) -> Row:
    """One run: the figures of its driver."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, out, report = folder / "config.toml", folder / "run", folder / "report.json"
        model = EXAMPLES / "gcd-start"
        config.write_text(
            CONFIG.format(
                steps=steps,
                seed=seed,
                model=model,
                group_size=GROUP_SIZE,
                batch_size=BATCH_SIZE,
                policy=policy,
            ),
            encoding="utf-8",
        )
        times = folder / "rewards.txt"
        path = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            [sys.executable, str(HERE / "datapath_child.py"), str(config), str(out), str(report)],
            env=os.environ | {"DATAPATH_REWARDS": str(times), "PYTHONPATH": path},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        summary = audited_summary(out)
        found = json.loads(report.read_text(encoding="utf-8"))
        rewarded = [float(line) for line in times.read_text(encoding="utf-8").splitlines()]
    trains, scored = found["trains"], found["scored"]
    last_rewards = rewarded[GROUP_SIZE - 1 :: GROUP_SIZE]  # one worker scores the groups in turn
    to_event = [1e3 * (event_s - known_s) for known_s, event_s in zip(last_rewards, scored, strict=False)]
    to_train = [
        1e3 * (now_s - max(known_s for known_s in last_rewards if known_s < now_s))
        for now_s, _, is_due, _ in trains
        if is_due
    ]
    num_answers = (len(trains) - 1) * BATCH_SIZE * GROUP_SIZE
    first, last = trains[0], trains[-1]
    counts = {name: last[3].get(name, 0) - first[3].get(name, 0) for name in (*COUNTS, *PER_GROUP)}
    return {
        "policy": policy,
        "seed": seed,
        "driver_cpu_ms": 1e3 * (last[1] - first[1]) / num_answers,
        "reward_to_event_ms": statistics.median(to_event),
        "reward_to_train_ms": statistics.median(to_train) if to_train else float("nan"),
        "step_ms": 1e3 * statistics.median(b[0] - a[0] for a, b in pairwise(trains)),
        "tokens_per_s": summary["tokens_per_s"],
        **{name: counts[name] / num_answers for name in COUNTS},
        **{f"{name}_per_group": counts[name] / num_answers * GROUP_SIZE for name in PER_GROUP},
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    steps = 40 if options.quick else 150
    rows = [run("dora", seed, steps) for seed in ((0,) if options.quick else (0, 1, 2))]
    names = [name for name in rows[0] if name not in ("policy", "seed")]
    ratios = {name: statistics.median(float(row[name]) for row in rows) for name in names}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
