"""Resuming a run whose files were damaged: what is whole is used, the rest is named, nothing hangs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.runs.resumable import (
    BATCH_SIZE,
    STEPS,
    ResumableRun,
    check_finished,
    forge_manifest,
    write_held_task,
)
from tests.runtime.running import journal, query, summary

from dora.errors import InputError
from dora.runtime.recovery.journal_replay import PreviousRun, read_previous_run
from dora.runtime.recovery.resume import read_recorded_journal, resumed_config
from dora.runtime.run import resume
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import SampleStore
from dora.trainer.checkpoint_folders import write_manifest


@pytest.fixture(scope="module")
def killed_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that was killed after it published version 5, with checkpoints of steps 2 and 4.

    Without its last sample it cannot train step 6, however long the test takes to kill it.
    """
    folder = tmp_path_factory.mktemp("killed")
    config, fifo = write_held_task(folder, num_scored=2 * BATCH_SIZE * STEPS - 1)
    resumable = ResumableRun(config, folder / "run")
    try:
        run = resumable.start(trainer__keep_last=3)
        run.wait_until((resumable.out / "checkpoints" / "step-4").is_dir, "two checkpoints")
        run.wait_until(
            lambda: any(line.get("digest") and line["version"] == 5 for line in journal(run.out)), "5"
        )
        resumable.kill_after(run, 0)
        fifo.unlink()
        yield resumable.out
    finally:
        resumable.kill_all()


@pytest.fixture
def killed(resumable: ResumableRun, killed_out: Path) -> ResumableRun:
    """A copy of the killed run, which the test may damage and resume."""
    shutil.copytree(killed_out, resumable.out)
    return resumable


def flip(path: Path, first: int, count: int) -> None:
    """Flip a bit in each of `count` bytes."""
    content = bytearray(path.read_bytes())
    content[first : first + count] = bytes(byte ^ 1 for byte in content[first : first + count])
    path.write_bytes(content)


def cut_journal(out: Path, seq: int) -> None:
    """Remove the event or action `seq` and all lines after it."""
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith(f'{{"seq": {seq},'))
    (out / "journal.jsonl").write_text("".join(lines[:first]))


def read_previous(out: Path) -> PreviousRun:
    """The state from which a run would resume. Nothing is started or changed."""
    setup = RunSetup.make(resumed_config(out, ()), out)
    with closing(SampleStore(out / "samples.sqlite")) as samples:
        return read_previous_run(setup, read_recorded_journal(out, setup.num_prompts), samples)


def contents(out: Path) -> dict[Path, bytes]:
    """The recorded files of a run and their bytes."""
    names = "journal.jsonl", "metrics.jsonl", "config.toml", "samples.sqlite", "checkpoints/*/*"
    return {path: path.read_bytes() for name in names for path in out.glob(name) if path.is_file()}


def test_damaged_checkpoints_are_named_and_an_older_whole_one_is_used(killed: ResumableRun) -> None:
    out = killed.out
    newest, older = out / "checkpoints" / "step-4", out / "checkpoints" / "step-2"
    core = (newest / "core.json").read_bytes()
    assert read_previous(out).checkpoint == newest
    for name, damage in {
        "optimizer.pt": "optimizer.pt differs from its digest",
        "model.safetensors": "model.safetensors differs from its digest",
        "core.json": "core.json differs from its digest",
        "checkpoint.json": "checkpoint.json is not a manifest",
    }.items():
        before = (newest / name).read_bytes()
        flip(newest / name, 0 if name == "checkpoint.json" else len(before) // 2, 1)
        previous = read_previous(out)
        (warning,) = previous.warnings
        assert (previous.checkpoint, previous.resumed.from_step) == (older, 2)
        assert warning.startswith(f"{newest} cannot be used: {damage}")
        (newest / name).write_bytes(before)

    changed = newest / "optimizer.pt", newest / "checkpoint.json"
    whole = [file.read_bytes() for file in changed]
    flip(changed[0], 1000, 2000)
    write_manifest(newest)
    assert "checkpoint.json has changed since the run wrote it" in read_previous(out).warnings[0]
    for file, content in zip(changed, whole, strict=True):
        file.write_bytes(content)

    (newest / "core.json").unlink()
    assert "core.json is missing" in read_previous(out).warnings[0]
    flip(older / "optimizer.pt", 1000, 2000)
    before_refusal = contents(out)
    with pytest.raises(InputError) as refused:
        resume(out, (), Console())
    assert "step-2 cannot be used: optimizer.pt differs" in str(refused.value)
    assert f"rm -r {out / 'checkpoints'} && dora train --resume {out}" in str(refused.value)
    assert contents(out) == before_refusal

    (newest / "core.json").write_bytes(core)
    cut_journal(out, 0)
    before_refusal = contents(out)
    with pytest.raises(InputError, match=r"journal\.jsonl has no event, although 2 checkpoints exist"):
        resume(out, (), Console())
    assert contents(out) == before_refusal


def test_a_journal_that_lost_its_last_lines_is_continued_from_there(killed: ResumableRun) -> None:
    """As in a power failure: the sample store and a checkpoint know more than the journal."""
    out, checkpoints = killed.out, killed.out / "checkpoints"
    batch = next(x["groups"] for x in journal(out) if x["kind"] == "train" and x["step"] == 4)
    committed = [line for line in journal(out) if line["kind"] == "commit" and line["group"] in batch][:1]
    group = committed[0]["group"]
    scored = [line for line in journal(out) if line["kind"] == "group_scored" and line["group"] == group]
    finished = [line for line in journal(out) if line.get("request", [])[:2] == group and "chunks" in line]
    for lost in (committed[-1], scored[-1], finished[-1]):
        copy = out.with_name(f"cut-{lost['kind']}")
        shutil.copytree(out, copy)
        cut_journal(copy, lost["seq"])
        warned = any("journal.jsonl has lost its last lines" in text for text in read_previous(copy).warnings)
        # Of the others, the events before the cut may cause all that the store knows of the group.
        assert warned or lost["kind"] != "group_scored"

    groups = next(x["groups"] for x in journal(out) if x["kind"] == "train" and x["step"] == 3)
    scored = [line for line in journal(out) if line["kind"] == "group_scored" and line["group"] in groups]
    cut_journal(out, scored[-1]["seq"])  # before step 3 was trained, and its checkpoint written
    ended = killed.resume().end()
    assert f"{checkpoints / 'step-4'} cannot be used: it needs" in ended.out
    assert "journal.jsonl has lost its last lines" in ended.out
    check_finished(out, ended)


def test_what_the_audit_finds_at_the_end_of_a_run_is_printed(killed: ResumableRun) -> None:
    flip(killed.out / "checkpoints" / "step-2" / "optimizer.pt", 1000, 2000)
    ended = killed.resume(trainer__keep_last=9).end()
    assert ended.code == 1
    assert "the audit found: files: checkpoints/step-2 is damaged: optimizer.pt differs" in ended.out


def test_a_redone_version_with_other_weights_is_reported(killed: ResumableRun) -> None:
    """The manifest fits the damaged file: only the weights of the redone steps show the damage."""
    newest = killed.out / "checkpoints" / "step-4"
    saved = torch.load(newest / "optimizer.pt", weights_only=True)
    saved["trainer"]["optimizer"]["state"][0]["exp_avg"].neg_()
    torch.save(saved, newest / "optimizer.pt")
    forge_manifest(newest)
    ended = killed.resume().end()
    assert re.search(
        r"warning: version 5 was recomputed and has another digest \(\w+, before: \w+\)", ended.out
    )
    check_finished(killed.out, ended)
    assert summary(killed.out)["differing_redone_versions"] >= 1


def test_damaged_results_are_repaired_or_named(resumable: ResumableRun) -> None:
    """A resume writes a damaged summary again; metrics cannot be computed again."""
    out = resumable.out
    resumable.start(eval__path="gcd", eval__num_prompts=3).succeed()
    before = contents(out)
    for name, damage, expected in (
        ("metrics.jsonl", b'{"step": 0, "t_s\n', "metrics.jsonl, line 1: damaged"),
        ("metrics.jsonl", b"\x00\xff\n", "metrics.jsonl, line 1: damaged"),
        ("metrics.jsonl", b"[0]\n", "metrics.jsonl, line 1: damaged"),
        ("metrics.jsonl", b'{"t_s": 1.0}\n', "metrics.jsonl, line 1: damaged"),
        ("metrics.jsonl", b'{"step": 0, "mismatch/kl": "x"}\n', "metrics.jsonl, line 1: damaged"),
    ):
        content = (out / name).read_bytes()
        (out / name).write_bytes(damage + content)
        (out / "summary.json").write_bytes(b'{"stopped": ')
        with pytest.raises(InputError, match=expected):
            resume(out, (), Console())
        (out / name).write_bytes(content)
        assert contents(out) == before
    ended = resumable.resume().end()
    assert f"warning: {out / 'summary.json'} is damaged and is written again at the end" in ended.out
    check_finished(out, ended)
    assert [found["version"] for found in summary(out)["evaluations"]] == [0, 6]


def test_an_error_while_workers_start_ends_them(killed: ResumableRun) -> None:
    trained = [line for line in journal(killed.out) if line["kind"] == "trained"]
    cut_journal(killed.out, trained[3]["seq"])  # so that there are committed groups
    query(killed.out, "update samples set logprobs = x'00'")
    run = killed.resume()
    ended = run.end()
    assert ended.code == 1
    assert "buffer size must be a multiple" in ended.err
    assert run.weight_folders() == []
