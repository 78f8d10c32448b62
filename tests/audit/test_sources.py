"""C2 of the order of prompts: each dataset has epochs of its own, and a curriculum skips prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dora.audit.guarantees import GuaranteeAudit
from dora.core.actions import Admit, SkipPrompts, Stop
from dora.core.events import GroupScored, PromptsFetched
from dora.core.types import CurriculumRule, GroupId, Limits

ROWS = (2, 3)  # of two sources
GROUPS = [(0, 1), (0, 4), (0, 0), (0, 2), (1, 0), (0, 3), (1, 1), (1, 2)]


def findings(
    groups: Sequence[tuple[int, int]],
    source_rows: Sequence[int] | None = ROWS,
    num_prompts: int | None = sum(ROWS),
) -> list[str]:
    audit = GuaranteeAudit(Limits(1, 1, 1, 0), num_prompts, source_rows=source_rows)
    audit.observe(PromptsFetched(0, tuple(GroupId(*group) for group in groups)))
    return audit.findings


def test_sources_advance_by_themselves() -> None:
    assert findings(GROUPS) == []
    assert len(findings(GROUPS, None)) > 0


def test_a_row_of_an_epoch_that_its_source_has_not_reached_is_found() -> None:
    groups = [*GROUPS[:1], (1, 4), *GROUPS[2:]]
    assert findings(groups) == [
        "C2: position 1 of the dataset is group 1/4: expected a new row of epoch 0 below 5"
    ]


@pytest.mark.parametrize(
    ("groups", "position", "group"),
    [([(0, 1), (0, 1)], 1, "0/1"), ([(0, 5)], 0, "0/5"), ([(0, -3)], 0, "0/-3")],
)
def test_a_repeated_row_and_a_row_outside_are_found(
    groups: list[tuple[int, int]], position: int, group: str
) -> None:
    assert findings(groups) == [
        f"C2: position {position} of the dataset is group {group}: expected a new row of epoch 0 below 5"
    ]


@pytest.mark.parametrize("second", [(0, 1), (0, 2), (1, 0), (0, 0)], ids=str)
def test_a_growing_dataset_has_one_epoch_of_rows_that_exist_by_then(second: tuple[int, int]) -> None:
    found = "C2: position 1 of the dataset is group {}/{}: expected a new row of epoch 0 below 2"
    expected = [] if second == (0, 1) else [found.format(*second)]
    assert findings([(0, 0), second], None, num_prompts=None) == expected


def audit_with_a_solved_group() -> GuaranteeAudit:
    """The second epoch is fetched; a curriculum skips its first prompt, 1/0."""
    audit = GuaranteeAudit(Limits(1, 1, 1, 0, curriculum=CurriculumRule(1.0, None, 1)), 2)
    audit.observe(PromptsFetched(0, (GroupId(0, 0), GroupId(0, 1))))
    audit.observe(Admit(GroupId(0, 0), 0, 0, 0))
    audit.observe(Admit(GroupId(0, 1), 1, 0, 0))
    for row in (0, 1):
        audit.observe(GroupScored(GroupId(0, row), (float(row == 0),)))
    audit.observe(PromptsFetched(2, (GroupId(1, 0), GroupId(1, 1))))
    return audit


@pytest.mark.parametrize(
    ("skipped", "admitted", "finding"),
    [
        ([GroupId(1, 0)], (3, GroupId(1, 1)), None),
        ([], (3, GroupId(1, 1)), "the curriculum skipped no group, expected 1/0"),
        ([], (2, GroupId(1, 0)), "the curriculum skipped no group, expected 1/0"),
        ([], None, "the curriculum skipped no group, expected 1/0"),
        ([GroupId(1, 1)], (2, GroupId(1, 0)), "the curriculum skipped 1/1, expected 1/0"),
        ([GroupId(1, 0)], (2, GroupId(1, 0)), "group 1/0 has index 2, expected 3"),
    ],
)
def test_a_prompt_is_skipped_exactly_after_a_solved_group(
    skipped: list[GroupId], admitted: tuple[int, GroupId] | None, finding: str | None
) -> None:
    audit = audit_with_a_solved_group()
    if skipped:
        audit.observe(SkipPrompts(tuple(skipped)))
    if admitted is None:
        audit.observe(PromptsFetched(4, (GroupId(2, 0), GroupId(2, 1))))
    else:
        audit.observe(Admit(admitted[1], admitted[0], 0, 0))
    assert audit.findings[:1] == ([] if finding is None else [f"C2: {finding}"])


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_run_may_end_before_a_skip_but_not_finish(is_stopped: bool) -> None:
    audit = audit_with_a_solved_group()
    if is_stopped:
        audit.observe(Stop())
    audit.close()
    assert ("C2: the curriculum skipped no group, expected 1/0" in audit.findings) == is_stopped
    audit.close()  # of a run that got more steps
    assert audit.groups.outcomes == {"pending": 2}
