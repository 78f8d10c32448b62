"""A run that serves 64 clients for five minutes, while one call in twenty is malformed.

The clients run episodes with tool calls (examples/tool_caller), three quarters of them with streams, read
status, versions, engines and metrics, and send malformed calls. Some read a stream slowly, or vanish in its
middle. Afterwards no session may be left. Then the run is stopped and audited: every acknowledged reward must
be in the run folder, every response must have an expected status, and none may have a status of 500 or more.

    python benchmarks/serve.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from finished_run import audited_summary

from report import Row, parse_options, publish

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "tool_caller"))  # has the shop
from serve_traffic import CallStats, send_traffic

EXAMPLE = Path(__file__).parent.parent / "examples" / "agents.toml"
TOOL_CALLER = EXAMPLE.parent / "tool_caller"
NUM_CLIENTS = 64
CHANGES = {
    "run.steps": 100_000,
    "engine.max_num_seqs": 32,
    "engine.min_step_time": "8ms",  # leaves cores to the service, as an accelerator would
    "reward.max_failed_fraction": 0.9,
}
SESSION_TIMEOUT_S = 5.0  # of the sessions of clients that vanish
START_TIMEOUT_S = 180.0  # of the run
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
    deadline_s = time.monotonic() + START_TIMEOUT_S
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
    with contextlib.closing(sqlite3.connect(f"file:{out / 'samples.sqlite'}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT group_id, sibling, version, reward FROM samples").fetchall()
    stored = {(group, sibling, version): reward for group, sibling, version, reward in rows}
    records = map(json.loads, (out / "journal.jsonl").read_text().splitlines()[1:])
    failed = {"/".join(map(str, record["group"])) for record in records if record["kind"] == "fail"}
    return [
        f"{key}: posted {reward}, stored {stored.get(key)}"
        for key, reward in stats.rewards.items()
        if stored.get(key) != reward and key[0] not in failed
    ]


def leaked_sessions(address: str) -> int:
    """Sessions that are still open long after their clients' last call."""
    found, deadline_s = json.loads(address), time.monotonic() + 4 * SESSION_TIMEOUT_S
    headers = {"Authorization": f"Bearer {found['token']}"}
    while True:
        status = httpx.get(f"{found['url']}/v1/status", headers=headers, timeout=60).json()
        num_sessions: int = status["agents"]["sessions"]
        if num_sessions == 0 or time.monotonic() > deadline_s:
            return num_sessions
        time.sleep(0.5)


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
    load_before = os.getloadavg()[0]
    changes = {"service__session_timeout_s": SESSION_TIMEOUT_S, "eval__num_prompts": 0}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        run = start(out, log, TOOL_CALLER / "harness.toml", **changes)
        try:
            address, driver = (out / "service.json").read_text(), psutil.Process(run.pid)
            before = driver.memory_info().rss, driver.num_threads(), driver.num_fds()
            stats = asyncio.run(send_traffic(address, NUM_CLIENTS, seconds))
            num_leaked = leaked_sessions(address)
            after = driver.memory_info().rss, driver.num_threads(), driver.num_fds()
            stop(run)
        except BaseException:
            print(log.read_text())
            raise
        finally:
            run.kill()
        summary, missing = audited_summary(out), lost_rewards(out, stats)
        log_text = log.read_text()
    for problem in [*stats.wrong[:20], *missing[:20]]:
        print(problem)
    for reason, num in stats.ended.items():
        print(f"{num} sessions ended early: {reason}")
    for name, num in sorted(stats.refused.items()):
        print(f"{num} malformed calls: {name}")
    assert "Traceback" not in log_text, log_text
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
            "sessions_vanished": sum(n for why, n in stats.ended.items() if why.startswith("vanished")),
            "sessions_leaked": num_leaked,
            "steps_trained": summary["steps"],
            "driver_memory_before_mb": before[0] / 1e6,
            "driver_memory_mb": after[0] / 1e6,
            "driver_threads_before": before[1],
            "driver_threads": after[1],
            "driver_open_files_before": before[2],
            "driver_open_files": after[2],
            "load_average_before": load_before,
            **{f"answers_of_{status or 'none'}": n for status, n in sorted(stats.statuses.items())},
        },
    )
    if num_leaked or missing or stats.wrong or any(status >= 500 for status in stats.statuses):
        sys.exit("sessions leaked, rewards lost, wrong answers or errors of the server: see above")


if __name__ == "__main__":
    main()
