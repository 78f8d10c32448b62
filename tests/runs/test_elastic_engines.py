"""Engines join and leave while a run goes, as a user asks for it; nothing is generated again."""

from __future__ import annotations

import os
import signal

from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary

LONG = {"engine__min_step_time": "20ms", "run__steps": 1000, "sampling__max_response_length": 48}


def kinds(run: Run, kind: str) -> list[int]:
    """The engines that facts or orders of a kind are about."""
    return [line["engine"] for line in journal(run.out) if line["kind"] == kind]


def stop(run: Run) -> None:
    os.kill(run.pid, signal.SIGTERM)
    assert run.end().code == 130


def test_an_engine_is_added_and_another_one_drained_while_the_run_goes(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    listed = dora("engines", "list", run.out)
    assert listed.code == 0
    assert [line.partition(":")[0] for line in listed.out.splitlines()] == ["engine 0", "engine 1"]
    assert " of 4 rows, v" in listed.out
    added = dora("engines", "add", run.out)
    assert (added.code, added.out) == (0, "engine 2 has joined\n"), added
    run.wait_until(lambda: 2 in kinds(run, "generate"), "work on the new engine")
    drained = dora("engines", "drain", run.out, "0")
    assert (drained.code, drained.out) == (0, "engine 0 has left\n"), drained
    again = dora("engines", "drain", run.out, "0")
    assert again.code == 1
    assert "the run has no engine 0 that could leave; it has 1, 2" in again.out
    steps = len(run.workers())
    assert steps == 4  # two engines, trainer and rewarder
    stop(run)
    s = summary(run.out)
    assert (s["engine_failures"], s["regenerated_tokens"], s["reprefill_tokens"]) == (0, 0, 0)
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert (kinds(run, "engine_joined"), kinds(run, "engine_removed")) == ([0, 1, 2], [0])
    assert "engine 2 has joined" in run.end().out
    assert "engine 0 has left" in run.end().out
    assert not (run.out / "control").exists()
    assert dora("audit", run.out).code == dora("replay", run.out).code == 0
    ended = dora("engines", "list", run.out)
    assert (ended.code, ended.out) == (2, "")
    assert "is not a running run: it has ended" in ended.err


def test_the_only_engine_stays(start_run: StartRun) -> None:
    run = start_run(**LONG, engine__num_engines=1)
    run.wait_for_steps(1)
    refused = dora("engines", "drain", run.out, "0")
    assert refused.code == 1
    assert refused.out.startswith("engine 0 stays: it is the only engine")
    stop(run)
    assert "engine 0 stays: " in run.end().out


def test_a_run_whose_driver_was_killed_is_named_as_gone(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    gone = dora("engines", "add", run.out)
    assert (gone.code, gone.out) == (2, "")
    assert f"is not a running run: its process {run.pid} has exited" in gone.err
