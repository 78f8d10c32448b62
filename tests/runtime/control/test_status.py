"""The status of a run, as the driver writes it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.core.fake_workers import limits
from tests.core.midrun import add_engine, add_running, state_at
from tests.runtime.fake_process import FakeLauncher

from dora.core.events import ProgressReported, Published, TimerFired
from dora.core.state import EvaluationRecord
from dora.core.types import RequestId
from dora.core.wait_graph import REWARDS
from dora.errors import RunError, WorkerTimeoutError
from dora.metrics.status import STATUS_FILE, read_status
from dora.metrics.status import main as print_status
from dora.runtime.control import status
from dora.runtime.control.status import SLOT_WAIT_S, TRAINING, StatusWriter
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import Worker, WorkerMessages, WorkerState


class FakeExecutor:
    """An `ObservedExecutor` with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 7.0
        self.clock = DriverClock()
        self.workers: dict[str, list[WorkerState]] = {}
        self.missing = ""
        self.is_paused = False

    def worker_states(self) -> list[WorkerState]:
        return []

    def workers_by_role(self) -> dict[str, list[WorkerState]]:
        return self.workers

    def restart_times(self) -> dict[str, float]:
        return {}

    def agent_waits(self) -> dict[RequestId, str]:
        return {RequestId(0, 1, 0): "an agent that opens a session"} if self.missing else {}

    def missing_agents(self) -> str:
        return self.missing


class ObservedRun:
    """A run in which the trainer waits for engine 0."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.notices: list[str] = []
        self.state = state_at(limits(num_steps=20, batch_size=1, max_staleness=2), newest=2)
        add_engine(self.state, 0, rows=4, loaded={2})
        add_running(self.state, 0, 2, 1)
        self.executor = FakeExecutor()
        self.status = StatusWriter(out, self.executor, lambda: self.state, self.notices.append)

    @property
    def written(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / STATUS_FILE).read_text())
        return content


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObservedRun:
    """It writes at every update and reports a stall after half a second."""
    monkeypatch.setattr(status, "WRITE_S", 0.0)
    monkeypatch.setattr(status, "STALL_S", 0.5)
    return ObservedRun(tmp_path)


def test_a_stall_is_logged_once_with_the_wait_graph(run: ObservedRun) -> None:
    run.status.enter(TRAINING)
    run.status.update()
    assert (run.notices, read_status(run.out).state) == ([], "running")
    time.sleep(0.6)
    run.status.on_event(TimerFired())  # neither of these is progress
    run.status.on_event(ProgressReported(0, (), row_tokens_per_s=0.0))
    run.status.update()
    run.status.update()
    (notice,) = run.notices
    first, *waits = notice.splitlines()
    assert first.startswith("no progress for ")
    assert first.endswith(" s: trainer ultimately waits for engine 0")
    assert "  group 0/1 waits for request 0/1/0: its last token, for 0.0 s" in waits
    assert read_status(run.out).state == "stalled"
    run.status.on_event(ProgressReported(0, (), row_tokens_per_s=9.0))
    run.status.update()
    assert read_status(run.out).state == "running"
    assert run.written["stall_after_s"] > 1.0, "another pause of this length is not a stall"


def test_a_wait_without_a_start_time_begins_when_it_is_first_seen(run: ObservedRun) -> None:
    run.status.enter(TRAINING)
    run.status.update()
    run.executor.now = 12.0
    run.status.update()
    assert {wait["since_s"] for wait in run.written["waits"]} == {7.0}
    add_running(run.state, 0, 2, 2)
    run.state.engines[0].is_draining = True
    run.status.update()
    assert {wait["since_s"] for wait in run.written["waits"]} == {7.0, 12.0}


def test_only_training_can_stall(run: ObservedRun) -> None:
    run.status.enter("saving")
    time.sleep(0.6)
    run.status.update()
    assert run.notices == []
    assert (run.written["idle_s"], run.written["waits"], run.written["phase"]) == (0.0, [], "saving")


def test_a_paused_run_does_not_stall(run: ObservedRun) -> None:
    run.status.enter(TRAINING)
    run.executor.is_paused = True
    for _ in range(2):
        time.sleep(0.3)
        run.status.update()
    assert run.notices == []
    assert (run.written["waits"], run.written["phase"], read_status(run.out).state) == (
        [],
        "paused",
        "running",
    )
    run.executor.is_paused = False
    run.status.update()
    assert (run.notices, run.written["phase"]) == ([], "training")


def test_the_phase_says_that_the_run_only_evaluates_or_has_finished(run: ObservedRun) -> None:
    run.status.enter(TRAINING)
    for version, phase in ((2, "training"), (0, "evaluating")):
        run.state.evaluation = EvaluationRecord(version, 1)
        run.status.update()
        assert run.written["phase"] == phase
    assert [(wait["waiter"], wait["reason"]) for wait in run.written["waits"]][-1] == ("admission", "its end")
    run.status.end("finished", "")
    assert run.written["phase"] == "finished"


@pytest.mark.parametrize("error", [WorkerTimeoutError, RunError])
def test_a_failed_run_has_a_reason_and_after_a_timeout_the_wait_graph(
    run: ObservedRun, error: type[RunError]
) -> None:
    run.status.enter(TRAINING)
    run.status.fail(error("the trainer sent no heartbeat\nfor a minute"))
    run.status.end("failed", "an error")
    found = read_status(run.out)
    assert found.state == "failed"
    assert found.sentence.startswith("failed: the trainer sent no heartbeat; training, 0 of 20 steps")
    assert found.content["root_causes"] == ["engine 0"]
    assert len(run.notices) == (error is WorkerTimeoutError)


def test_a_worker_without_a_free_slot_is_logged_once_and_part_of_the_wait_graph(run: ObservedRun) -> None:
    launcher = FakeLauncher()
    worker = Worker("reward worker 0", lambda *_: None, None, WorkerMessages(launcher.start))
    launcher.processes[0].waiting_for = "the cluster"
    run.executor.workers = {REWARDS: [WorkerState(worker, is_ready=False, timeout_s=60.0)]}
    run.status.enter(TRAINING)
    run.status.update()
    assert not run.notices
    run.executor.now += 2 * SLOT_WAIT_S
    for is_paused in (False, True, False):  # nor again after a pause
        run.executor.is_paused = is_paused
        run.status.update()
    assert run.notices == ["reward worker 0 cannot start yet: the cluster has no free slot for it"]
    waits = [(wait["waiter"], wait["target"]) for wait in run.written["waits"]]
    assert waits[-2:] == [(REWARDS, "reward worker 0"), ("reward worker 0", "the cluster")]
    assert run.executor.workers[REWARDS][0].to_json(0.0)["activity"] == "waiting for the cluster"
    worker.kill()


def test_a_run_without_agents_waits_for_them_and_not_for_an_engine(
    run: ObservedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.executor.missing = "no agent has a session: 1 episode waiting; open a session with PUT URL"
    run.status.enter(TRAINING)
    run.status.update()
    assert run.written["root_causes"] == ["agents"]
    time.sleep(0.6)
    run.status.update()
    (notice,) = run.notices
    assert "trainer ultimately waits for agents" in notice.splitlines()[0]
    assert "engine 0" not in notice
    print_status(run.out, as_json=False)
    assert "1 episode waiting; open a session with PUT URL" in capsys.readouterr().out
    run.status.end("stopped", "SIGINT")
    assert run.written["missing_agents"] == ""


def test_clients_are_told_how_the_run_has_ended(run: ObservedRun) -> None:
    after = "after 0 of 20 steps"
    assert run.status.how_ended("") == ("finished", "the run has finished: 0 steps trained")
    sentence = f"the run was stopped by SIGINT {after}; dora serve --resume resumes it"
    assert run.status.how_ended("SIGINT") == ("stopped", sentence)
    assert "the console of the run has the error" in run.status.how_ended("an error").sentence
    run.status.fail(RunError("no reward\nfor a minute"))
    sentence = f"the run has failed {after}: no reward; dora serve --resume resumes it"
    assert run.status.how_ended("an error") == ("failed", sentence)


def test_a_full_disk_does_not_stop_the_run(run: ObservedRun) -> None:
    run.status.on_event(Published(2, "v2"))
    run.status.update()
    before = run.written
    (run.out / f"{STATUS_FILE}.{os.getpid()}.draft").mkdir()  # writing fails as on a full disk
    run.status.enter("saving")
    run.status.update()
    assert run.written == before
