"""The reading side of `journal.jsonl`: header, facts and orders, or a clear refusal.

A process that dies while it writes leaves a torn last line: it is left out and reported. Any
other line that is not what was written is an InputError that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dora.core import codec
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.records import Limits, ProtocolError
from dora.errors import InputError
from dora.observe.nearby import JOURNAL, why_no_run

SCHEMA = 2
FILE_NAME = JOURNAL


class Line(NamedTuple):
    """One fact or order; `t_s` are seconds since the run began."""

    seq: int
    t_s: float
    record: Event | Action

    @property
    def is_fact(self) -> bool:
        return isinstance(self.record, Event)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A journal: what the run promised and everything that was told and ordered, in order."""

    limits: Limits
    num_prompts: int | None  # rows of the dataset; None: it grew
    lines: tuple[Line, ...]
    is_torn: bool  # the last line was cut off and is not among the lines
    critic_digest: str | None = None  # of the weights in critic.path, if one was given


def read_journal(run: Path) -> RecordedRun:
    """Read the journal in the folder of a run. Raises InputError naming the file and the line."""
    path = run / FILE_NAME
    try:
        head, *tail = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(why_no_run(run)) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    limits, num_prompts, critic_digest = read_header(path, head)
    torn = tail.pop() if tail else b""  # what follows the last line end: empty unless cut off
    lines = tuple(read_line(path, number, text) for number, text in enumerate(tail, start=2))
    for expected, line in enumerate(lines):
        if line.seq != expected:
            raise InputError(f"{path}, line {expected + 2}: seq is {line.seq}, expected {expected}")
    return RecordedRun(limits, num_prompts, lines, torn != b"", critic_digest)


def read_header(path: Path, text: bytes) -> tuple[Limits, int | None, str | None]:
    """What the first line says: limits, rows of the dataset, digest of a critic. Raises InputError."""
    raw = _object(path, 1, text)
    if raw.get("schema") != SCHEMA:
        raise InputError(f"{path}, line 1: schema is {raw.get('schema')!r}, this version reads {SCHEMA}")
    try:
        limits, num_prompts = codec.read(Limits, raw["limits"]), codec.read(int | None, raw["num_prompts"])
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts = {num_prompts} must be at least 1")
        return limits, num_prompts, codec.read(str | None, raw.get("critic_digest"))
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise InputError(f"{path}, line 1: not the header of a journal: {error}") from error


def read_line(path: Path, number: int, text: bytes) -> Line:
    """A further line, the `number`-th of the file. Raises InputError."""
    raw = _object(path, number, text)
    is_fact = raw.get("kind") in [*codec.FACTS]  # a list, for the kind may be anything
    try:
        record = codec.fact_from_json(raw) if is_fact else codec.order_from_json(raw)
        return Line(codec.read(int, raw["seq"]), codec.read(float, raw["t_s"]), record)
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise InputError(f"{path}, line {number}: neither a fact nor an order: {error}") from error


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}, line {number}: expected a JSON object, found {type(raw).__name__}")
    return raw
