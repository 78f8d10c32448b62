"""Runs that get more steps when they are resumed, also after their end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.runs.resumable import SLOW, STEPS, ResumableRun, check_finished, refusal
from tests.runtime.running import dora, journal, metrics, summary

from dora.report.data import run_data

CONSTANT = {"trainer__lr_decay": "constant"}
EVALUATED = {"eval__path": "gcd", "eval__num_prompts": 3, "eval__every": 2}


def digests(out: Path) -> dict[int, str]:
    """Version -> digest, as last published."""
    return {line["version"]: line["digest"] for line in journal(out) if line["kind"] == "published"}


def rates(out: Path) -> list[float]:
    """The learning rate of each step."""
    return [line["actor/lr"] for line in metrics(out) if "actor/lr" in line]


def test_a_finished_run_gets_more_steps(resumable: ResumableRun) -> None:
    """Twice; every later resume and every command knows the number of steps."""
    out = resumable.out
    resumable.start(run__steps=4, **CONSTANT, **EVALUATED).succeed()
    config = (out / "config.toml").read_bytes()
    assert "has finished all its 4 steps; --set run.steps=N, with a larger N" in refusal(out)
    assert "run.steps was 4 and cannot become 3" in refusal(out, "run.steps=3")
    ended = resumable.resume(run__steps=5).succeed()
    assert "4 trained steps kept, 0 redone" in ended.out
    assert "the run has 5 steps from now on, 4 before" in ended.out
    assert "after training (version 5, 3 held-out prompts)" in ended.out
    assert "run.steps was 5 and cannot become 4" in refusal(out, "run.steps=4")
    assert "has finished all its 5 steps" in refusal(out)

    run = resumable.resume(run__steps=STEPS, **SLOW)
    run.wait_until(lambda: digests(out).get(STEPS, "") != "", "the last version")
    resumable.kill_after(run, 0)
    ended = resumable.resume().end()
    check_finished(out, ended, evaluated=[0, 2, 4, 5, STEPS])
    assert (out / "config.toml").read_bytes() == config
    assert [line.get("num_steps") for line in journal(out) if line["kind"] == "resumed"] == [5, STEPS, None]
    assert rates(out) == [0.01] * STEPS
    assert [found["version"] for found in summary(out)["evaluations"]] == [0, 2, 4, 5, STEPS]
    for line in (line for line in metrics(out) if "timing_s/step" in line):  # evaluations do not count
        phases = [line[f"timing_s/{phase}"] for phase in ("wait_for_batch", "train", "publish")]
        assert line["timing_s/step"] == pytest.approx(sum(phases), abs=2e-4)
    data = run_data(out)
    assert (data["limits"]["num_steps"], data["config"]["run"]["steps"]) == (STEPS, STEPS)
    status: dict[str, Any] = json.loads((out / "status.json").read_text())
    assert (status["steps"], status["num_steps"]) == (STEPS, STEPS)


def test_a_stopped_run_gets_more_steps(resumable: ResumableRun) -> None:
    """Its groups keep their deadlines; a damaged checkpoint makes it redo steps with their old rates."""
    out = resumable.out
    run = resumable.start(run__steps=4, trainer__keep_last=3, **SLOW)
    run.wait_for_steps(3)
    os.kill(run.pid, signal.SIGINT)
    assert run.end().code == 130
    (newest, *_) = sorted((out / "checkpoints").iterdir(), reverse=True)
    (newest / "optimizer.pt").write_bytes(b"damaged")
    before = digests(out)
    stopped_after = summary(out)["steps"]
    sentence = "trainer.lr_decay = 'linear' lowers the learning rate to 0 at step 4, so the schedule"
    assert sentence in refusal(out, f"run.steps={STEPS}")
    refused = refusal(out, "trainer.lr_decay=constant")
    assert "trainer.lr_decay was 'linear' and cannot become 'constant'" in refused
    assert "it may change together with a larger run.steps" in refused
    ended = resumable.resume(run__steps=STEPS, **CONSTANT).end()
    check_finished(out, ended)
    assert summary(out)["redone_steps"] > 0
    linear = [0.01 * (4 - step) / 4 for step in range(stopped_after)]
    assert rates(out) == pytest.approx([*linear, *[0.01] * (STEPS - stopped_after)])
    assert {version: digests(out)[version] for version in before} == before


def test_a_longer_run_equals_one_with_that_many_steps_from_the_start(
    resumable: ResumableRun, task: Path
) -> None:
    synchronous: dict[str, Any] = {
        **CONSTANT,
        "trainer__deterministic": "true",
        "engine__exact_logprobs": "true",
        "orchestrator__max_staleness": 0,
    }
    resumable.start(**synchronous, run__steps=3).succeed()
    check_finished(resumable.out, resumable.resume(run__steps=STEPS).end())
    other = ResumableRun(task, resumable.out.with_name("other"))
    other.start(**synchronous).succeed()
    assert digests(resumable.out) == digests(other.out)
    assert resumable.samples() == other.samples()


def test_a_longer_linear_schedule_falls_to_0_at_the_new_end(resumable: ResumableRun) -> None:
    """Or to another lowest rate. `dora status` and `dora report` work on it, as on any run."""
    out = resumable.out
    resumable.start(run__steps=2, trainer__min_lr_ratio=0.5).succeed()
    resumable.resume(run__steps=4, trainer__min_lr_ratio=0).succeed()
    check_finished(out, resumable.resume(run__steps=STEPS, trainer__lr_decay="linear").end())
    later = [0.01 * (STEPS - step) / STEPS for step in range(4, STEPS)]
    assert rates(out) == pytest.approx([0.01, 0.0075, 0.005, 0.0025, *later])
    assert dora("report", out).code == 0
