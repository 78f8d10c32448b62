"""A run that serves 64 clients for five minutes, while one call in twenty is malformed.

They play the episodes of the demo's task, look at status, versions, engines and metrics, and send what
nobody should. Afterwards the run is stopped and audited: every reward that was acknowledged is in its
record, no call had an answer it should not have had, none a status of 500 or more.

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
from serve_traffic import Tally, load

from dora.audit import audit
from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "agents.toml"
NUM_CLIENTS = 64
CHANGES = {
    "run.steps": 100_000,
    "engine.max_num_seqs": 32,
    "engine.min_step_time": "8ms",  # as an accelerator would leave the cores to others
    "reward.max_failed_fraction": 0.9,
}
SETTLE_S = 3.0  # for what was acknowledged last to be durable


def start(out: Path, log: Path, example: Path = EXAMPLE, **more: object) -> subprocess.Popen[bytes]:
    """A run that is served; returns once it can be asked."""
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
    """As Ctrl-C would, once what was acknowledged last is durable."""
    time.sleep(SETTLE_S)
    run.send_signal(signal.SIGINT)
    code = run.wait(timeout=120)
    assert code == 130, f"the run ended with {code}"


def lost(out: Path, tally: Tally) -> list[str]:
    """Rewards that were acknowledged and are not in the record as posted, though their group did not fail."""
    with sqlite3.connect(f"file:{out / 'samples.sqlite'}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT group_id, sibling, version, reward FROM samples").fetchall()
    stored = {(group, sibling, version): reward for group, sibling, version, reward in rows}
    orders = map(json.loads, (out / "journal.jsonl").read_text().splitlines()[1:])
    failed = {"/".join(map(str, order["group"])) for order in orders if order["kind"] == "fail"}
    return [
        f"{key}: posted {reward}, stored {stored.get(key)}"
        for key, reward in tally.rewards.items()
        if stored.get(key) != reward and key[0] not in failed
    ]


def row_of(kind: str, seconds: list[float]) -> Row:
    """How long calls of one kind took."""
    centiles = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    return {
        "kind": kind,
        "calls": len(seconds),
        "p50_ms": 1e3 * centiles[49],
        "p99_ms": 1e3 * centiles[98],
        "max_ms": 1e3 * max(seconds),
    }


def main() -> None:
    options = parse_options(str(__doc__))
    seconds = 20.0 if options.quick else 300.0
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        run = start(out, log)
        try:
            tally = asyncio.run(load((out / "service.json").read_text(), NUM_CLIENTS, seconds))
            memory = psutil.Process(run.pid).memory_info().rss
            stop(run)
        except BaseException:
            print(log.read_text())
            raise
        finally:
            run.kill()
        summary = json.loads((out / "summary.json").read_text())
        verdict, missing = audit.check(out), lost(out, tally)
        told = log.read_text()
    for problem in [*tally.wrong[:20], *missing[:20]]:
        print(problem)
    for how, num in tally.ended.items():
        print(f"{num} sessions ended early: {how}")
    assert "Traceback" not in told, told
    assert (verdict.c1, verdict.c2, verdict.c3) == (True, True, True)
    rows: list[Row] = [row_of(kind, times) for kind, times in sorted(tally.seconds.items())]
    publish(
        options,
        rows,
        {
            "clients": NUM_CLIENTS,
            "seconds": seconds,
            "calls": tally.num_calls,
            "malformed_share": tally.num_malformed / tally.num_calls,
            "rewards_acknowledged": len(tally.rewards),
            "rewards_lost": len(missing),
            "wrong_answers": len(tally.wrong),
            "answers_of_500_or_more": sum(n for status, n in tally.statuses.items() if status >= 500),
            "steps_trained": summary["steps"],
            "driver_memory_mb": memory / 1e6,
        },
    )


if __name__ == "__main__":
    main()
