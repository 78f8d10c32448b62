"""Audit, replay and request history read a run with a replaced trainer as one run, and find edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import (
    Edit,
    Record,
    changed,
    edited,
    nth_of,
    record_run,
    with_edits,
    world_config,
)

from dora.audit import audit
from dora.core.events import DigestReported, Published, TrainerReplaced
from dora.journal import replay, why
from dora.journal.reader import read_journal
from dora.sim.random_config import FaultConfig


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer crashes now and then; its replacement redoes versions with other digests."""
    faults = FaultConfig(trainer_loss_interval_s=0.6)
    return record_run(tmp_path_factory.mktemp("replaced") / "run", world_config(faults=faults), seed=0)


def with_redone(records: list[Record]) -> Record:
    return next(record for record in records if record["kind"] == "trainer_replaced" and record["redone"])


def first_after(records: list[Record], start: Record, kind: str) -> Record:
    return next(record for record in records[records.index(start) :] if record["kind"] == kind)


def test_a_run_with_lost_trainers_keeps_its_guarantees(
    replaced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = audit.check(replaced)
    assert result.findings == ()
    outcomes = result.guarantees.groups.outcomes
    assert (outcomes["pending"], outcomes["trained"]) == (0, 8 * 3)
    journal = read_journal(replaced)
    events = [line.record for line in journal.lines]
    published = {event.version: event.digest for event in events if isinstance(event, Published)}
    reported = [event for event in events if isinstance(event, DigestReported)]
    assert any(event.digest != published[event.version] for event in reported), (
        "bytes that differ are no finding"
    )
    assert replay.main(replaced) == 0
    assert "replay agrees" in capsys.readouterr().out


def test_a_request_history_lists_a_redone_step(replaced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [line.record for line in read_journal(replaced).lines]
    new = next(event for event in events if isinstance(event, TrainerReplaced) and event.redone)
    why.main(replaced, f"{new.redone[0][0]}/0")
    printed = capsys.readouterr().out
    assert "the trainer was lost and resumed after" in printed
    assert printed.count(f"trained in step {new.from_step + 1}\n") >= 2


def redo_other_groups(records: list[Record]) -> None:
    action = first_after(records, with_redone(records), "train")
    action["groups"] = [*reversed(action["groups"])]


def start_a_step_without_a_trainer(records: list[Record]) -> None:
    new = with_redone(records)
    action = first_after(records, new, "train")
    records.remove(action)
    records.insert(records.index(new), action)


def name_other_batches(records: list[Record]) -> None:
    new = with_redone(records)
    new["redone"] = [[*reversed(batch)] for batch in new["redone"]]


def resume_with_other_weights(records: list[Record]) -> None:
    first_after(records, with_redone(records), "digest_reported")["digest"] = "0" * 32


def publish_a_redone_version(records: list[Record]) -> None:
    event = first_after(records, with_redone(records), "digest_reported")
    event["kind"] = "published"


def load_a_redone_version(records: list[Record]) -> None:
    reported = {record["digest"] for record in records if record["kind"] == "digest_reported"}
    published = {record["digest"] for record in records if record["kind"] == "published"}
    nth_of(records, "loaded", -1)["digest"] = (reported - published).pop()


EDITS: list[tuple[Edit, str, str]] = [
    (redo_other_groups, "C2", "redoes a voided step with another number or other groups"),
    (start_a_step_without_a_trainer, "C2", "starts without a trainer"),
    (name_other_batches, "C2", "redoes other batches"),
    (resume_with_other_weights, "C1", "and its checkpoint has 00000000"),
    (changed("digest_reported", version=8), "C1", "a digest of version 8 is reported"),
    (publish_a_redone_version, "C1", "is published twice"),
    (load_a_redone_version, "C1", " again as version "),
]


@with_edits(EDITS)
def test_an_edited_redo_breaks_its_guarantee(
    replaced: Path, tmp_path: Path, edit: Edit, guarantee: str, words: str
) -> None:
    found = audit.check(edited(replaced, tmp_path / "run", edit)).findings_against(guarantee)
    assert any(words in finding for finding in found), found
