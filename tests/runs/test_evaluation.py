"""Evaluations in whole runs and without training: crashes meanwhile lose no response."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import StartRun
from tests.runs.resumable import SLOW, ResumableRun, check_finished
from tests.runs.resumable import STEPS as LAST
from tests.runtime.running import Run, dora, journal, metrics, settings, summary
from tests.runtime.tiny import PROMPTS, write_task

from dora import api
from dora.errors import InputError

STEPS = 12
CHANGES: dict[str, object] = {
    "run__steps": STEPS,
    "eval__num_prompts": 4,
    "eval__num_samples": 2,
    "eval__every": 4,
    "trainer__save_freq": 2,
    "engine__min_step_time": "25ms",  # so that an evaluation is still running when the test acts
}


def start(start_run: StartRun, task: Path) -> Run:
    """Start a run and wait until three responses of the evaluation during training are finished and another
    is being generated.
    """
    run = start_run(eval__path=task.parent / "prompts.jsonl", **CHANGES)
    run.wait_until(lambda: len(responses(run.out)) >= 3 and running(run.out) != [], "an evaluation")
    return run


def responses(out: Path) -> list[dict[str, Any]]:
    """Finished responses of the evaluations during and after training."""
    return [line for line in journal(out) if line["kind"] == "request_finished" and line["request"][0] < -1]


def running(out: Path) -> list[int]:
    """Engines that generate responses of these evaluations now."""
    owner: dict[tuple[int, ...], int] = {}
    for line in journal(out):
        if line["kind"] == "generate":
            owner |= {tuple(r): line["engine"] for r in line["requests"] if r[0] < -1}
        elif line["kind"] == "migrated":
            owner[tuple(line["request"])] = line["destination"]
        elif line["kind"] == "request_finished":
            owner.pop(tuple(line["request"]), None)
    return [engine for request, engine in owner.items() if request[0] < -1]


def check(run: Run) -> list[dict[str, Any]]:
    """The run has finished with all its evaluations; returns the journal."""
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended
    run.check_records()
    s, lines = summary(run.out), journal(run.out)
    assert s["pending_groups"] == 0
    started = [line["version"] for line in lines if line["kind"] == "start_evaluation"]
    skipped = [line["version"] for line in lines if line["kind"] == "skip_evaluation"]
    assert started[:2] == [0, 4]
    assert sorted(started + skipped) == [0, 4, 8, STEPS]
    evaluated = [line["val/version"] for line in metrics(run.out) if "val/version" in line]
    assert evaluated == [e["version"] for e in s["evaluations"]] == started
    assert [line["step"] for line in metrics(run.out) if "val/version" not in line] == [*range(STEPS)]
    assert all(e["num_failed"] == 0 and "pass@2_low" in e for e in s["evaluations"])
    finished = [tuple(line["request"]) for line in responses(run.out)]
    assert len(finished) == len({*finished}) == 4 * 3 * len(started[1:])
    for version in started[1:-1]:
        assert re.search(rf"evaluation of version {version} \(now at step \d+\): sampled ", ended.out)
    return lines


def test_training_continues_if_an_engine_crashes_during_an_evaluation(
    start_run: StartRun, task: Path
) -> None:
    run = start(start_run, task)
    run.workers()[running(run.out)[0]].kill()
    lines = check(run)
    kinds = [line["kind"] for line in lines]
    during = kinds[kinds.index("trained") :]
    during = during[during.index("start_evaluation") : during.index("finish_evaluation")]
    assert during.count("trained") >= 2
    assert during.count("engine_lost") == 1
    history = dora("why", run.out, "--", "-5/0/1").out
    assert "admitted at version 4 for its evaluation: it is not trained on" in history
    assert "scored: reward" in history


def test_an_evaluation_continues_after_a_resume(start_run: StartRun, task: Path) -> None:
    run = start(start_run, task)
    run.kill()
    before = {tuple(line["request"]) for line in responses(run.out)}
    with (run.out / "metrics.jsonl").open("a") as file:  # as if the run had crashed after its last evaluation
        file.write(json.dumps({"step": 1, "val/version": STEPS}) + "\n")
    lines = check(start_run(None))
    resumed = [line["kind"] for line in lines].index("resumed")
    again = {tuple(r) for line in lines[resumed:] if line["kind"] == "generate" for r in line["requests"]}
    assert before
    assert before.isdisjoint(again), "a finished response is generated again"


@pytest.mark.parametrize("version", [0, LAST])
def test_an_evaluation_before_or_after_training_continues_after_a_resume(
    resumable: ResumableRun, task: Path, version: int
) -> None:
    """It is part of the journal, and what was trained before it is saved."""

    def requests(kind: str) -> list[tuple[int, ...]]:
        lines = [line for line in journal(out) if line["kind"] == kind]
        found = [r for line in lines for r in line.get("requests", [line.get("request")])]
        return [tuple(request) for request in found if request[0] == -1 - version]

    out, held_out = resumable.out, {"eval__path": task.parent / "prompts.jsonl", "eval__num_prompts": 7}
    run = resumable.start(**held_out, **SLOW, engine__max_num_seqs=4)
    run.wait_until(lambda: len(requests("request_finished")) >= 2, f"the evaluation of version {version}")
    resumable.kill_after(run, 0)
    before = requests("request_finished")
    assert (out / "checkpoints" / f"step-{LAST}").is_dir() == (version == LAST)
    assert len(before) < 7 * 2
    ended = resumable.resume().end()
    check_finished(out, ended)
    assert len(requests("request_finished")) == 7 * 2
    generated = requests("generate")
    assert max(generated.count(request) for request in before) == 1, "a finished response is generated again"
    s = summary(out)
    assert [evaluation["version"] for evaluation in s["evaluations"]] == [0, LAST]
    assert None not in (s["eval_before"], s["eval_after"], s["eval_length_p50_before"])
    assert f"after training (version {LAST}, 7 held-out prompts): sampled" in ended.out
    assert json.loads((out / "status.json").read_text())["phase"] == "finished"


RANKED = """
import os

def reward(prompt, completion, kind="", **row):
    if kind != "held-out":
        return completion.count("7") + len(set(completion)) / 100
    with open({path!r}, "ab") as file:
        file.write(b".")
    number = (os.path.getsize({path!r}) - 1) // {num}  # of the evaluation
    return {reward}
"""


def write_ranked(folder: Path, reward: str) -> tuple[Path, Path]:
    """A task with this reward for the `number`-th evaluation, and its three held-out prompts."""
    task = write_task(folder, RANKED.format(path=str(folder / "calls"), num=3 * 2, reward=reward))
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({**row, "kind": "held-out"}) + "\n" for row in PROMPTS[:3]))
    return task, held_out


def test_the_best_checkpoint_outlasts_a_resume_unless_a_user_removes_it(tmp_path: Path) -> None:
    """Each evaluation is worse than the one before. Version 0, the best, has no checkpoint."""
    task, held_out = write_ranked(tmp_path, "1 / (1 + number)")
    keys: dict[str, Any] = {"eval__every": 2, "trainer__keep_best": "true", "trainer__lr_decay": "constant"}
    resumable = ResumableRun(task, tmp_path / "run")
    out, loaded = resumable.out, api.Run(resumable.out)

    def kept() -> set[str]:
        return {path.name for path in (out / "checkpoints").iterdir()}

    try:
        run = resumable.start(eval__path=held_out, eval__num_prompts=3, **keys, **SLOW)
        run.wait_until(lambda: any(line.get("val/version") == 2 for line in metrics(out)), "version 2")
        run.wait_until(lambda: any(line.get("digest") and line["version"] == 5 for line in journal(out)), "5")
        resumable.kill_after(run, 0)
        with pytest.raises(InputError, match="no summary"):
            _ = loaded.summary
        assert loaded.best_checkpoint == out / "checkpoints" / "step-2"
        ended = resumable.resume().end()
        check_finished(out, ended, evaluated=[e["version"] for e in summary(out)["evaluations"]])
        assert kept() == {"step-2", f"step-{LAST}"}
        assert (summary(out)["best_version"], summary(out)["best_checkpoint"]) == (2, "checkpoints/step-2")
        assert "checkpoints/step-2, held-out reward 0.5" in ended.out
        shutil.rmtree(loaded.best_checkpoint)
        resumable.resume(run__steps=LAST + 2).succeed()
        assert kept() == {f"step-{LAST}", f"step-{LAST + 2}"}
        assert loaded.best_checkpoint.name == f"step-{LAST}"
        assert summary(out)["best_version"] == LAST
    finally:
        resumable.kill_all()


def test_a_run_whose_last_version_is_the_best_keeps_only_its_checkpoint(tmp_path: Path) -> None:
    task, held_out = write_ranked(tmp_path, "number")
    keys = {"eval.every": 2, "trainer.save_freq": 2, "trainer.keep_last": 1, "trainer.keep_best": "true"}
    given = settings({**keys, "eval.path": held_out, "eval.num_prompts": 3, "run.steps": 4})
    ended = dora("train", task, "--out", tmp_path / "run", *given)
    assert ended.code == 0, ended.err
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-4"]


def test_an_evaluation_without_training_survives_a_crash_and_a_resume(task: Path, tmp_path: Path) -> None:
    """It is a run without steps: nearly greedy responses have the rewards of the greedy one."""
    changes: dict[str, Any] = {
        "eval__path": task.parent / "prompts.jsonl",
        "eval__num_prompts": 7,
        "eval__num_samples": 3,
        "eval__temperature": 1e-3,
        "engine__max_num_seqs": 2,
        "engine__min_step_time": "25ms",
    }
    options = ("--model", str(task.parent / "start"))
    run = Run(task, tmp_path / "run", command="eval", options=options, **changes)

    def finished() -> list[tuple[int, ...]]:
        return [tuple(line["request"]) for line in journal(run.out) if line["kind"] == "request_finished"]

    run.wait_until(lambda: len(finished()) >= 3, "responses")
    run.workers()[0].kill()
    run.wait_until(lambda: len(finished()) >= 6, "responses of the other engine")
    run.kill()
    assert len(before := finished()) < 7 * 4
    ended = Run(None, run.out).end()
    assert (ended.code, ended.err) == (0, ""), ended
    run.check_records()
    assert len(finished()) == len({*finished()}) == 7 * 4 > len(before)
    (evaluation,) = summary(run.out)["evaluations"]
    assert evaluation["reward_mean"] == pytest.approx(evaluation["greedy_reward_mean"])
    assert metrics(run.out)[-1]["val/reward_mean"] == evaluation["reward_mean"]
    assert "greedy_reward_mean" in ended.out
    assert "trainer" not in ended.out
    assert not (run.out / "checkpoints").exists()
    assert dora("audit", run.out, "--deep", "5").code == 0
    check_finished_evaluation(run.out)


def check_finished_evaluation(run: Path) -> None:
    """Neither a repeated command nor a resume changes it, and it is no start of a training run."""
    files = [run / "metrics.jsonl", run / "samples.sqlite", run / "summary.json"]
    before = [file.read_bytes() for file in files]
    config = run.parent / "given.toml"
    config.write_bytes((run / "config.toml").read_bytes())
    repeated = dora("eval", config, "--out", run, "--auto-resume")
    assert (repeated.code, repeated.err) == (0, "")
    assert "this run, which only evaluates, has finished" in repeated.out
    assert "has finished" in dora("train", "--resume", run).err
    extended = dora("train", "--resume", run, "--steps", "2", "--set", "trainer.lr_decay=constant")
    assert (extended.code, "this run only evaluates" in extended.err) == (2, True)
    assert [file.read_bytes() for file in files] == before
    assert "finished, the model is evaluated" in dora("status", run).out
