"""`dora replay`: the recorded facts, told again to a fresh orchestrator, must give the recorded orders.

A difference means that the run was driven by other rules than this version has, or that the
record was changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from dora.core.actions import Action, Stop
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.records import ProtocolError
from dora.core.wording import counted
from dora.observe.journal import Line, RecordedRun, read_journal

Turn = tuple[Line | None, list[Line]]


class Difference(NamedTuple):
    """Where record and replay part first; None stands for no order."""

    seq: int
    recorded: object
    replayed: object


def main(run: Path) -> int:
    """Print how many orders agree, or the first difference; exit code 1 if there is one."""
    journal = read_journal(run)
    difference = first_difference(journal)
    if difference is not None and not _is_cut_off(journal, difference):
        recorded, replayed = difference.recorded or "no order", difference.replayed or "no order"
        print(f"replay differs at seq {difference.seq}\n   recorded  {recorded}\n   replayed  {replayed}")
        return 1
    if difference is not None or journal.is_torn:
        print("the record was cut off at its end; what is left of it was replayed")
    num_facts = sum(line.is_fact for line in journal.lines)
    facts, orders = counted(num_facts, "fact"), counted(len(journal.lines) - num_facts, "order")
    print(f"replay agrees: {facts} gave the same {orders}")
    return 0


def first_difference(journal: RecordedRun) -> Difference | None:
    """Tell a fresh orchestrator the recorded facts at their times and compare what it orders."""
    core = Orchestrator(journal.limits)
    seq = 0
    for fact, orders in turns(journal.lines):
        try:
            replayed = _answer(core, fact, orders)
        except ProtocolError as error:
            return Difference(seq, fact and fact.record, f"refused: {error}")
        seq += fact is not None
        for line, ours in zip_longest(orders, replayed):
            theirs = line and line.record
            if theirs != ours:
                return Difference(seq, theirs, ours)
            seq += 1
    return None


def _answer(core: Orchestrator, fact: Line | None, orders: Sequence[Line]) -> list[Action]:
    if fact is None:
        return core.start(orders[0].t_s)
    assert isinstance(fact.record, Event)
    return core.handle(fact.record, fact.t_s)


def turns(lines: Sequence[Line]) -> Iterator[Turn]:
    """Each fact with the orders it caused; the first turn has no fact, it is the start."""
    fact: Line | None = None
    orders: list[Line] = []
    for line in lines:
        if line.is_fact:
            if fact or orders:
                yield fact, orders
            fact, orders = line, []
        else:
            orders.append(line)
    if fact or orders:
        yield fact, orders


def _is_cut_off(journal: RecordedRun, difference: Difference) -> bool:
    """A process that died while it wrote has left out the last orders of its last fact."""
    is_at_end = difference.recorded is None and difference.seq == len(journal.lines)
    return is_at_end and not any(isinstance(line.record, Stop) for line in journal.lines)
