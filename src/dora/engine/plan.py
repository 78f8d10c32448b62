"""Where a request can be in an engine, and what is to be done before a decode step.

A plan is made by the scheduler, which touches no KV, and carried out by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dora.engine.sequence import PromptKey, Sequence


class State(Enum):
    """Where a request is."""

    WAITING = auto()  # for a row
    PREFILL = auto()  # it has a row, and its prompt is being computed
    RUNNING = auto()
    MIGRATING_OUT = auto()  # it has a row, but stands still, for another engine may have taken it
    MIGRATING_IN = auto()  # it has a row, but still belongs to another engine
    SWAPPED = auto()  # it has given up its row; its KV is in host memory
    DONE = auto()  # not here, or not any more


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens `start` to `stop` of a prompt, whose KV is to be computed into `blocks`.

    That of the tokens before them is there already, or is computed by an earlier prefill.
    """

    key: PromptKey
    blocks: list[int]
    start: int
    stop: int


@dataclass(slots=True)
class Plan:
    """What to do before the next decode step, in this order."""

    swapped_out: list[Sequence] = field(default_factory=list)  # with the rows and blocks they had
    grown: list[Sequence] = field(default_factory=list)  # they have more blocks
    swapped_in: list[tuple[Sequence, int]] = field(default_factory=list)  # so many blocks are here already
    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # of whole blocks, (from, to)
    started: list[Sequence] = field(default_factory=list)  # they decode from now on
