"""Draws a whole run into a file, event by event.

Each part of the drawing reads all facts and orders; nothing of the file is kept in memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from dora.core.wording import counted
from dora.errors import InputError
from dora.observe.journal import RecordedRun, read_journal
from dora.observe.trace.drawing import Event, Ids
from dora.observe.trace.engines import Engines
from dora.observe.trace.stations import Groups, Judging, Trainer, Versions

FILE_NAME = "trace.json"
STILL = "still so when the journal ends"


def main(run: Path, out: Path | None = None) -> str:
    """Write the drawing of a run, and return what to tell about it. Raises InputError."""
    journal, out = read_journal(run), out or run / FILE_NAME
    try:
        with _opened(out) as file:
            num_events, num_moves = write(journal, str(run), file)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): give another --out") from error
    torn = "; the journal's last line was cut off and is left out" if journal.is_torn else ""
    return (
        f"{out}: {counted(num_events, 'event')}, {counted(num_moves, 'move')} between engines{torn}\n"
        "open it at https://ui.perfetto.dev, which keeps it in your browser, or at chrome://tracing"
    )


def write(journal: RecordedRun, name: str, file: TextIO) -> tuple[int, int]:
    """Write the drawing of a run called `name`; returns the numbers of events and of moves."""
    num_events = 0

    def emit(event: Event) -> None:
        nonlocal num_events
        file.write((",\n" if num_events else "") + json.dumps(event))
        num_events += 1

    about = {"run": name, "max_staleness": journal.limits.max_staleness}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    num_moves = draw(journal, emit)
    file.write("\n]}\n")
    return num_events, num_moves


def draw(journal: RecordedRun, emit: Callable[[dict[str, Any]], None]) -> int:
    """Hand on the events of the drawing; returns how many requests moved."""
    ids = Ids()
    groups = Groups(emit, ids)
    stations = (Trainer(emit, ids), Judging(emit, ids), Versions(emit, ids))
    engines = Engines(emit, ids, journal.limits.breaks_c1)
    for line in journal.lines:
        for reader in (groups, *stations, engines):
            reader.read(line.t_s, line.record)
    end_s = journal.lines[-1].t_s if journal.lines else 0.0
    for station in (*stations, engines):
        station.close(end_s, STILL)
    return engines.num_moves


def _opened(out: Path) -> TextIO:
    """Compressed where the name ends in .gz; Perfetto reads both."""
    if out.suffix == ".gz":
        return gzip.open(out, "wt", encoding="utf-8")
    return out.open("w", encoding="utf-8")
