"""`dora engines add` and `drain` during a run; no token is generated again."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary

LONG = {"engine__min_step_time": "20ms", "run__steps": 1000, "sampling__max_response_length": 48}


def engines_of(run: Run, kind: str) -> list[int]:
    """The engines of the journal's events or actions of a kind."""
    return [line["engine"] for line in journal(run.out) if line["kind"] == kind]


def stop(run: Run) -> None:
    os.kill(run.pid, signal.SIGTERM)
    assert run.end().code == 130


@pytest.mark.timeout(300)  # seconds; starts nine processes of `dora`, and is slow on busy cores
def test_an_engine_is_added_and_another_one_drained_during_a_run(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    listed = dora("engines", "list", run.out)
    assert listed.code == 0
    assert [line.partition(":")[0] for line in listed.out.splitlines()] == ["engine 0", "engine 1"]
    assert " of 4 rows in use, v" in listed.out
    added = dora("engines", "add", run.out)
    assert (added.code, added.out) == (0, "engine 2 joined\n"), added
    run.wait_until(lambda: 2 in engines_of(run, "generate"), "requests on the new engine")
    drained = dora("engines", "drain", run.out, "0")
    assert (drained.code, drained.out) == (0, "engine 0 drained and removed\n"), drained
    again = dora("engines", "drain", run.out, "0")
    assert again.code == 1
    assert "the run has no engine 0 to drain; it has 1, 2" in again.out
    assert len(run.workers()) == 4  # two engines, trainer and reward worker
    stop(run)
    s = summary(run.out)
    assert (s["engine_failures"], s["regenerated_tokens"], s["reprefill_tokens"]) == (0, 0, 0)
    run.check_records()
    assert (engines_of(run, "engine_joined"), engines_of(run, "engine_removed")) == ([0, 1, 2], [0])
    assert "engine 2 joined" in run.end().out
    assert "engine 0 drained and removed" in run.end().out
    assert not (run.out / "control").exists()
    ended = dora("engines", "list", run.out)
    assert (ended.code, ended.out) == (2, "")
    assert "is not a running run: it has ended" in ended.err


def test_a_drain_of_the_only_engine_is_rejected(start_run: StartRun) -> None:
    run = start_run(**LONG, engine__num_engines=1)
    run.wait_for_steps(1)
    rejected = dora("engines", "drain", run.out, "0")
    assert rejected.code == 1
    assert rejected.out.startswith("engine 0 cannot be drained: it is the only engine")
    stop(run)
    assert "engine 0 is not drained: " in run.end().out


def test_commands_for_a_run_whose_driver_was_killed_fail(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    added = dora("engines", "add", run.out)
    assert (added.code, added.out) == (2, "")
    assert f"is not a running run: its process {run.pid} has exited" in added.err
