"""The true state of the engines in a simulated world: what they hold and decode. Raises `Violation` at the
first broken invariant.

Every change of a row, a version slot or a decode rate goes through `GroundTruth`, which checks that change
alone: the checks cover all events, and cost nothing for what did not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dora.core.types import RequestId

DECODE_ONLY_SPEEDUP = 1.5  # speed-up of rows that decode alone, because fewer rows share the memory bandwidth


class Violation(Exception):
    """A guarantee or an invariant is broken."""


def require(condition: bool, message: str) -> None:
    """Raise `Violation` unless the condition holds. Formats the message either way: use `if` in hot code."""
    if not condition:
        raise Violation(message)


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request on the engine that owns it. It has `num_tokens` at `updated_s` and gains `tokens_per_s`."""

    id: RequestId
    version: int
    length: int  # tokens of its response
    engine: SimEngine
    updated_s: float
    num_tokens: float = 0.0
    tokens_per_s: float = 0.0
    finish_id: int = 0  # of the finish that was scheduled last; earlier ones are void
    report_after_s: float = 0.0  # its `Migrated` is reported then, and its end not before
    is_refused: bool = False
    is_queued: bool = False  # its engine has no free row for it
    migration: SimMigration | None = None
    segments: list[tuple[int, int]] = field(
        default_factory=list
    )  # (version, tokens at its end), earlier ones

    @property
    def is_over(self) -> bool:
        """Whether the request has left its engine, or the engine is lost; then its scheduled callbacks are
        void.
        """
        return self.engine.is_lost or self.engine.requests.get(self.id) is not self

    def advance(self, now: float) -> None:
        """Add the tokens decoded up to `now`."""
        self.num_tokens = min(
            float(self.length), self.num_tokens + (now - self.updated_s) * self.tokens_per_s
        )
        self.updated_s = now

    def switch_version(self, version: int, now: float) -> None:
        """Continue with another version."""
        self.advance(now)
        self.segments.append((self.version, int(self.num_tokens)))
        self.version = version

    def chunks(self) -> list[tuple[int, int]]:
        """(version, number of tokens) of the whole response."""
        chunks, start = [], 0
        for version, stop in (*self.segments, (self.version, self.length)):
            if stop > start:
                chunks.append((version, stop - start))
                start = stop
        return chunks


class MigrationStage(Enum):
    """Progress of a migration. From `STOPPED` on, the snapshot of the request outlives its source engine."""

    COPYING = auto()
    STOPPED = auto()
    COMPLETED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class SimMigration:
    """A request under migration from one engine to another."""

    request: SimRequest
    source: SimEngine
    destination: SimEngine
    copy_s: float
    stop_s: float
    will_fail: bool  # the destination refuses it, or the lease expires before the destination takes over
    stage: MigrationStage = MigrationStage.COPYING
    reason: str = ""
    num_tokens: int = 0
    is_reported: bool = False


@dataclass(slots=True, eq=False)
class SimEngine:
    """An engine from its start to its end; one that starts again is another SimEngine."""

    id: int
    index: int  # in `WorldConfig.engines`
    num_rows: int  # decoded at once; requests beyond them wait
    num_queued: int  # of these at most
    num_slots: int
    tokens_per_s: float  # of a row
    is_colocated: bool
    held: set[int] = field(default_factory=set)
    loading: int | None = None
    requests: dict[RequestId, SimRequest] = field(default_factory=dict)
    incoming: dict[RequestId, SimMigration] = field(default_factory=dict)
    migrations: dict[RequestId, SimMigration] = field(default_factory=dict)  # unreported, to or from here
    migrated_away: dict[RequestId, int] = field(default_factory=dict)  # since the last report -> tokens
    decode_only: frozenset[RequestId] = frozenset()
    is_paused: bool = False
    is_pausing: bool = False
    resumes_after_pause: bool = False
    is_lost: bool = False
    is_leaving: bool = False
    is_reporting: bool = False

    def tokens_per_s_of(self, request: SimRequest) -> float:
        """Decode rate of a request; 0 while it is stopped."""
        is_stopped = request.migration is not None and request.migration.stage is MigrationStage.STOPPED
        if self.is_paused or request.is_refused or request.is_queued or is_stopped:
            return 0.0
        found = (self.requests.get(prioritized) for prioritized in self.decode_only)
        if any(each is not None and not each.is_queued for each in found):
            return self.tokens_per_s * DECODE_ONLY_SPEEDUP if request.id in self.decode_only else 0.0
        return self.tokens_per_s

    def take_queued(self) -> list[SimRequest]:
        """Give the free rows to queued requests, which are returned, in order."""
        queued = [request for request in self.requests.values() if request.is_queued]
        num_used = len(self.requests) - len(queued) + len(self.incoming)
        started = queued[: max(0, self.num_rows - num_used)]
        for request in started:
            request.is_queued = False
        return started


class GroundTruth:
    """The engines and the owner of each request."""

    def __init__(self) -> None:
        self.engines: dict[int, SimEngine] = {}  # from their start until their loss is reported
        self.owner: dict[RequestId, SimEngine] = {}
        self.is_training = False

    def assign(self, request: SimRequest, engine: SimEngine) -> None:
        """Start or continue a request on an engine."""
        owner = self.owner.get(request.id)
        if owner is not None:
            raise Violation(f"{request.id} has two owners: engine {owner.id} and engine {engine.id}")
        if request.version not in engine.held:
            raise Violation(f"engine {engine.id} runs {request.id} without its version {request.version}")
        self.owner[request.id] = engine
        engine.requests[request.id] = request
        request.engine = engine
        self.check_rows(engine, engine.num_queued)

    def release(self, request: SimRequest) -> None:
        """Free the row of a request that has finished, failed, migrated or was aborted."""
        del self.owner[request.id]
        request.engine.requests.pop(request.id, None)

    def reserve(self, migration: SimMigration) -> None:
        """Reserve a row on the destination of a migration."""
        destination, request = migration.destination, migration.request
        if request.version not in destination.held:
            raise Violation(
                f"{request.id} migrates to engine {destination.id}, which does not hold its version "
                f"{request.version}"
            )
        if request.id in destination.migrations or request.id in migration.source.migrations:
            raise Violation(f"{request.id} has two migrations at once")
        destination.incoming[request.id] = migration
        destination.migrations[request.id] = migration.source.migrations[request.id] = migration
        self.check_rows(destination)

    def check_rows(self, engine: SimEngine, num_queued: int = 0) -> None:
        """Requests and reservations fit into the rows of the engine, and its queue if it may be used."""
        num_used = len(engine.requests) + len(engine.incoming)
        if num_used > engine.num_rows + num_queued:
            raise Violation(f"engine {engine.id} uses {num_used} rows, more than its {engine.num_rows} rows")

    def check_drop(self, engine: SimEngine, version: int) -> None:
        """No running or incoming request needs the version."""
        users = [r.id for r in engine.requests.values() if r.version == version]
        users += [m.request.id for m in engine.incoming.values() if m.request.version == version]
        if users:
            raise Violation(f"engine {engine.id} drops version {version} under its requests {users}")

    def check_load(self, engine: SimEngine) -> None:
        """The engine loads one version at a time, into a free slot."""
        if engine.loading is not None or len(engine.held) >= engine.num_slots:
            raise Violation(
                f"engine {engine.id} loads without a free slot: {engine.num_slots} slots, "
                f"holds {engine.held}, loading {engine.loading}"
            )

    def check_removal(self, engine: SimEngine) -> None:
        """An engine is removed without requests."""
        if engine.requests or engine.migrations:
            raise Violation(f"engine {engine.id} is removed with its requests {[*engine.requests]}")

    def check_device(self) -> None:
        """No engine on the trainer's device decodes during a training step."""
        for engine in self.engines.values():
            is_on_device = engine.is_colocated and not engine.is_lost
            if is_on_device and any(request.tokens_per_s for request in engine.requests.values()):
                raise Violation(f"engine {engine.id} decodes on the trainer's device during a step")
