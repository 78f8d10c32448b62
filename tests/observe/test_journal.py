"""A journal is read as it was written, or refused with the number of the bad line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.observe.recording import world_config

from dora.core.events import EngineJoined
from dora.errors import InputError
from dora.observe import audit, replay
from dora.observe.journal import SCHEMA, read_journal
from dora.runtime import journal as writing


def rewritten(run: Path, folder: Path, text: bytes) -> Path:
    shutil.copytree(run, folder)
    (folder / "journal.jsonl").write_bytes(text)
    return folder


def test_the_reader_and_the_writer_mean_the_same_schema() -> None:
    assert SCHEMA == writing.SCHEMA


def test_what_was_written_is_read(good_run: Path) -> None:
    journal = read_journal(good_run)
    assert journal.limits == world_config().limits
    assert journal.num_prompts == 7
    assert [line.seq for line in journal.lines] == list(range(len(journal.lines)))
    assert sum(isinstance(line.record, EngineJoined) for line in journal.lines) >= 3
    assert not journal.is_torn


def test_a_journal_of_an_older_version_is_read_audited_and_replayed(good_run: Path, tmp_path: Path) -> None:
    """It knew neither how far the policy had gone in a step, nor of limits that are off."""
    header, *lines = [json.loads(line) for line in (good_run / "journal.jsonl").read_text().splitlines()]
    assert header["limits"].pop("aging") is None
    for line in [line for line in lines if line["kind"] == "trained"]:
        del line["ess"], line["kl"]
    text = "".join(json.dumps(line) + "\n" for line in (header, *lines))
    run = rewritten(good_run, tmp_path / "run", text.encode())
    assert read_journal(run).limits == read_journal(good_run).limits
    assert len(read_journal(run).lines) == len(lines)
    assert audit.main(run) == 0
    assert replay.main(run) == 0


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 30])
def test_a_torn_last_line_is_left_out_and_reported(
    early_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes_lost: int
) -> None:
    text = (early_run / "journal.jsonl").read_bytes()
    run = rewritten(early_run, tmp_path / "run", text[:-num_bytes_lost])
    assert read_journal(run).lines == read_journal(early_run).lines[:-1]
    assert audit.main(run) == 0
    assert "cut off" in capsys.readouterr().out
    assert replay.main(run) == 0
    assert "cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (b'{"seq": 3,', b'{"seq": 3', "line 5: not JSON"),
        (b'{"seq": 3,', b'["seq", 3]\n{"seq": 4,', "line 5: expected a JSON object, found list"),
        (b'{"seq": 3,', b'{"seq": 4,', "line 5: seq is 4, expected 3"),
        (b'{"seq": 3,', b'{"seq": "3",', "line 5: neither a fact nor an order: expected int"),
        (b'"kind": "published"', b'"kind": "invented"', "unknown kind 'invented'"),
        (b'"kind": "published"', b'"kind": ["published"]', "neither a fact nor an order"),
        (b'"digest"', b'"digits"', "published lacks 'digest'"),
        (b'"groups": [[', b'"groups": [[0, 0, ', "neither a fact nor an order"),
        (b'"groups": [[', b'"groups": 3, "other": [[', "neither a fact nor an order"),
        (b'"schema": 2', b'"schema": 99', "line 1: schema is 99, this version reads 2"),
        (b'"num_prompts": 7', b'"num_prompts": "7"', "line 1: not the header of a journal: expected int"),
        (b'"num_prompts": 7', b'"num_prompts": 0', "num_prompts = 0 must be at least 1"),
        (b'"batch_size": 3', b'"batch_size": 0', "line 1: not the header of a journal: batch_size = 0"),
        (b'"limits"', b'"bounds"', "line 1: not the header of a journal: 'limits'"),
    ],
)
def test_a_bad_line_is_named(
    good_run: Path, tmp_path: Path, before: bytes, after: bytes, complaint: str
) -> None:
    text = (good_run / "journal.jsonl").read_bytes()
    assert before in text
    run = rewritten(good_run, tmp_path / "run", text.replace(before, after, 1))
    with pytest.raises(InputError) as refusal:
        read_journal(run)
    assert complaint in str(refusal.value)


def test_an_empty_journal_is_refused(good_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: not JSON"):
        read_journal(rewritten(good_run, tmp_path / "run", b""))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the folder of a run"):
        audit.check(tmp_path)


def test_a_run_without_samples_is_refused(good_run: Path, tmp_path: Path) -> None:
    run = rewritten(good_run, tmp_path / "run", (good_run / "journal.jsonl").read_bytes())
    (run / "samples.sqlite").write_bytes(b"not a database at all, but long enough to look like a file" * 20)
    with pytest.raises(InputError, match="cannot be read"):
        audit.check(run)
    (run / "samples.sqlite").unlink()
    with pytest.raises(InputError, match="does not exist"):
        audit.check(run)
