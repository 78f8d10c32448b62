"""Processes crash in the middle of a run: it continues if it can, else it ends with a clear error."""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from tests.runs.conftest import StartRun
from tests.runtime.running import CommandResult, Run, dora, journal, summary, wait_until_gone

from dora.config import load
from dora.config.schema import Config
from dora.core.types import RequestId
from dora.engine.request import Request
from dora.errors import DataError, RunError
from dora.model.pretrained import load_pretrained
from dora.runtime.control.admin import ControlDir
from dora.runtime.run import resume, train
from dora.runtime.run_dir import claim
from dora.runtime.run_setup import RunSetup

ENGINES, TRAINER = slice(0, 2), 2
SLOW = {"engine__min_step_time": "60ms", "run__steps": 5}  # every response takes more than a second
LONG = {"engine__min_step_time": "40ms", "run__steps": 1000}  # does not end by itself


def check_failed(run: Run, workers: list[psutil.Process], message: str) -> CommandResult:
    """Exit code 1, a message without a traceback, a readable journal, nothing left behind."""
    ended = run.end()
    assert ended.code == 1, ended
    assert message in ended.err
    assert "Traceback" not in ended.err, ended.err
    assert summary(run.out)["pending_groups"] > 0
    check_cleaned_up(run, workers)
    return ended


def check_cleaned_up(run: Run, workers: list[psutil.Process]) -> None:
    """No process and no weights in memory are left, and audit and replay accept the journal."""
    assert wait_until_gone(workers) == []
    assert run.weight_folders() == []
    run.check_records()


def decodes(run: Run, engine: int) -> bool:
    """Whether the engine's last event reports tokens of unfinished requests."""
    lines = [line for line in journal(run.out) if line.get("engine") == engine]
    if not lines or lines[-1]["kind"] != "progress_reported":
        return False
    return any(length > 0 for _, length in lines[-1]["lengths"])


def test_a_killed_engine_costs_only_its_unfinished_responses(start_run: StartRun) -> None:
    run = start_run(**SLOW, runtime__max_restarts=0)
    run.wait_until(lambda: decodes(run, 0), "work on engine 0")
    workers = run.workers()
    workers[0].kill()
    ended = run.succeed()
    assert "engine 0 lost (killed by SIGKILL)" in ended.out
    s = summary(run.out)
    assert (s["engine_failures"], s["trained_groups"], s["pending_groups"]) == (1, 10, 0)
    assert s["kept_tokens"] > 0
    assert f"engines, or the whole run, were lost 1 time: {s['kept_tokens']} token" in run.audit()
    check_generated_again(run)
    check_cleaned_up(run, workers)


def check_generated_again(run: Run) -> None:
    """The requests of the lost engine restart on the other one, on the same version."""
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


def test_an_engine_without_heartbeats_is_lost_after_its_timeout(start_run: StartRun) -> None:
    run = start_run(**SLOW, runtime__heartbeat_timeout_s=3.0)
    run.wait_for_steps(1)
    workers = run.workers()
    workers[1].suspend()
    ended = run.succeed()
    assert "engine 1 lost (no heartbeat for more than runtime.heartbeat_timeout_s = 3 s" in ended.out
    assert summary(run.out)["engine_failures"] == 1
    check_cleaned_up(run, workers)


def test_a_run_that_lost_all_engines_fails_with_a_message(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__max_restarts=0)
    run.wait_for_steps(1)
    workers = run.workers()
    for engine in workers[ENGINES]:
        engine.kill()
    check_failed(run, workers, "the last engine is lost: engine ")
    assert summary(run.out)["engine_failures"] == 2


def test_a_run_that_may_not_restart_its_trainer_fails_with_a_message(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__max_restarts=0)
    run.wait_for_steps(1)
    workers = run.workers()
    workers[TRAINER].kill()
    check_failed(run, workers, "trainer was killed by SIGKILL. The run cannot continue without its trainer")


def test_workers_exit_after_their_driver(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    workers = run.workers()
    assert len(workers) == 4
    os.kill(run.pid, signal.SIGKILL)
    assert wait_until_gone(workers) == []
    run.audit()
    assert dora("replay", run.out).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stopped_run_ends_cleanly(start_run: StartRun, number: signal.Signals) -> None:
    run = start_run(**LONG)
    run.wait_for_steps(1)
    workers = run.workers()
    os.killpg(run.pid, number)  # as a terminal, timeout and batch systems do
    ended = run.end()
    assert (ended.code, ended.err) == (130, ""), ended
    assert f"stopped by {number.name}" in ended.out
    s = summary(run.out)
    assert s["stopped"] == number.name
    (saved,) = (run.out / "checkpoints").iterdir()
    assert saved.name == f"step-{s['steps']}" != "step-0"
    assert load_pretrained(saved)
    assert s["pending_groups"] > 0
    check_cleaned_up(run, workers)


def test_a_stopped_run_that_cannot_save_a_checkpoint_says_so(start_run: StartRun) -> None:
    """As on a Ray cluster that a batch system stops with the run."""
    run = start_run(**LONG, runtime__trainer_timeout_s=3.0)
    run.wait_for_steps(1)
    workers = run.workers()
    workers[TRAINER].suspend()
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert (ended.code, ended.err) == (130, ""), ended
    lost = "the last steps have no checkpoint, so that a resume trains them again: trainer sent no heartbeat"
    assert lost in ended.out
    check_cleaned_up(run, workers)


class StoppedSetup(RunSetup):
    """A signal that also reaches the workers: the driver finds first that one cannot be replaced."""

    def requests(self, ids: Sequence[RequestId], version: int) -> list[Request]:
        signal.raise_signal(signal.SIGTERM)
        raise RunError("the head of the Ray cluster is lost")


def test_an_error_after_the_signal_does_not_make_a_stopped_run_a_failed_one(
    task: Path, tmp_path: Path
) -> None:
    output = io.StringIO()
    ended = train(load.read_config(task), tmp_path / "run", Console(file=output, width=200), StoppedSetup)
    assert ended["stopped"] == "SIGTERM"
    assert "while the run stopped: the head of the Ray cluster is lost" in output.getvalue()
    assert "stopped by SIGTERM" in output.getvalue()


def test_a_run_stopped_while_it_starts_ends_cleanly(start_run: StartRun) -> None:
    run = start_run(**LONG)
    run.wait_until(lambda: len(run.workers()) == 4, "four workers")
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    ended = run.end()
    assert (ended.code, ended.err) == (130, ""), ended
    assert run.weight_folders() == []


def test_a_hanging_trainer_ends_the_run_after_its_timeout(start_run: StartRun) -> None:
    run = start_run(**LONG, runtime__trainer_timeout_s=2.0, runtime__max_restarts=0)
    run.wait_until(lambda: decodes(run, 0), "work on engine 0")
    workers = run.workers()
    workers[TRAINER].suspend()
    reason = "trainer sent no heartbeat for more than runtime.trainer_timeout_s = 2 s"
    ended = check_failed(run, workers, reason)
    assert f"Resume the run: dora train --resume {run.out}" in ended.err
    assert "ultimately waits for trainer" in ended.out


def test_a_run_whose_weight_store_is_removed_says_so_and_can_be_resumed(start_run: StartRun) -> None:
    run = start_run(run__steps=30, engine__min_step_time="60ms", trainer__save_freq=2)
    run.wait_for_steps(3)
    workers = run.workers()
    (folder,) = run.weight_folders()
    shutil.rmtree(folder)
    ended = check_failed(run, workers, f"the weight store {folder} was removed during the run")
    assert f"Resume the run: dora train --resume {run.out}" in ended.err
    assert "restarting" not in ended.out, "no replacement can work"
    assert "disk space" not in ended.err
    resumed = dora("train", "--resume", run.out, "--set", "engine.min_step_time=1ms")
    assert (resumed.code, resumed.err) == (0, "")
    assert "2 trained steps kept" in resumed.out
    assert "C1 kept, C2 kept, C3 kept" in resumed.out


class RacingSetup(RunSetup):
    """While the files are read, another process begins to drive the run; here it is the same process."""

    @classmethod
    def make(cls, config: Config, out: Path) -> RunSetup:
        setup = RunSetup.make(config, out)
        ControlDir(out)
        (out / "journal.jsonl").write_text("the other driver's header\n")
        return setup


def test_a_second_resume_at_the_same_moment_removes_no_file(task: Path, tmp_path: Path) -> None:
    """The run crashed before its first event, so a resume starts it again."""
    out = tmp_path / "run"
    claim(out, load.read_config(task))
    with pytest.raises(RunError, match="so another process drives this run"):
        resume(out, (), Console(quiet=True), RacingSetup)
    assert (out / "journal.jsonl").read_text() == "the other driver's header\n"


class LateSetup(RunSetup):
    """A prompt turns out to be wrong once the run has begun."""

    def requests(self, ids: Sequence[RequestId], version: int) -> list[Request]:
        if ids[0].group.row >= 2:
            raise DataError("row 2 cannot be encoded")
        return super().requests(ids, version)


def test_wrong_input_that_is_found_late_removes_no_file(task: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match="row 2 cannot be encoded"):
        train(load.read_config(task, ["data.shuffle=false"]), out, Console(quiet=True), LateSetup)
    assert journal(out)
    resumed = dora("train", "--resume", out)
    assert resumed.code == 0, resumed
    assert (summary(out)["c1"], summary(out)["c2"], summary(out)["c3"]) == (True, True, True)
