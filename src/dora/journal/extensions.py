"""How many steps a run has: those of the journal's header, and those that later resumes have added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dora.core.actions import Action
from dora.core.events import Event, Resumed
from dora.core.types import Limits
from dora.journal.reader import JOURNAL_FILE, JournalLine, read_line


class Extension(NamedTuple):
    """A resume that gave the run more steps, with the learning-rate schedule of the steps from then on."""

    from_step: int  # number of trained steps at the resume
    num_steps: int
    lr_decay: str | None
    min_lr_ratio: float


def find_extensions(records: Iterable[Event | Action]) -> tuple[Extension, ...]:
    """The extensions of a run, in order."""
    return tuple(
        Extension(r.from_step + len(r.redone), r.num_steps, r.lr_decay, r.min_lr_ratio)
        for r in records
        if isinstance(r, Resumed) and r.num_steps is not None
    )


def read_extensions(run: Path) -> tuple[Extension, ...]:
    """The extensions in the journal of a run; () without a journal. Raises InputError."""
    path = run / JOURNAL_FILE
    if not path.is_file():
        return ()
    with path.open("rb") as lines:  # few lines are resumes: all others are skipped unparsed
        found = [
            read_line(path, number, line)
            for number, line in enumerate(lines, start=1)
            if b'"kind": "resumed"' in line and line.endswith(b"\n")
        ]
    return find_extensions(line.record for line in found if isinstance(line, JournalLine))


def extended_limits(limits: Limits, record: Event | Action) -> Limits:
    """The limits of a run after an event or action."""
    if isinstance(record, Resumed) and record.num_steps is not None:
        return replace(limits, num_steps=record.num_steps)
    return limits
