"""Where a run stands, as its driver writes it and `dora status` reads it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.core.fake_workers import limits
from tests.core.midway import engine, midway, running
from tests.runs.conftest import StartRun
from tests.runtime.fake_process import Stage
from tests.runtime.running import Run, dora

from dora.core.events import ProgressReported, Published, TimerFired
from dora.core.wait_graph import REWARDS
from dora.errors import RunError, WorkerTimeoutError
from dora.metrics.status import STATUS_FILE, read_status
from dora.runtime.control import status
from dora.runtime.control.status import PLACE_S, TRAINING
from dora.runtime.executor import ProcessExecutor
from dora.runtime.process.worker_process import RestartPolicy, Worker, WorkerMessages, WorkerState
from dora.service.state import Status


class Desk:
    """A status of a run in which the trainer waits for engine 0."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.notices: list[str] = []
        self.state = midway(limits(num_steps=20, batch_size=1, max_staleness=2), newest=2)
        engine(self.state, 0, rows=4, held={2})
        running(self.state, 0, 2, 1)
        fleet, self.trainers = SimpleNamespace(restarts=RestartPolicy(1)), SimpleNamespace(due_s=None)
        self.stations: dict[str, list[WorkerState]] = {}
        hands = SimpleNamespace(now=7.0, pulses=list, fleet=fleet, trainers=self.trainers, storage=None)
        hands.stations = lambda: self.stations
        self.hands = hands
        self.status = Status(out, cast(ProcessExecutor, hands), lambda: self.state, self.notices.append)

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / STATUS_FILE).read_text())
        return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """It writes at every look, and has no patience."""
    monkeypatch.setattr(status, "WRITE_S", 0.0)
    monkeypatch.setattr(status, "STALL_S", 0.5)
    return Desk(tmp_path)


def test_a_run_in_which_nothing_happens_says_once_who_waits_for_whom(desk: Desk) -> None:
    desk.status.enter(TRAINING)
    desk.status.look()
    assert (desk.notices, read_status(desk.out).state) == ([], "running")
    time.sleep(0.6)
    desk.status.hear(TimerFired())  # which are no progress
    desk.status.hear(ProgressReported(0, (), row_tokens_per_s=0.0))
    desk.status.look()
    desk.status.look()
    (notice,) = desk.notices
    first, *waits = notice.splitlines()
    assert first.startswith("no progress for ")
    assert first.endswith(" s: trainer ultimately waits for engine 0")
    assert "  group 0/1 waits for request 0/1/0: its last token, for 0.0 s" in waits
    assert read_status(desk.out).state == "stalled"
    desk.status.hear(ProgressReported(0, (), row_tokens_per_s=9.0))
    desk.status.look()
    assert read_status(desk.out).state == "running"
    assert desk.told["stall_after_s"] > 1.0, "a run that has waited so long before may do so again"


def test_a_wait_is_as_old_as_its_first_sight(desk: Desk) -> None:
    desk.status.enter(TRAINING)
    desk.status.look()
    cast(Any, desk.status)._hands.now = 12.0
    desk.status.look()
    assert {wait["since_s"] for wait in desk.told["waits"]} == {7.0}
    running(desk.state, 0, 2, 2)
    desk.state.engines[0].is_draining = True
    desk.status.look()
    assert {wait["since_s"] for wait in desk.told["waits"]} == {7.0, 12.0}


def test_only_training_can_stall(desk: Desk) -> None:
    desk.status.enter("evaluating")
    time.sleep(0.6)
    desk.status.look()
    assert desk.notices == []
    assert (desk.told["idle_s"], desk.told["waits"], desk.told["phase"]) == (0.0, [], "evaluating")


@pytest.mark.parametrize("error", [WorkerTimeoutError, RunError])
def test_a_run_that_fails_says_why_and_for_a_silent_process_who_waits(
    desk: Desk, error: type[RunError]
) -> None:
    desk.status.enter(TRAINING)
    desk.status.fail(error("the trainer was silent\nlong ago"))
    desk.status.end("an error")
    standing = read_status(desk.out)
    assert standing.state == "failed"
    assert standing.sentence.startswith("failed: the trainer was silent; training, 0 of 20 steps")
    assert standing.told["root_causes"] == ["engine 0"]
    assert len(desk.notices) == (error is WorkerTimeoutError)


def test_who_has_no_place_to_start_in_is_named_once_and_waited_for(desk: Desk) -> None:
    stage = Stage()
    worker = Worker("rewarder 0", lambda *_: None, None, WorkerMessages(stage.start))
    stage.puppets[0].awaits = "the cluster"
    desk.stations = {REWARDS: [WorkerState(worker, is_ready=False, timeout_s=60.0)]}
    desk.status.enter(TRAINING)
    desk.status.look()
    assert not desk.notices
    desk.hands.now += 2 * PLACE_S
    for _ in range(2):
        desk.status.look()
    assert desk.notices == ["rewarder 0 cannot start yet: the cluster has no place for it"]
    waits = [(wait["waiter"], wait["target"]) for wait in desk.told["waits"]]
    assert waits[-2:] == [(REWARDS, "rewarder 0"), ("rewarder 0", "the cluster")]
    assert desk.stations[REWARDS][0].to_json(0.0)["at"] == "waiting for the cluster"
    assert worker.start_delay_reason == ": the cluster has no place for it"
    worker.kill()


def test_a_disk_without_room_does_not_stop_a_run(desk: Desk) -> None:
    desk.status.hear(Published(2, "v2"))
    desk.status.look()
    before = desk.told
    (desk.out / "status.json.draft").mkdir()  # as good as a disk that takes nothing
    desk.status.enter("saving")
    desk.status.look()
    assert desk.told == before


def status_of(run: Run) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(dora("status", run.out, "--json").out)
    return told


def test_a_run_that_goes_and_is_killed_says_so_with_its_processes(start_run: StartRun) -> None:
    run = start_run(engine__min_step_time="20ms", run__steps=1000)
    run.wait_for_steps(1)
    run.wait_until(lambda: status_of(run)["steps"] > 0, "news of the first step")
    told = status_of(run)
    assert (told["verdict"], told["phase"], told["pid"]) == ("running", "training", run.pid)
    names = [process["name"] for process in told["processes"]]
    assert names == ["engine 0", "engine 1", "trainer", "rewarder"]
    assert {process["pid"] for process in told["processes"]} == {worker.pid for worker in run.workers()}
    assert all(process["last_message_s"] < process["timeout_s"] for process in told["processes"])
    assert told["waits"]
    printed = dora("status", run.out)
    assert printed.code == 0, printed
    assert "running: training, " in printed.out
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    dead = dora("status", run.out)
    assert dead.code == 1
    assert f"crashed: driver process {run.pid} has exited; training, " in dead.out
    assert f"dora train --resume {run.out} resumes it" in dead.out


def test_a_run_that_has_finished_says_so_and_what_is_no_run_is_refused(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run(run__steps=2)
    assert run.end().code == 0
    ended = dora("status", run.out)
    assert (ended.code, ended.out) == (0, f"{run.out}: finished, 2 steps trained\n"), ended
    refused = dora("status", tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "is not the folder of a run" in refused.err
