"""Processes die in the middle of a run: it goes on where it can, and ends in words where it cannot."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import CommandResult, Run, dora, journal, summary, wait_until_gone

from dora.model.pretrained import load_pretrained

ENGINES, TRAINER = slice(0, 2), 2
SLOW = {"engine__min_step_time": "40ms", "run__steps": 5}  # every answer takes most of a second
LONG = {"engine__min_step_time": "40ms", "run__steps": 1000}  # does not come to its end by itself


def check_ended_badly(run: Run, workers: list[psutil.Process], wanted: str) -> CommandResult:
    """Exit code 1, a message without our own stack, a readable record, nothing left behind."""
    ended = run.end(timeout_s=20)
    assert ended.code == 1, ended
    assert wanted in ended.err
    assert "Traceback" not in ended.err
    s = summary(run.out)
    assert s["pending_groups"] > 0
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    check_left_behind(run, workers)
    return ended


def check_left_behind(run: Run, workers: list[psutil.Process]) -> None:
    """No process and no weights in memory; a record that audit and replay accept."""
    assert wait_until_gone(workers, 2.0) == []
    assert run.weight_folders() == []
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)


def decodes(run: Run, engine: int) -> bool:
    """Whether the engine's last word is that it has tokens of unfinished requests."""
    told: list[Any] = [line for line in journal(run.out) if line.get("engine") == engine]
    return (
        bool(told) and told[-1]["kind"] == "progress_reported" and sum(n for _, n in told[-1]["lengths"]) > 0
    )


def test_a_killed_engine_costs_only_its_unfinished_answers(start_run: StartRun) -> None:
    run = start_run(**SLOW, runtime__max_restarts=0)
    run.wait_until(lambda: decodes(run, 0), "work on engine 0")
    workers = run.workers()
    killed_s = time.monotonic()
    workers[0].kill()
    run.wait_until(lambda: any(line["kind"] == "engine_lost" for line in journal(run.out)), "the loss")
    assert time.monotonic() - killed_s < 5
    ended = run.end()
    assert ended.code == 0, ended
    assert "engine 0 is lost (engine 0 was killed by SIGKILL)" in ended.out
    s = summary(run.out)
    assert (s["engine_failures"], s["trained_groups"], s["pending_groups"]) == (1, 10, 0)
    assert s["regenerated_tokens"] > 0
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    check_generated_again(run)
    check_left_behind(run, workers)


def check_generated_again(run: Run) -> None:
    """What the lost engine had is generated on the other one, on the same version."""
    lines = journal(run.out)
    lost = next(i for i, line in enumerate(lines) if line["kind"] == "engine_lost")
    placed: dict[tuple[int, ...], tuple[int, int]] = {}
    for line in lines[:lost]:
        if line["kind"] == "generate":
            placed |= {tuple(r): (line["engine"], line["version"]) for r in line["requests"]}
        elif line["kind"] == "request_finished":
            del placed[tuple(line["request"])]
    orphans = {request: version for request, (engine, version) in placed.items() if engine == 0}
    again = {
        tuple(r): line["version"]
        for line in lines[lost:]
        if line["kind"] == "generate" and line["engine"] == 1
        for r in line["requests"]
    }
    assert orphans
    assert orphans.items() <= again.items()


def test_an_engine_that_falls_silent_is_lost_after_its_time(start_run: StartRun) -> None:
    run = start_run(**SLOW, runtime__heartbeat_timeout_s=3.0)
    run.wait_for_steps(1)
    workers = run.workers()
    workers[1].suspend()
    ended = run.end()
    assert ended.code == 0, ended
    assert "engine 1 is lost (silent for more than runtime.heartbeat_timeout_s = 3)" in ended.out
    assert summary(run.out)["engine_failures"] == 1
    check_left_behind(run, workers)


def test_a_run_without_engines_ends_in_words(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__max_restarts=0)
    run.wait_for_steps(1)
    workers = run.workers()
    for engine in workers[ENGINES]:
        engine.kill()
    check_ended_badly(run, workers, "the last engine is lost: engine ")
    assert summary(run.out)["engine_failures"] == 2


def test_a_run_whose_trainer_is_not_to_be_replaced_ends_in_words(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__max_restarts=0)
    run.wait_for_steps(1)
    workers = run.workers()
    workers[TRAINER].kill()
    check_ended_badly(run, workers, "trainer was killed by SIGKILL; the run cannot go on without it")


def test_workers_end_by_themselves_once_the_driver_is_gone(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    workers = run.workers()
    assert len(workers) == 4
    os.kill(run.pid, signal.SIGKILL)
    assert wait_until_gone(workers, 5.0) == []
    assert dora("audit", run.out).code == 0
    assert dora("replay", run.out).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_that_is_asked_to_stop_ends_cleanly(start_run: StartRun, number: signal.Signals) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    workers = run.workers()
    os.killpg(run.pid, number)  # a terminal, timeout and batch systems tell all processes
    ended = run.end(timeout_s=5)
    assert (ended.code, ended.err) == (130, ""), ended
    assert f"stopped by {number.name}" in ended.out
    s = summary(run.out)
    assert s["stopped"] == number.name
    (saved,) = (run.out / "checkpoints").iterdir()
    assert saved.name == f"step-{s['steps']}" != "step-0"
    assert load_pretrained(saved)
    assert s["pending_groups"] > 0
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    check_left_behind(run, workers)


def test_a_run_that_is_asked_to_stop_while_it_starts_ends_cleanly(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_until(lambda: len(run.workers()) == 4, "four workers")
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all processes
    ended = run.end(timeout_s=5)
    assert (ended.code, ended.err) == (130, ""), ended
    assert run.weight_folders() == []


def test_a_trainer_that_hangs_ends_the_run_within_its_timeout(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__trainer_timeout_s=2.0, runtime__max_restarts=0)
    run.wait_until(lambda: decodes(run, 0), "work on engine 0")
    workers = run.workers()
    workers[TRAINER].suspend()
    why = "the trainer was silent for more than runtime.trainer_timeout_s = 2"
    ended = check_ended_badly(run, workers, why)
    assert f"dora train --resume {run.out} does, with a new one" in ended.err
    assert "ultimately waits for trainer" in ended.out
