"""The batches of steps that were trained, for a new trainer that has to redo some.

They are in the journal, and nobody keeps them beside it.
"""

from __future__ import annotations

from pathlib import Path

from dora.core.actions import Train
from dora.core.records import GroupId
from dora.observe.journal import FILE_NAME, read_line

_MARK = b'"kind": "train"'  # of few lines; all others are passed over unread


def recorded_batches(run: Path, steps: range) -> tuple[tuple[GroupId, ...], ...]:
    """One for each of the steps, in order. Raises LookupError if one was never ordered."""
    found: dict[int, tuple[GroupId, ...]] = {}
    path = run / FILE_NAME
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if _MARK in line:
                order = read_line(path, number, line).record
                assert isinstance(order, Train)
                found[order.step] = order.groups
    return tuple(found[step] for step in steps)
