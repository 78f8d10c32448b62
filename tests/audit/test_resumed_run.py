"""Audit, replay and request history read a resumed run as one run, and find edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import FROM_STEP, Edit, Record, edited, nth_of, with_edits

from dora.audit import audit
from dora.core.events import Resumed
from dora.core.orchestrator import Orchestrator
from dora.journal import replay, why
from dora.journal.reader import read_journal


def test_a_resumed_run_keeps_its_guarantees_and_replays(
    resumed_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = audit.check(resumed_run)
    assert result.findings == ()
    outcomes = result.guarantees.groups.outcomes
    assert (outcomes["pending"], outcomes["trained"]) == (0, 8 * 3)
    assert replay.first_difference(read_journal(resumed_run)) is None
    assert replay.main(resumed_run) == 0
    assert "replay agrees" in capsys.readouterr().out


def test_a_request_history_lists_a_redone_step(resumed_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = read_journal(resumed_run)
    (resumed,) = (line.record for line in journal.lines if isinstance(line.record, Resumed))
    why.main(resumed_run, f"{resumed.redone[0][0].group}/0")
    printed = capsys.readouterr().out
    assert f"the run was resumed after {FROM_STEP} steps: step {FROM_STEP + 1} is redone" in printed
    assert printed.count(f"trained in step {FROM_STEP + 1}\n") == 2
    why.main(resumed_run, requests_under_way(resumed_run)[0])
    assert "the run was resumed: the request restarts" in capsys.readouterr().out


def requests_under_way(run: Path) -> list[str]:
    """Requests that had an engine when all processes crashed."""
    journal = read_journal(run)
    core = Orchestrator(journal.limits)
    for event, actions in replay.group_by_event(journal.lines):
        if event is None:
            core.start(actions[0].t_s)
            continue
        if isinstance(event.record, Resumed):
            break
        core.handle(event.record, event.t_s)  # type: ignore[arg-type]
    return [str(request) for request, q in core.snapshot().requests.items() if q.engine is not None]


def after(records: list[Record], kind: str, nth: int = 0) -> Record:
    """The nth record of a kind after the resume."""
    (resumed,) = (number for number, record in enumerate(records) if record["kind"] == "resumed")
    return nth_of(records[resumed:], kind, nth)


def redo_other_groups(records: list[Record]) -> None:
    after(records, "train")["groups"] = after(records, "train", 1)["groups"]


def skip_a_step(records: list[Record]) -> None:
    records.remove(after(records, "train"))


def resume_with_other_weights(records: list[Record]) -> None:
    after(records, "published")["digest"] = "0" * 32


def keep_other_weights(records: list[Record]) -> None:
    after(records, "resumed")["kept_versions"].append([FROM_STEP - 1, "0" * 32])


def resume_from_a_later_step(records: list[Record]) -> None:
    after(records, "resumed")["from_step"] = 7


def generate_on_an_engine_without_a_load(records: list[Record]) -> None:
    records.remove(after(records, "loaded"))


EDITS: list[tuple[Edit, str, str]] = [
    (redo_other_groups, "C2", "redoes a voided step with another number or other groups"),
    (skip_a_step, "C2", "step 4 was trained, expected step 4; no step was running"),
    (resume_with_other_weights, "C1", "version 3 was published as "),
    (keep_other_weights, "C1", "is kept as 00000000"),
    (resume_from_a_later_step, "C2", "training resumed after 7 steps, of which 5 were trained"),
    (generate_on_an_engine_without_a_load, "C1", "engine 0 holds"),
]


@with_edits(EDITS)
def test_an_edited_resume_breaks_its_guarantee(
    resumed_run: Path, tmp_path: Path, edit: Edit, guarantee: str, words: str
) -> None:
    found = audit.check(edited(resumed_run, tmp_path / "run", edit)).findings_against(guarantee)
    assert any(words in finding for finding in found), found


def test_redone_weights_may_round_differently(resumed_run: Path, tmp_path: Path) -> None:
    """The journal has both digests; each response is from the one that its engine held."""

    def round_differently(records: list[Record]) -> None:
        (start,) = (number for number, record in enumerate(records) if record["kind"] == "resumed")
        old = after(records, "published", 1)["digest"]
        for record in records[start + 1 :]:
            if record.get("digest") == old:
                record["digest"] = "0" * 32
            for chunk in record.get("chunks", ()):
                chunk[1] = "0" * 32 if chunk[1] == old else chunk[1]

    found = audit.check(edited(resumed_run, tmp_path / "run", round_differently))
    assert [finding for finding in found.findings if "stored" not in finding] == []
