"""Runs on Ray: the same record and the same guarantees, whatever dies; nothing is left behind.

Ray's own tests are Ray's. What is held here is that a run sees for itself who is dead, or hangs.
"""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from tests.runtime.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary, wait_until_gone

pytest.importorskip("ray")

RAY = {"runtime__kind": "ray"}


def pid_of(run: Run, name: str) -> int | None:
    """Of a process of the run, as `dora status` has it."""
    path = run.out / "status.json"
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"processes": []}
    found = [process["pid"] for process in told["processes"] if process["name"] == name]
    return found[0] if found else None


def check(run: Run, **wanted: int) -> None:
    """It has ended well, its record holds the guarantees, and `wanted` is in its summary."""
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended
    s = summary(run.out)
    assert (s["c1"], s["c2"], s["c3"], s["pending_groups"]) == (True, True, True, 0)
    assert {name: s[name] for name in wanted} == wanted
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
    assert run.weight_folders() == []


def test_a_run_starts_ray_by_itself_survives_an_engine_and_leaves_nothing(start_run: StartRun) -> None:
    run = start_run(**RAY, run__steps=20, engine__pace="20ms")
    run.wait_for_steps(1)
    started = psutil.Process(run.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in started)
    run.wait_until(lambda: pid_of(run, "engine 0") is not None, "engine 0")
    engine = psutil.Process(pid_of(run, "engine 0"))
    assert "ray::" in " ".join(engine.cmdline())
    engine.kill()
    run.wait_until(lambda: any(line["kind"] == "engine_lost" for line in journal(run.out)), "the loss")
    check(run, engine_losses=1, trained_groups=40)
    assert "another one takes its place" in run.end().out
    assert wait_until_gone(started, 10.0) == []
