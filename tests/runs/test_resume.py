"""A run whose processes were all killed is resumed: it loses no sample and keeps its guarantees."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.journal.recorded_runs import write_chained
from tests.runs.resumable import (
    SLOW,
    STEPS,
    ResumableRun,
    check_finished,
    check_redone,
    check_same_tokens,
    forge_manifest,
    refusal,
)
from tests.runtime.running import dora, journal, metrics, query, summary
from tests.runtime.tiny import MODEL, PROMPTS

from dora.core.codec import SNAPSHOT_SCHEMA
from dora.engine.messages import OutputPart
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.runtime.recovery.resume import read_recorded_journal
from dora.runtime.rollout.partial_outputs import FILE_NAME, read_records


def test_a_run_that_was_killed_three_times_finishes(resumable: ResumableRun) -> None:
    """Once with an incomplete line in its journal, once with an incomplete checkpoint."""
    resumable.kill_after(resumable.start(**SLOW), 40)
    scored = {key: row for key, row in resumable.samples().items() if row[1] is not None}
    path = resumable.out / "journal.jsonl"
    *complete, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(complete) + last[:9])

    run = resumable.resume(trainer__keep_last=3, **SLOW)
    run.wait_until((resumable.out / "checkpoints" / "step-4").is_dir, "two checkpoints")
    resumable.kill_after(run, 1)
    checkpoints = resumable.out / "checkpoints"
    (checkpoints / "step-4" / "optimizer.pt").write_bytes(b"half")
    (checkpoints / "step-5.draft").mkdir()

    core = checkpoints / "step-2" / "core.json"
    with tampered(core, '"next_index": ', '"next_index":1'):
        forge_manifest(core.parent)
        assert "step-2 is not a checkpoint of this run's journal" in refusal(resumable.out)
    older_schema = f'"schema": {SNAPSHOT_SCHEMA}', f'"schema": {SNAPSHOT_SCHEMA - 1}'
    core.write_text(core.read_text().replace(*older_schema))
    forge_manifest(core.parent)
    with other_weights(resumable.task.parent / "start"):
        assert "start' no longer holds the weights that the run started with" in refusal(resumable.out)
    run = resumable.resume(**SLOW)
    resumable.kill_after(run, 20)
    printed = run.end().out
    assert f"resumed from {checkpoints / 'step-2'}: 2 trained steps kept" in printed
    assert "has changed" not in printed
    check_finished(resumable.out, resumable.resume().end())
    after = resumable.samples()
    assert {key: after[key][:3] for key in scored} == {key: row[:3] for key, row in scored.items()}
    assert {row[3] for row in after.values()} == {"trained"}
    assert sorted(found.name for found in checkpoints.iterdir()) == ["step-6"]
    check_redone(resumable.out)


def test_restarted_requests_get_the_same_tokens(resumable: ResumableRun) -> None:
    """With one version only the seed can change them. The trainer accumulates what was committed before."""
    one = {"run__steps": 1, "trainer__batch_size": 6, "orchestrator__max_staleness": 0}
    run = resumable.start(**one, **SLOW, trainer__micro_batch_tokens=32, engine__max_num_seqs=2)
    run.wait_until(
        lambda: "commit" in [line["kind"] for line in journal(resumable.out)], "a group in the batch"
    )
    resumable.kill_after(run, 0)
    resumable.resume().succeed()
    assert metrics(resumable.out)[0]["actor/num_tokens_early"] > 0
    check_same_tokens(resumable, **one)


def test_unfinished_outputs_continue_from_their_last_durable_token(resumable: ResumableRun) -> None:
    """After SIGKILL of everything, the resumed run has the tokens that were durable as soon as it decodes."""
    one = {"run__steps": 1, "orchestrator__max_staleness": 0, "engine__num_engines": 1}
    run = resumable.start(**one, engine__min_step_time="400ms")
    path = resumable.out / FILE_NAME
    run.wait_until(lambda: path.is_file() and path.stat().st_size > 2000, "durable tokens")
    resumable.kill_after(run, 0)
    killed_at = len(journal(resumable.out))
    found = [part for _, part in read_records(path.read_bytes()) if isinstance(part, OutputPart)]
    parts = {part.request: part.start + len(part.token_ids) for part in found}
    resumable.resume(engine__min_step_time="400ms").succeed()
    first: dict[tuple[int, ...], int] = {}
    for line in journal(resumable.out)[killed_at:]:
        if line["kind"] == "progress_reported":
            for request, num_tokens in line["lengths"]:
                if num_tokens:
                    first.setdefault(tuple(request), num_tokens)
    kept = {request: num for request, num in parts.items() if tuple(request) in first}
    assert kept
    (resumed,) = (line for line in journal(resumable.out) if line["kind"] == "resumed")
    assert {tuple(request): num for request, num in resumed["kept_tokens"]}.items() >= kept.items()
    assert all(first[tuple(request)] >= num for request, num in kept.items())
    check_same_tokens(resumable, **one)


def test_a_run_stopped_by_ctrl_c_resumes_where_it_was(resumable: ResumableRun) -> None:
    run = resumable.start(trainer__save_freq=0, **SLOW)
    run.wait_for_steps(2)
    os.kill(run.pid, signal.SIGINT)
    assert run.end().code == 130
    assert f"dora train --resume {resumable.out} resumes the run" in run.end().out
    stopped = summary(resumable.out)
    reward = resumable.task.parent / "task.py"
    first = reward.read_text()
    reward.write_text(f"{first}\n# changed\n")
    ended = resumable.resume(engine__num_engines=1).end()
    assert f"{stopped['steps']} trained steps kept, 0 redone" in ended.out
    assert f"warning: {reward} has changed; the steps from now on use the new file" in ended.out
    check_finished(resumable.out, ended)
    assert summary(resumable.out)["redone_steps"] == 0
    copies = {path.read_text() for path in (resumable.out / "code").glob("reward.function.*.py")}
    assert copies == {first, reward.read_text()}


def test_a_run_resumes_with_less_memory_and_redone_steps_differ_by_rounding(resumable: ResumableRun) -> None:
    """As after an out-of-memory error. The steps after the last checkpoint are redone."""
    run = resumable.start(trainer__save_freq=2, **SLOW)
    run.wait_for_steps(3)
    resumable.kill_after(run, 0)
    lines = journal(resumable.out)
    before = {line["version"]: line["digest"] for line in lines if line["kind"] == "published"}
    continued = f"start another run from its weights and optimizer (--continue-from {resumable.out}"
    assert continued in refusal(resumable.out, "trainer.batch_size=4")
    ended = resumable.resume(
        trainer__micro_batch_tokens=32,
        trainer__logits_chunk_tokens=5,
        trainer__activation_checkpointing="true",
        trainer__offload_optimizer="true",
        engine__version_slots=1,
    ).end()
    check_finished(resumable.out, ended)
    again = [line for line in journal(resumable.out)[len(lines) :] if line["kind"] == "published"]
    differing = [line for line in again if line["digest"] != before.get(line["version"], line["digest"])]
    assert summary(resumable.out)["redone_steps"] > 0
    assert summary(resumable.out)["differing_redone_versions"] == len(differing) > 0
    joined = [line["version_slots"] for line in journal(resumable.out) if line["kind"] == "engine_joined"]
    assert joined == [3, 3, 1, 1]


def test_a_run_killed_before_its_last_checkpoint_finishes(resumable: ResumableRun) -> None:
    """All events are recorded, but the last checkpoint and the summary are not written."""
    resumable.start(trainer__save_freq=0).succeed()
    shutil.rmtree(resumable.out / "checkpoints")
    (resumable.out / "summary.json").unlink()
    check_finished(resumable.out, resumable.resume().end())
    again = dora("train", "--resume", resumable.out)
    assert again.code == 2
    assert f"has finished all its {STEPS} steps" in again.err
    with tampered(resumable.out / "summary.json", '"stopped": ""', '"stopped": "Ctrl-C"'):
        journal_lines = read_recorded_journal(resumable.out, len(PROMPTS)).lines
        assert journal_lines, "the evaluation after training is due"


def test_a_run_killed_before_training_starts_again(resumable: ResumableRun) -> None:
    run = resumable.start()
    run.wait_until((resumable.out / "journal.jsonl").is_file, "the journal")
    os.killpg(run.pid, signal.SIGKILL)
    run.end()
    check_finished(resumable.out, resumable.resume().end())
    assert summary(resumable.out)["attempts"] == 1


def test_a_run_that_cannot_be_resumed_is_refused_and_left_unchanged(
    resumable: ResumableRun, tmp_path: Path
) -> None:
    run = resumable.start(run__steps=1000, trainer__save_freq=0)
    run.wait_for_steps(1)
    assert "this run is in progress; stop it first" in refusal(resumable.out)
    resumable.kill_after(run, 1)
    with (resumable.out / "journal.jsonl").open("a") as file:
        file.write('{"half a line')
    files = resumable.out / "journal.jsonl", resumable.out / "metrics.jsonl"
    before = [file.read_bytes() for file in files], resumable.samples()
    assert "is not the folder of a run" in refusal(tmp_path)
    assert "trainer.lr was 0.01 and cannot become 0.5" in refusal(resumable.out, "trainer.lr=0.5")
    assert "run.steps was 1000 and cannot become 9" in refusal(resumable.out, "run.steps=9")
    with tampered(resumable.out / "config.toml", "lr = 0.01", "lr = 0.02"):
        assert "has changed since the run started" in refusal(resumable.out)
    with tampered(resumable.task.parent / "prompts.jsonl", '"1', '"2'):
        assert "row 0 has changed since the run started" in refusal(resumable.out)
    with tampered(resumable.task.parent / "prompts.jsonl", '{"prompt": "10:"}\n', ""):
        assert "the dataset had 7 prompts and now has 6" in refusal(resumable.out)
    with tampered(resumable.out / "journal.jsonl", '"kind": "admit"', '"kind": "commit"'):
        assert "neither an event nor an action" in refusal(resumable.out)
    with tampered(resumable.out / "journal.jsonl", '"deadline": 2', '"deadline": 3'):
        assert "it was changed, or lines before it were removed or inserted" in refusal(resumable.out)
        *complete, _ = files[0].read_text().splitlines()
        write_chained(files[0], [json.loads(line) for line in complete])
        assert "this version of DORA-RL gives other actions than the journal" in refusal(resumable.out)
    (resumable.out / "tensorboard").write_text("not a folder")
    assert "tensorboard cannot start" in refusal(resumable.out, 'metrics.report_to=["tensorboard"]')
    assert ([file.read_bytes() for file in files], resumable.samples()) == before
    query(resumable.out, "delete from samples where trained_step = 0 and sibling = 1")
    assert "lacks samples of group" in refusal(resumable.out)


@contextlib.contextmanager
def other_weights(folder: Path) -> Iterator[None]:
    """Put another model of the same shapes into a folder, for a while."""
    path = folder / "model.safetensors"
    before = path.read_bytes()
    save_pretrained(folder, MODEL, initial_weights(MODEL, seed=99))
    try:
        yield
    finally:
        path.write_bytes(before)


@contextlib.contextmanager
def tampered(path: Path, old: str, new: str) -> Iterator[None]:
    """Replace a text in a file, for a while."""
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    yield
    path.write_text(before)
