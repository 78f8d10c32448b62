"""What the engines of a simulated world truly hold, and the laws that no order may break.

Every change of a seat, a slot or a pace goes through here and is checked as it happens, so the
truth is watched after every event at no cost for what did not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dora.core.records import RequestId

RUSH_SPEEDUP = 1.5  # a rushed engine's rows are faster, for fewer share its memory bandwidth


class Violation(Exception):
    """A guarantee is broken."""


class Stage(Enum):
    """How far a move has come. From `STOPPED` on, the request's snapshot outlives its source."""

    COPYING = auto()
    STOPPED = auto()
    TAKEN = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Row:
    """One request where it truly is; it has `done` tokens at time `since` and gains `rate` a second."""

    request: RequestId
    version: int
    length: int
    engine: SimEngine
    since: float
    done: float = 0.0
    rate: float = 0.0
    ticket: int = 0  # of the end that is planned; older plans are void
    told_from: float = 0.0  # its end is not told before, for `Migrated` is on its way
    is_refused: bool = False
    move: Move | None = None
    segments: list[tuple[int, int]] = field(
        default_factory=list
    )  # (version, tokens by its end), earlier ones

    def renew(self, version: int, now: float) -> None:
        """Go on with another version."""
        self.settle(now)
        self.segments.append((self.version, int(self.done)))
        self.version = version

    def chunks(self) -> list[tuple[int, int]]:
        """(version, number of tokens) of all that was drawn."""
        found, start = [], 0
        for version, stop in (*self.segments, (self.version, self.length)):
            if stop > start:
                found.append((version, stop - start))
                start = stop
        return found

    @property
    def is_over(self) -> bool:
        """It has left its engine, or its engine is dead: its plans are void."""
        return self.engine.is_lost or self.engine.rows.get(self.request) is not self

    def settle(self, now: float) -> None:
        """Credit the tokens gained up to `now`."""
        self.done = min(float(self.length), self.done + (now - self.since) * self.rate)
        self.since = now


@dataclass(slots=True, eq=False)
class Move:
    """A request on its way from one engine to another."""

    row: Row
    source: SimEngine
    destination: SimEngine
    copy_s: float
    stop_s: float
    is_doomed: bool  # the source's lease ends before the destination takes it
    stage: Stage = Stage.COPYING
    reason: str = ""
    num_tokens: int = 0
    is_told: bool = False


@dataclass(slots=True, eq=False)
class SimEngine:
    """One life of an engine."""

    id: int
    kind: int  # which engine of the configuration it is
    num_rows: int
    num_slots: int
    speed: float  # tokens per second of a row
    is_colocated: bool
    held: set[int] = field(default_factory=set)
    loading: int | None = None
    rows: dict[RequestId, Row] = field(default_factory=dict)
    arriving: dict[RequestId, Move] = field(default_factory=dict)
    moves: dict[RequestId, Move] = field(default_factory=dict)  # not told yet; to here or from here
    departed: dict[RequestId, int] = field(default_factory=dict)  # taken since the last report -> tokens
    rushed: frozenset[RequestId] = frozenset()
    is_paused: bool = False
    is_pausing: bool = False
    is_resuming: bool = False  # at once after the pause that is under way
    is_lost: bool = False
    is_leaving: bool = False
    is_reporting: bool = False

    def rate_of(self, row: Row) -> float:
        """Tokens per second of a row, 0 where it stands still."""
        if self.is_paused or row.is_refused or (row.move is not None and row.move.stage is Stage.STOPPED):
            return 0.0
        if self.rushed:
            return self.speed * RUSH_SPEEDUP if row.request in self.rushed else 0.0
        return self.speed


class Truth:
    """Which request is where. `Violation` where an order asks for what cannot be."""

    def __init__(self) -> None:
        self.engines: dict[int, SimEngine] = {}  # joined and not buried
        self.where: dict[RequestId, SimEngine] = {}
        self.is_training = False

    def seat(self, row: Row, engine: SimEngine) -> None:
        """A request begins, or goes on, on an engine."""
        owner = self.where.get(row.request)
        if owner is not None:
            raise Violation(f"{row.request} has two owners, engines {owner.id} and {engine.id}")
        if row.version not in engine.held:
            raise Violation(f"engine {engine.id} does not truly hold version {row.version}")
        self.where[row.request] = engine
        engine.rows[row.request] = row
        row.engine = engine
        self.check_rows(engine)

    def unseat(self, row: Row) -> None:
        """A request has left its engine: finished, given up, moved or lost."""
        del self.where[row.request]
        row.engine.rows.pop(row.request, None)

    def reserve(self, move: Move) -> None:
        """The destination keeps a row for a request under way."""
        engine, request = move.destination, move.row.request
        if move.row.version not in engine.held:
            raise Violation(f"{request} moves to engine {engine.id}, which lacks version {move.row.version}")
        if request in engine.moves or request in move.source.moves:
            raise Violation(f"{request} is moved twice at a time")
        engine.arriving[request] = engine.moves[request] = move.source.moves[request] = move
        self.check_rows(engine)

    def check_rows(self, engine: SimEngine) -> None:
        """Requests and reservations fit into the rows."""
        if len(engine.rows) + len(engine.arriving) > engine.num_rows:
            raise Violation(f"engine {engine.id} truly has more requests than its {engine.num_rows} rows")

    def check_drop(self, engine: SimEngine, version: int) -> None:
        """Nothing that runs or arrives needs the version."""
        needing = [r.request for r in engine.rows.values() if r.version == version]
        needing += [m.row.request for m in engine.arriving.values() if m.row.version == version]
        if needing:
            raise Violation(f"engine {engine.id} drops version {version} under {needing}")

    def check_load(self, engine: SimEngine) -> None:
        """One load at a time, into a free slot."""
        if engine.loading is not None or len(engine.held) >= engine.num_slots:
            raise Violation(f"engine {engine.id} has no free slot of {engine.num_slots}: {engine.held}")

    def check_dismissal(self, engine: SimEngine) -> None:
        """An engine leaves empty."""
        if engine.rows or engine.moves:
            raise Violation(f"engine {engine.id} is dismissed with {len(engine.rows)} requests")

    def check_device(self) -> None:
        """While the trainer trains, no engine on its device decodes."""
        for engine in self.engines.values():
            if engine.is_colocated and not engine.is_lost and any(r.rate for r in engine.rows.values()):
                raise Violation(f"engine {engine.id} decodes on the trainer's device while it trains")
