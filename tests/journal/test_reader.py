"""A journal is read as it was written, or rejected with the number of the bad line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.journal.recorded_runs import world_config, write_chained

from dora.audit import audit
from dora.core.events import EngineJoined
from dora.core.types import Limits
from dora.errors import InputError
from dora.journal import replay
from dora.journal.reader import read_journal
from dora.journal.writer import BEING_WRITTEN, JournalWriter


def rewritten(run: Path, folder: Path, text: bytes) -> Path:
    shutil.copytree(run, folder)
    (folder / "journal.jsonl").write_bytes(text)
    return folder


def test_a_journal_is_read_as_it_was_written(finished_run: Path) -> None:
    journal = read_journal(finished_run)
    assert journal.limits == world_config().limits
    assert journal.num_prompts == 7
    assert [line.seq for line in journal.lines] == list(range(len(journal.lines)))
    assert sum(isinstance(line.record, EngineJoined) for line in journal.lines) >= 3
    assert not journal.is_torn


def test_a_journal_of_an_older_version_is_read_audited_and_replayed(
    finished_run: Path, tmp_path: Path
) -> None:
    """Its lines lack optional fields of `trained`, its header a limit that is off."""
    header, *lines = [json.loads(line) for line in (finished_run / "journal.jsonl").read_text().splitlines()]
    assert header["limits"].pop("adaptive_staleness") is None
    for line in [line for line in lines if line["kind"] == "trained"]:
        del line["ess"], line["kl"]
    run = rewritten(finished_run, tmp_path / "run", b"")
    write_chained(run / "journal.jsonl", [header, *lines])
    assert read_journal(run).limits == read_journal(finished_run).limits
    assert len(read_journal(run).lines) == len(lines)
    assert audit.main(run) == 0
    assert replay.main(run) == 0


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 30])
def test_a_torn_last_line_is_omitted_and_reported(
    stopped_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes_lost: int
) -> None:
    text = (stopped_run / "journal.jsonl").read_bytes()
    run = rewritten(stopped_run, tmp_path / "run", text[:-num_bytes_lost])
    assert read_journal(run).lines == read_journal(stopped_run).lines[:-1]
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
        (b'{"seq": 3,', b'{"seq": "3",', "line 5: neither an event nor an action: expected int"),
        (b'"kind": "published"', b'"kind": "invented"', "unknown kind 'invented'"),
        (b'"kind": "published"', b'"kind": ["published"]', "neither an event nor an action"),
        (b'"digest"', b'"digits"', "published: field 'digest' is missing"),
        (b'"groups": [[', b'"groups": [[0, 0, ', "neither an event nor an action"),
        (b'"groups": [[', b'"groups": 3, "other": [[', "neither an event nor an action"),
        (b'"schema": 5', b'"schema": 99', "with journal schema 99"),
        (b'"num_prompts": 7', b'"num_prompts": "7"', "line 1: not the header of a journal: expected int"),
        (b'"num_prompts": 7', b'"num_prompts": 0', "num_prompts = 0 must be at least 1"),
        (b'"batch_size": 3', b'"batch_size": 0', "line 1: not the header of a journal: batch_size = 0"),
        (b'"limits"', b'"bounds"', "line 1: not the header of a journal: 'limits'"),
    ],
)
def test_a_bad_line_is_named(
    finished_run: Path, tmp_path: Path, before: bytes, after: bytes, complaint: str
) -> None:
    text = (finished_run / "journal.jsonl").read_bytes()
    assert before in text
    run = rewritten(finished_run, tmp_path / "run", text.replace(before, after, 1))
    with pytest.raises(InputError) as rejection:
        read_journal(run)
    assert complaint in str(rejection.value)


def test_the_newest_digest_of_a_file_counts_and_none_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalWriter(path, Limits(1, 1, 1, 0), "", None)
    for digests in ({"a": "1", "b": "1", "c": "1"}, {"a": "2"}, {"b": BEING_WRITTEN}):
        journal.record_files(digests)
    journal.close()
    assert read_journal(tmp_path).recorded_digests() == {"a": "2", "c": "1"}


def test_an_empty_journal_is_rejected(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: not JSON"):
        read_journal(rewritten(finished_run, tmp_path / "run", b""))


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the folder of a run"):
        audit.check(tmp_path)


def test_a_run_without_samples_is_rejected(finished_run: Path, tmp_path: Path) -> None:
    run = rewritten(finished_run, tmp_path / "run", (finished_run / "journal.jsonl").read_bytes())
    (run / "samples.sqlite").write_bytes(b"not a database at all, but long enough to look like a file" * 20)
    with pytest.raises(InputError, match="cannot be read"):
        audit.check(run)
    (run / "samples.sqlite").unlink()
    with pytest.raises(InputError, match="is missing, and the journal has responses"):
        audit.check(run)
