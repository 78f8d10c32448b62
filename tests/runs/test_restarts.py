"""Lost engines and trainers are restarted, and the guarantees hold."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, journal, metrics, summary, wait_until_gone

from dora.runtime.process.supervisor import FIRST_DELAY_S

LONG: dict[str, Any] = {"engine__min_step_time": "20ms", "run__steps": 1000}
ONE_ENGINE: dict[str, Any] = {**LONG, "engine__num_engines": 1}


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [line for line in journal(run.out) if line["kind"] == kind]


def has_finished_a_request(run: Run, engine: int) -> bool:
    return any(line["engine"] == engine for line in events(run, "request_finished"))


def stop(run: Run) -> str:
    """Stop the run and check its records; returns its output."""
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130, ended
    run.check_records()
    return ended.out


def test_a_killed_engine_is_restarted_and_generates(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    run.workers()[0].kill()
    run.wait_until(lambda: has_finished_a_request(run, 2), "a completion of the new engine")
    out = stop(run)
    lost = "engine 0 lost (killed by SIGKILL): its requests continue on other engines"
    assert f"{lost}; restarting in 1 s\n" in out
    assert "starting engine 2 in place of engine 0\n" in out
    assert "engine 2 joined\n" in out
    joined = {line["engine"]: line["replaces"] for line in events(run, "engine_joined")}
    assert joined == {0: None, 1: None, 2: 0}
    assert (summary(run.out)["engine_failures"], summary(run.out)["engine_restarts"]) == (1, 1)


def test_a_run_survives_a_timeout_of_its_only_engine(start_run: StartRun) -> None:
    """The engine hangs, so only missing heartbeats show it. It is killed and replaced."""
    run = start_run(**ONE_ENGINE, runtime__heartbeat_timeout_s=3.0)
    run.wait_for_steps(1)
    hung = run.workers()[0]
    hung.suspend()
    run.wait_until(lambda: has_finished_a_request(run, 1), "a completion of the new engine")
    assert wait_until_gone([hung]) == []
    out = stop(run)
    reason = "no heartbeat for more than runtime.heartbeat_timeout_s = 3 s"
    assert f"engine 0 lost ({reason}" in out
    (lost,) = events(run, "engine_lost")
    assert lost["reason"].startswith(reason)


def test_a_killed_trainer_is_restarted_while_engines_generate(start_run: StartRun) -> None:
    """It resumes from the last checkpoint with the same batches; on this machine they give the same bits."""
    run = start_run(**LONG, trainer__save_freq=2)
    run.wait_until(lambda: any(line["version"] == 3 for line in events(run, "published")), "version 3")
    run.workers()[2].kill()
    run.wait_for_steps(7)
    out = stop(run)
    assert "trainer lost (trainer was killed by SIGKILL): engines keep generating; restarting in 1 s" in out
    lines = journal(run.out)
    (lost,), (new,) = (events(run, kind) for kind in ("trainer_lost", "trainer_replaced"))
    assert new["from_step"] >= 2
    assert any(line["kind"] == "request_finished" for line in lines[lost["seq"] : new["seq"]])
    before_loss = [line for line in events(run, "published") if line["seq"] < lost["seq"]]
    redone = {line["version"]: line["digest"] for line in before_loss if line["version"] >= new["from_step"]}
    assert 3 in redone
    assert {line["version"]: line["digest"] for line in events(run, "digest_reported")} == redone
    s = summary(run.out)
    assert (s["trainer_failures"], s["attempts"], s["redone_steps"]) == (1, 1, len(new["redone"]))
    assert s["trainer_recovery_s_max"] > FIRST_DELAY_S
    assert [line["step"] for line in metrics(run.out)] == [*range(s["steps"])]


def test_a_replacement_of_the_trainer_that_is_killed_before_it_is_ready_is_replaced(
    start_run: StartRun,
) -> None:
    run = start_run(**LONG, runtime__max_restarts=20)
    run.wait_for_steps(2)
    known = {worker.pid for worker in run.workers()}
    run.workers()[2].kill()

    def is_a_replacement_lost() -> bool:
        """Kill each new process; one that was ready before does not count."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in run.workers():
                if worker.pid not in known:
                    known.add(worker.pid)
                    worker.kill()
        kinds = [line["kind"] for line in journal(run.out) if line["kind"].startswith("trainer_")]
        return kinds[-2:] == ["trainer_lost", "trainer_lost"]

    run.wait_until(is_a_replacement_lost, "the loss of a replacement")
    num_replaced = len(events(run, "trainer_replaced"))
    run.wait_until(lambda: len(events(run, "trainer_replaced")) > num_replaced, "another trainer")
    run.wait_for_steps(len(metrics(run.out)) + 2)
    stop(run)
    assert summary(run.out)["trainer_failures"] == len(events(run, "trainer_lost")) > num_replaced + 1


def test_a_killed_fork_server_costs_nothing(start_run: StartRun) -> None:
    """The workers that it had forked continue; a killed one is replaced, and the trainer saves."""
    run = start_run(**LONG)
    run.wait_for_steps(1)
    workers = run.workers()
    (server,) = [child for child in psutil.Process(run.pid).children() if child.children()]
    server.kill()
    workers[0].kill()
    run.wait_until(lambda: has_finished_a_request(run, 2), "a completion of the new engine")
    out = stop(run)
    assert "engine 0 lost (exited (code 255, or unknown because the run's fork server was killed))" in out
    assert (summary(run.out)["engine_failures"], summary(run.out)["trainer_failures"]) == (1, 0)
    assert wait_until_gone(workers) == []


def test_a_run_whose_last_engine_has_no_restarts_left_ends_with_an_error(start_run: StartRun) -> None:
    run = start_run(**ONE_ENGINE, runtime__max_restarts=1)
    run.wait_for_steps(1)
    run.workers()[0].kill()
    run.wait_until(lambda: len(events(run, "engine_joined")) == 2, "another engine")
    run.workers()[-1].kill()
    ended = run.end()
    assert ended.code == 1, ended
    assert "the last engine is lost: engine 1 was killed by SIGKILL" in ended.err
    assert "; not restarting it: runtime.max_restarts = 1 is reached\n" in ended.out
    run.audit()
