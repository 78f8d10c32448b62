"""The audit follows a request from engine to engine: it has one owner, which holds its version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.observe.recording import Record, tampered
from tests.observe.story import TURNS, write_story

from dora.observe import audit

Change = Callable[[list[Record]], object]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_story(tmp_path_factory.mktemp("moves") / "run")


def of(records: list[Record], kind: str, nth: int = 0) -> Record:
    return [record for record in records if record["kind"] == kind][nth]


def move_from_elsewhere(records: list[Record]) -> None:
    of(records, "migrated")["source"] = of(records, "migrate", 1)["source"] = 2


def move_without_order(records: list[Record]) -> None:
    records.remove(of(records, "migrate", -1))


def move_somewhere_else(records: list[Record]) -> None:
    of(records, "migrated", -1)["destination"] = 5


def move_where_the_version_is_not(records: list[Record]) -> None:
    records.remove(of(records, "loaded", -1))


def move_twice_at_once(records: list[Record]) -> None:
    order = of(records, "migrate")
    records.insert(records.index(order), dict(order))


def forget_how_a_move_ended(records: list[Record]) -> None:
    """It was to engine 0, which leaves in the middle of it."""
    fact = of(records, "migrated", -1)
    records.remove(fact)
    of(records, "request_finished")["engine"] = 0


def finish_where_it_was_before(records: list[Record]) -> None:
    of(records, "request_finished")["engine"] = 0


def generate_what_another_has(records: list[Record]) -> None:
    of(records, "generate", -1)["requests"].append([0, 4, 0])


def leave_with_a_request(records: list[Record]) -> None:
    order = of(records, "generate")
    records.insert(records.index(of(records, "engine_left")), order | {"requests": [[0, 5, 0]]})


def join_twice(records: list[Record]) -> None:
    records.insert(5, dict(of(records, "engine_joined")))


def repeat_with_other_groups(records: list[Record]) -> None:
    of(records, "train", -1)["groups"] = [[0, 2]]


def repeat_another_step(records: list[Record]) -> None:
    of(records, "train", -1)["step"] = 1


def fail_a_step_that_was_not_ordered(records: list[Record]) -> None:
    records.insert(5, {"t_s": 0.0, "kind": "step_failed", "step": 0, "reason": "early"})


def forget_the_repetition(records: list[Record]) -> None:
    fact = of(records, "step_failed")
    records.insert(records.index(fact), dict(fact))


CHANGES: list[tuple[Change, str, str]] = [
    (move_from_elsewhere, "C1", "moved away from engine 2, engine 1 had it"),
    (move_without_order, "C1", "ordered was None"),
    (move_somewhere_else, "C1", "ended a move from 0 to 5, ordered was (0, 2)"),
    (move_where_the_version_is_not, "C1", "moved to engine 0, which holds []"),
    (move_twice_at_once, "C1", "is in two moves at once"),
    (forget_how_a_move_ended, "C1", "is gone in the middle of moves of 0/4/0"),
    (forget_how_a_move_ended, "C1", "left with the requests 0/4/0"),
    (finish_where_it_was_before, "C1", "finished on engine 0, it was given to engine 2"),
    (generate_what_another_has, "C1", "was given to engine 2, engine 0 has it"),
    (leave_with_a_request, "C1", "engine 0 left with the requests 0/5/0"),
    (join_twice, "C1", "engine 0 joined twice"),
    (repeat_with_other_groups, "C2", "repeats a failed one with another number or other groups"),
    (repeat_another_step, "C2", "repeats a failed one with another number or other groups"),
    (fail_a_step_that_was_not_ordered, "C2", "step 1 failed, the step ordered and due was 1"),
    (forget_the_repetition, "C2", "step 1 failed, the step ordered and due was 1"),
]


def test_a_run_with_moves_passes(story: Path) -> None:
    verdict = audit.check(story)
    assert verdict.findings == ()
    assert (verdict.counts.trained, verdict.counts.failed) == (1, 1)


@pytest.mark.parametrize("num_turns", range(1, len(TURNS)))
def test_it_may_be_stopped_at_any_fact(tmp_path: Path, num_turns: int) -> None:
    verdict = audit.check(write_story(tmp_path / "run", num_turns))
    assert (verdict.against("C1"), verdict.against("C3")) == ([], [])


@pytest.mark.parametrize(
    ("change", "guarantee", "words"), CHANGES, ids=[f"{c.__name__}: {words}" for c, _, words in CHANGES]
)
def test_a_changed_move_breaks_its_guarantee(
    story: Path, tmp_path: Path, change: Change, guarantee: str, words: str
) -> None:
    found = audit.check(tampered(story, tmp_path / "run", change)).against(guarantee)
    assert any(words in finding for finding in found), found
