"""C2 of a run with several datasets: each has epochs of its own."""

from __future__ import annotations

from collections.abc import Sequence

from dora.audit.guarantees import GuaranteeAudit
from dora.core.events import PromptsFetched
from dora.core.types import GroupId, Limits

ROWS = (2, 3)  # of two sources
GROUPS = [(0, 1), (0, 4), (0, 0), (0, 2), (1, 0), (0, 3), (1, 1), (1, 2)]


def findings(groups: Sequence[tuple[int, int]], source_rows: Sequence[int] | None = ROWS) -> list[str]:
    audit = GuaranteeAudit(Limits(1, 1, 1, 0), sum(ROWS), source_rows=source_rows)
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


def test_a_repeated_row_and_a_row_outside_are_found() -> None:
    assert len(findings([(0, 1), (0, 1)])) == 1
    assert len(findings([(0, 5)])) == 1
    assert len(findings([(0, -3)])) == 1
