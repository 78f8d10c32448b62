"""A run that serves 64 clients for five minutes, while one call in twenty is malformed.

The clients run episodes of the demo's task, read status, versions, engines and metrics, and send malformed
calls. Afterwards the run is stopped and audited: every acknowledged reward must be in the run folder, every
response must have an expected status, and none may have a status of 500 or more.

    python benchmarks/serve.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from serve_traffic import CallStats, send_traffic

from dora.audit import audit
from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "agents.toml"
NUM_CLIENTS = 64
CHANGES = {
    "run.steps": 100_000,
    "engine.max_num_seqs": 32,
    "engine.min_step_time": "8ms",  # leaves cores to the service, as an accelerator would
    "reward.max_failed_fraction": 0.9,
}
SETTLE_S = 3.0  # until the last acknowledged reward is durable


def start(out: Path, log: Path, example: Path = EXAMPLE, **more: object) -> subprocess.Popen[bytes]:
    """Start `dora serve`; returns once the service accepts calls. `more`: overrides, "." written as "__"."""
    command = [
        sys.executable,
        "-c",
        "from dora.cli.main import main; main()",
        "serve",
        str(example),
        "--out",
        str(out),
    ]
    for key, value in (CHANGES | {key.replace("__", "."): value for key, value in more.items()}).items():
        command += ["--set", f"{key}={value}"]
    with log.open("wb") as file:
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    deadline_s = time.monotonic() + 60
    while not (out / "service.json").exists():
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)
    return run


def stop(run: subprocess.Popen[bytes]) -> None:
    """Stop the run as Ctrl-C does, after the last acknowledged reward is durable."""
    time.sleep(SETTLE_S)
    run.send_signal(signal.SIGINT)
    code = run.wait(timeout=120)
    assert code == 130, f"the run ended with {code}"


def lost_rewards(out: Path, stats: CallStats) -> list[str]:
    """Acknowledged rewards that the run folder does not have as posted, except those of failed groups."""
    with sqlite3.connect(f"file:{out / 'samples.sqlite'}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT group_id, sibling, version, reward FROM samples").fetchall()
    stored = {(group, sibling, version): reward for group, sibling, version, reward in rows}
    records = map(json.loads, (out / "journal.jsonl").read_text().splitlines()[1:])
    failed = {"/".join(map(str, record["group"])) for record in records if record["kind"] == "fail"}
    return [
        f"{key}: posted {reward}, stored {stored.get(key)}"
        for key, reward in stats.rewards.items()
        if stored.get(key) != reward and key[0] not in failed
    ]


def row_of(kind: str, seconds: list[float]) -> Row:
    """Latency of one kind of calls."""
    percentiles = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    return {
        "kind": kind,
        "calls": len(seconds),
        "p50_ms": 1e3 * percentiles[49],
        "p99_ms": 1e3 * percentiles[98],
        "max_ms": 1e3 * max(seconds),
    }


def main() -> None:
    options = parse_options(str(__doc__))
    seconds = 20.0 if options.quick else 300.0
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        run = start(out, log)
        try:
            address = (out / "service.json").read_text()
            stats = asyncio.run(send_traffic(address, NUM_CLIENTS, seconds))
            memory = psutil.Process(run.pid).memory_info().rss
            stop(run)
        except BaseException:
            print(log.read_text())
            raise
        finally:
            run.kill()
        summary = json.loads((out / "summary.json").read_text())
        verdict, missing = audit.check(out), lost_rewards(out, stats)
        log_text = log.read_text()
    for problem in [*stats.wrong[:20], *missing[:20]]:
        print(problem)
    for reason, num in stats.ended.items():
        print(f"{num} sessions ended early: {reason}")
    assert "Traceback" not in log_text, log_text
    assert (verdict.c1, verdict.c2, verdict.c3) == (True, True, True)
    rows: list[Row] = [row_of(kind, times) for kind, times in sorted(stats.seconds.items())]
    publish(
        options,
        rows,
        {
            "clients": NUM_CLIENTS,
            "seconds": seconds,
            "calls": stats.num_calls,
            "malformed_share": stats.num_malformed / stats.num_calls,
            "rewards_acknowledged": len(stats.rewards),
            "rewards_lost": len(missing),
            "wrong_answers": len(stats.wrong),
            "answers_of_500_or_more": sum(n for status, n in stats.statuses.items() if status >= 500),
            "steps_trained": summary["steps"],
            "driver_memory_mb": memory / 1e6,
        },
    )


if __name__ == "__main__":
    main()
