"""A run whose trainer was lost is one record: audit, replay and why read it so, and notice changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.observe.recording import Record, record_run, tampered, world_config

from dora.core.events import Attested, Published, TrainerReplaced
from dora.observe import audit, replay, why
from dora.observe.journal import read_journal
from dora.sim.faults import Faults

Change = Callable[[list[Record]], object]


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainers die now and then, and their successors make versions with other digests."""
    faults = Faults(trainer_loss_interval_s=0.6)
    return record_run(tmp_path_factory.mktemp("replaced") / "run", world_config(faults=faults), seed=0)


def nth_of(records: list[Record], kind: str, nth: int = 0) -> Record:
    return [record for record in records if record["kind"] == kind][nth]


def with_redone(records: list[Record]) -> Record:
    return next(record for record in records if record["kind"] == "trainer_replaced" and record["redone"])


def first_after(records: list[Record], start: Record, kind: str) -> Record:
    return next(record for record in records[records.index(start) :] if record["kind"] == kind)


def test_a_run_with_lost_trainers_keeps_its_guarantees(
    replaced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = audit.check(replaced)
    assert verdict.findings == ()
    assert (verdict.counts.pending, verdict.counts.trained) == (0, 8 * 3)
    journal = read_journal(replaced)
    facts = [line.record for line in journal.lines]
    published = {fact.version: fact.digest for fact in facts if isinstance(fact, Published)}
    attested = [fact for fact in facts if isinstance(fact, Attested)]
    assert any(fact.digest != published[fact.version] for fact in attested), (
        "bytes that differ are no finding"
    )
    assert replay.main(replaced) == 0
    assert "replay agrees" in capsys.readouterr().out


def test_why_tells_that_a_step_was_redone(replaced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = [line.record for line in read_journal(replaced).lines]
    new = next(fact for fact in facts if isinstance(fact, TrainerReplaced) and fact.redone)
    why.main(replaced, f"{new.redone[0][0]}/0")
    told = capsys.readouterr().out
    assert "the trainer was lost, and another began after" in told
    assert told.count(f"trained in step {new.from_step + 1}\n") >= 2


def redo_other_groups(records: list[Record]) -> None:
    order = first_after(records, with_redone(records), "train")
    order["groups"] = [*reversed(order["groups"])]


def name_other_batches(records: list[Record]) -> None:
    new = with_redone(records)
    new["redone"] = [[*reversed(batch)] for batch in new["redone"]]


def begin_with_other_weights(records: list[Record]) -> None:
    first_after(records, with_redone(records), "attested")["digest"] = "0" * 32


def attest_what_is_not_out(records: list[Record]) -> None:
    nth_of(records, "attested")["version"] = 8


def publish_what_was_redone(records: list[Record]) -> None:
    fact = first_after(records, with_redone(records), "attested")
    fact["kind"] = "published"


def load_what_was_redone(records: list[Record]) -> None:
    attested = {record["digest"] for record in records if record["kind"] == "attested"}
    published = {record["digest"] for record in records if record["kind"] == "published"}
    nth_of(records, "loaded", -1)["digest"] = (attested - published).pop()


CHANGES: list[tuple[Change, str, str]] = [
    (redo_other_groups, "C2", "redoes a void one with another number or other groups"),
    (name_other_batches, "C2", "redoes other batches"),
    (begin_with_other_weights, "C1", "and its checkpoint gave 00000000"),
    (attest_what_is_not_out, "C1", "version 8 is attested, not published"),
    (publish_what_was_redone, "C1", "is published twice"),
    (load_what_was_redone, "C1", " again as version "),
]


@pytest.mark.parametrize(
    ("change", "guarantee", "words"), CHANGES, ids=[f"{c.__name__}: {words}" for c, _, words in CHANGES]
)
def test_a_changed_redo_breaks_its_guarantee(
    replaced: Path, tmp_path: Path, change: Change, guarantee: str, words: str
) -> None:
    found = audit.check(tampered(replaced, tmp_path / "run", change)).against(guarantee)
    assert any(words in finding for finding in found), found
