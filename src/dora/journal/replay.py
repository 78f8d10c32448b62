"""`dora replay`: check that recorded events, given to a new orchestrator, cause the recorded actions.

A difference means that this version of DORA-RL decides differently from the version that ran, or that the
journal was edited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from dora.core.actions import Action, Stop
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.types import ProtocolError
from dora.journal.reader import Journal, JournalLine, read_journal
from dora.text import plural


class ReplayDifference(NamedTuple):
    """The first line where journal and replay differ; None: no action."""

    seq: int
    recorded: object
    replayed: object


def main(run: Path) -> int:
    """Print the number of actions that agree, or the first difference; exit code 1 if there is one."""
    journal = read_journal(run)
    difference = first_difference(journal)
    if difference is not None and not _is_cut_off(journal, difference):
        recorded, replayed = difference.recorded or "no action", difference.replayed or "no action"
        print(f"replay differs at seq {difference.seq}\n   recorded  {recorded}\n   replayed  {replayed}")
        return 1
    if difference is not None or journal.is_torn:
        print("the journal was cut off at its end; the complete lines were replayed")
    num_events = sum(line.is_event for line in journal.lines)
    events, actions = plural(num_events, "event"), plural(len(journal.lines) - num_events, "action")
    print(f"replay agrees: {events} caused the same {actions}")
    return 0


def first_difference(journal: Journal) -> ReplayDifference | None:
    """Give the recorded events to a new orchestrator at their recorded times and compare its actions."""
    core = Orchestrator(journal.limits)
    seq = 0
    for event, recorded in group_by_event(journal.lines):
        try:
            replayed = _replay_event(core, event, recorded)
        except ProtocolError as error:
            return ReplayDifference(seq, event and event.record, f"refused: {error}")
        seq += event is not None
        for line, replayed_action in zip_longest(recorded, replayed):
            recorded_action = line and line.record
            if recorded_action != replayed_action:
                return ReplayDifference(seq, recorded_action, replayed_action)
            seq += 1
    return None


def group_by_event(lines: Sequence[JournalLine]) -> Iterator[tuple[JournalLine | None, list[JournalLine]]]:
    """Yield each event with the actions that it caused; the start's actions come first, without an event."""
    event: JournalLine | None = None
    actions: list[JournalLine] = []
    for line in lines:
        if line.is_event:
            if event or actions:
                yield event, actions
            event, actions = line, []
        else:
            actions.append(line)
    if event or actions:
        yield event, actions


def _replay_event(
    core: Orchestrator, event: JournalLine | None, recorded: Sequence[JournalLine]
) -> list[Action]:
    if event is None:
        return core.start(recorded[0].t_s)
    assert isinstance(event.record, Event)
    return core.handle(event.record, event.t_s)


def _is_cut_off(journal: Journal, difference: ReplayDifference) -> bool:
    """Whether only the last event's last actions are missing, as after a crash during the write."""
    is_at_end = difference.recorded is None and difference.seq == len(journal.lines)
    return is_at_end and not any(isinstance(line.record, Stop) for line in journal.lines)
