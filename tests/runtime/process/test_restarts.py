"""What is lost is started again, engines and the trainer, and the guarantees hold over their deaths."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.runtime.conftest import StartRun
from tests.runtime.running import Run, dora, journal, metrics, summary, wait_until_gone

from dora.runtime.process.worker_process import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    RESET_FACTOR,
    STABLE_UPTIME_S,
    RestartPolicy,
)

LONG: dict[str, Any] = {"engine__min_step_time": "20ms", "run__steps": 1000}
ALONE: dict[str, Any] = {**LONG, "engine__num_engines": 1}


def test_each_restart_in_a_row_waits_longer_until_there_are_no_more() -> None:
    restarts = RestartPolicy(max_restarts=3)
    waits = [restarts.on_lost(engine, slot=0, uptime_s=1.0, now_s=100.0) for engine in range(4)]
    assert waits == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, None]
    assert restarts.on_lost(7, slot=7, uptime_s=0.0, now_s=100.0) == FIRST_DELAY_S, (
        "another place has its own"
    )
    assert restarts.pop_due(100.0 + FIRST_DELAY_S) == [0, 7]
    assert restarts.pop_due(100.0 + 4 * FIRST_DELAY_S) == [1, 2]
    assert restarts.pop_due(1e9) == []


def test_a_place_where_an_engine_has_stayed_has_all_its_restarts_again() -> None:
    restarts = RestartPolicy(max_restarts=1)
    assert restarts.on_lost(0, 0, uptime_s=1.0, now_s=0.0) == FIRST_DELAY_S
    assert restarts.on_lost(1, 0, uptime_s=STABLE_UPTIME_S, now_s=0.0) == FIRST_DELAY_S
    assert restarts.on_lost(2, 0, uptime_s=1.0, now_s=0.0) is None


def test_a_wait_that_was_worth_it_is_followed_by_the_first_again() -> None:
    restarts = RestartPolicy(max_restarts=9)
    lives = [(0, 1.0), (1, 1.0), (2, 1.0), (3, RESET_FACTOR * 4 * FIRST_DELAY_S), (4, 0.0)]
    waits = [restarts.on_lost(engine, 0, lived_s, now_s=0.0) for engine, lived_s in lives]
    assert waits == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]


def test_the_wait_after_one_that_got_on_is_the_first_again() -> None:
    restarts = RestartPolicy(max_restarts=9)
    waits = [restarts.on_lost(engine, 0, 0.5, 0.0, made_progress=engine == 2) for engine in range(4)]
    assert waits == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]


def test_no_wait_is_longer_than_the_longest() -> None:
    restarts = RestartPolicy(max_restarts=100)
    assert max(restarts.on_lost(engine, 0, 1.0, 0.0) or 0.0 for engine in range(100)) == MAX_DELAY_S


def test_none_is_started_again_where_none_is_to_be() -> None:
    assert RestartPolicy(max_restarts=0).on_lost(0, 0, STABLE_UPTIME_S, 0.0) is None


def engine_facts(run: Run, kind: str) -> list[dict[str, Any]]:
    return [line for line in journal(run.out) if line["kind"] == kind]


def has_work(run: Run, engine: int) -> bool:
    return any(line["engine"] == engine for line in engine_facts(run, "request_finished"))


def stop(run: Run) -> str:
    """End the run, and check its record; what it printed."""
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130, ended
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
    s = summary(run.out)
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    return ended.out


def test_a_killed_engine_is_started_again_and_generates(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    run.workers()[0].kill()
    run.wait_until(lambda: has_work(run, 2), "an answer of the new engine")
    told = stop(run)
    lost = "engine 0 is lost (engine 0 was killed by SIGKILL); its requests begin again elsewhere"
    assert f"{lost}; another one takes its place in 1 s\n" in told
    assert "engine 2 starts in the place of engine 0\n" in told
    assert "engine 2 has joined\n" in told
    joined = {line["engine"]: line["replaces"] for line in engine_facts(run, "engine_joined")}
    assert joined == {0: None, 1: None, 2: 0}
    assert (summary(run.out)["engine_failures"], summary(run.out)["engine_restarts"]) == (1, 1)


def test_a_run_outlives_the_silence_of_its_only_engine(start_run: StartRun) -> None:
    """Hung, not dead: only its silence tells. It is ended, and another one takes over what it had."""
    run = start_run(**ALONE, runtime__heartbeat_timeout_s=3.0)
    run.wait_for_steps(1)
    hung = run.workers()[0]
    hung.suspend()
    run.wait_until(lambda: has_work(run, 1), "an answer of the new engine")
    assert wait_until_gone([hung], 2.0) == []
    told = stop(run)
    assert "engine 0 is lost (silent for more than runtime.heartbeat_timeout_s = 3)" in told
    assert [line["reason"] for line in engine_facts(run, "engine_lost")] == [
        "silent for more than runtime.heartbeat_timeout_s = 3"
    ]


def test_training_goes_on_without_a_killed_trainer_while_engines_generate(start_run: StartRun) -> None:
    """From the last checkpoint, with the same batches; on this machine they give the same bits."""
    run = start_run(**LONG, trainer__save_freq=2)
    run.wait_for_steps(3)
    run.workers()[2].kill()
    run.wait_for_steps(7)
    told = stop(run)
    assert (
        "the trainer is lost (trainer was killed by SIGKILL); engines go on, and another one begins" in told
    )
    lines = journal(run.out)
    (lost,), (new,) = (engine_facts(run, kind) for kind in ("trainer_lost", "trainer_replaced"))
    assert new["from_step"] >= 2
    assert any(line["kind"] == "request_finished" for line in lines[lost["seq"] : new["seq"]])
    published = {line["version"]: line["digest"] for line in engine_facts(run, "published")}
    attested = engine_facts(run, "digest_reported")
    assert len(attested) == len(new["redone"]) + 1
    assert all(published[line["version"]] == line["digest"] for line in attested)
    s = summary(run.out)
    assert (s["trainer_failures"], s["attempts"], s["redone_steps"]) == (1, 1, len(new["redone"]))
    assert s["trainer_recovery_s_max"] > FIRST_DELAY_S
    assert [line["step"] for line in metrics(run.out)] == [*range(s["steps"])]


def test_a_run_whose_engine_dies_too_often_ends_in_words(start_run: StartRun) -> None:
    run = start_run(**ALONE, runtime__max_restarts=1)
    run.wait_for_steps(1)
    run.workers()[0].kill()
    run.wait_until(lambda: len(engine_facts(run, "engine_joined")) == 2, "another engine")
    run.workers()[-1].kill()
    ended = run.end(timeout_s=20)
    assert ended.code == 1, ended
    assert "the last engine is lost: engine 1 was killed by SIGKILL" in ended.err
    assert "; its place stays empty (runtime.max_restarts = 1)\n" in ended.out
    assert dora("audit", run.out).code == 0
