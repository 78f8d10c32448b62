"""`dora train CONFIG --out RUN --auto-resume`: one command starts a run and continues it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.runs.resumable import ResumableRun, check_finished
from tests.runtime.running import CommandResult, Run, dora, journal, summary

CONSTANT: dict[str, Any] = {"trainer__lr_decay": "constant"}


def start(run: ResumableRun, *, pace: str = "100ms", **changes: Any) -> Run:
    """The same command each time, at a pace at which a busy machine, too, sees the run in progress."""
    return run.start(options=["--auto-resume"], engine__min_step_time=pace, **changes)


def refused(run: ResumableRun, **changes: Any) -> str:
    """Why the command is refused."""
    ended = start(run, **changes).end()
    assert (ended.code, ended.out) == (2, ""), ended
    return ended.err


def kept_steps(ended: CommandResult) -> bool:
    """Whether a command has resumed the run."""
    return "trained steps kept" in ended.out or "trained step kept" in ended.out


def test_the_same_command_starts_stops_resumes_and_extends_a_run(resumable: ResumableRun) -> None:
    """The run is stopped as at the end of a job, then killed as on a node that is lost."""
    out = resumable.out
    four: dict[str, Any] = {"run__steps": 4, **CONSTANT}
    run = start(resumable, **four)
    run.wait_for_steps(1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end().code == 130
    resumable.kill_after(start(resumable, **four), 2)
    assert "trainer.lr was 0.01 and cannot become 0.5" in refused(resumable, trainer__lr=0.5, **four)
    ended = start(resumable, **four).succeed()
    assert kept_steps(ended)
    assert (summary(out)["steps"], summary(out)["attempts"]) == (4, 3)

    num_lines = len(journal(out))
    again = start(resumable, **four).succeed()
    assert "this run has finished all its 4 steps" in again.out
    assert "run folder" in again.out
    assert (len(journal(out)), summary(out)["attempts"]) == (num_lines, 3)
    assert "run.steps was 4 and cannot become 3" in refused(resumable, run__steps=3, **CONSTANT)

    metrics, seal = out / "metrics.jsonl", (out / "journal.jsonl").read_text().splitlines()[-1]
    recorded = metrics.read_text()
    metrics.write_text(recorded + "\n")
    for _ in range(2):  # a repeated command does not hide a change after the end
        assert start(resumable, **four).end().code == 1
    assert (out / "journal.jsonl").read_text().splitlines()[-1] == seal
    metrics.write_text(recorded)
    moved = (out / "checkpoints").rename(out / "exported")
    ended = start(resumable, **four).end()
    assert (ended.code, kept_steps(ended)) == (1, False), ended
    assert "its last checkpoint was removed or is damaged; dora train --resume" in ended.out
    moved.rename(out / "checkpoints")

    assert kept_steps(start(resumable, pace="10ms", **CONSTANT).succeed())
    check_finished(out, start(resumable, pace="10ms", **CONSTANT).end())
    assert summary(out)["attempts"] == 4


def test_a_run_that_crashed_before_its_first_event_starts_again(resumable: ResumableRun) -> None:
    run = start(resumable)
    run.wait_until((resumable.out / "journal.jsonl").is_file, "the journal")
    os.killpg(run.pid, signal.SIGKILL)
    run.end()
    check_finished(resumable.out, start(resumable, pace="10ms").end())
    assert summary(resumable.out)["attempts"] == 1


def test_a_run_in_progress_is_left_alone(resumable: ResumableRun) -> None:
    run = start(resumable, run__steps=1000)
    run.wait_for_steps(1)
    assert "this run is in progress; stop it first" in refused(resumable, run__steps=1000)
    run.kill()


def test_the_option_needs_a_folder(task: Path) -> None:
    for arguments in ([str(task)], [str(task), "--resume", "runs/a"], ["--out", "runs/a"]):
        ended = dora("train", *arguments, "--auto-resume")
        assert ended.code == 2, ended
        assert "Usage" in ended.err
