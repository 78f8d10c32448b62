"""The audit follows a request from engine to engine: its one owner holds its version."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import Edit, Record, changed, edited, nth_of, removed, repeated, with_edits
from tests.journal.story import EVENTS, write_story

from dora.audit import audit


def migrate_from_another_engine(records: list[Record]) -> None:
    nth_of(records, "migrated")["source"] = nth_of(records, "migrate", 1)["source"] = 2


def remove_the_end_of_a_migration(records: list[Record]) -> None:
    """Engine 0, its source, is removed during the migration."""
    event = nth_of(records, "migrated", -1)
    records.remove(event)
    nth_of(records, "request_finished")["engine"] = 0


def generate_a_request_that_has_an_owner(records: list[Record]) -> None:
    nth_of(records, "generate", -1)["requests"].append([0, 4, 0])


def remove_an_engine_with_a_request(records: list[Record]) -> None:
    action = nth_of(records, "generate")
    records.insert(records.index(nth_of(records, "engine_removed")), action | {"requests": [[0, 5, 0]]})


def fail_a_step_that_was_not_started(records: list[Record]) -> None:
    records.insert(5, {"t_s": 0.0, "kind": "step_failed", "step": 0, "reason": "early"})


EDITS: list[tuple[Edit, str, str]] = [
    (migrate_from_another_engine, "C1", "migrated from engine 2, its owner was engine 1"),
    (migrate_from_another_engine, "C1", "migrates from engine 2, its owner is engine 1"),
    (changed("migrate", version=1), "C1", "migrates on version 1, its group has 0"),
    (removed("migrate", -1), "C1", "expected None"),
    (changed("migrated", -1, destination=5), "C1", "ended a migration from 0 to 5, expected (0, 2)"),
    (removed("loaded", -1), "C1", "migrated to engine 0, which holds []"),
    (repeated("migrate"), "C1", "is in two migrations at once"),
    (remove_the_end_of_a_migration, "C1", "left during the migrations of 0/4/0"),
    (remove_the_end_of_a_migration, "C1", "was removed with the requests 0/4/0"),
    (changed("request_finished", engine=0), "C1", "finished on engine 0, its owner was engine 2"),
    (generate_a_request_that_has_an_owner, "C1", "was assigned to engine 2, its owner is engine 0"),
    (remove_an_engine_with_a_request, "C1", "engine 0 was removed with the requests 0/5/0"),
    (repeated("engine_joined"), "C1", "engine 0 joined twice"),
    (changed("train", -1, groups=[[0, 2]]), "C2", "a failed step with another number or other groups"),
    (changed("train", -1, step=1), "C2", "a failed step with another number or other groups"),
    (fail_a_step_that_was_not_started, "C2", "step 1 failed, expected step 1"),
    (repeated("step_failed"), "C2", "step 1 failed, expected step 1"),
]


def test_a_run_with_migrations_passes(story_run: Path) -> None:
    result = audit.check(story_run)
    assert result.findings == ()
    assert result.guarantees.groups.outcomes == {"trained": 1, "failed": 1}


@pytest.mark.parametrize("num_events", range(1, len(EVENTS)))
def test_a_run_may_stop_after_any_event(tmp_path: Path, num_events: int) -> None:
    result = audit.check(write_story(tmp_path / "run", num_events))
    assert (result.findings_against("C1"), result.findings_against("C3")) == ([], [])
    groups = result.guarantees.groups
    assert groups.outcomes.keys() <= {"trained", "failed", "pending"}
    assert groups.outcomes.total() == groups.num_admitted


@with_edits(EDITS)
def test_an_edited_migration_breaks_its_guarantee(
    story_run: Path, tmp_path: Path, edit: Edit, guarantee: str, words: str
) -> None:
    found = audit.check(edited(story_run, tmp_path / "run", edit)).findings_against(guarantee)
    assert any(words in finding for finding in found), found
