"""Which request sits on which engine, as the facts and orders say: one half of the checker.

One owner per request, rows and slots conserved, nothing regenerated without a loss, moves only
to where the version is, colocated engines silent while the trainer trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dora.core.actions import Abort, Drop, Generate, Load, Migrate, Rush
from dora.core.events import (
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Progressed,
    Woken,
)
from dora.core.records import RequestId
from dora.sim.engines import Truth, Violation


def require(condition: bool, sentence: str) -> None:
    """For what is rare; where it is frequent, writing the sentence for nothing would cost too much."""
    if not condition:
        raise Violation(sentence)


@dataclass(slots=True)
class Seen:
    """What is known of one engine."""

    id: int
    num_rows: int
    num_slots: int
    is_colocated: bool
    held: set[int] = field(default_factory=set)
    loading: int | None = None
    seats: dict[RequestId, int] = field(default_factory=dict)  # -> version
    arriving: dict[RequestId, int] = field(default_factory=dict)  # ordered to move here -> version
    num_of: Counter[int] = field(default_factory=Counter)  # version -> seats and arriving
    is_paused: bool = False  # as it joins, if it is colocated
    is_pausing: bool = False
    num_own: int = 0  # of the news, its own loads
    dropped: dict[int, int] = field(default_factory=dict)  # version -> others' news when it was dropped
    is_draining: bool = False
    is_dismissed: bool = False


class Seats:
    """The ledger of engines."""

    def __init__(self) -> None:
        self.engines: dict[int, Seen] = {}
        self.owner: dict[RequestId, Seen] = {}
        self.moving: dict[RequestId, tuple[Seen, Seen]] = {}  # source, destination
        self.aborting: set[RequestId] = set()
        self.begun: set[RequestId] = set()  # and not lost with their engine since
        self.copies: Counter[int] = Counter()  # version -> engines that hold it
        self.tokens: dict[RequestId, int] = {}  # as last told
        self.lost: set[int] = set()  # engines in whose place there is no other
        self.num_news = 0  # facts so far, but for those that only say that time goes by
        self.arrived_dead: set[RequestId] = set()  # moved although given up; again to be given up

    # facts

    def begin(self, event: Event) -> None:
        """Before each fact: what the last one asked for has been ordered."""
        if type(event) not in (Progressed, Woken):
            self.num_news += 1
        if self.arrived_dead:
            raise Violation(f"{[*self.arrived_dead]} were moved, and are not given up there")

    def join(self, fact: EngineJoined) -> None:
        require(fact.engine not in self.engines, f"engine {fact.engine} joins twice")
        if fact.replaces is not None:
            require(fact.replaces in self.lost, f"engine {fact.engine} replaces one that was not lost")
            self.lost.discard(fact.replaces)
        seen = Seen(fact.engine, fact.rows, fact.slots, fact.is_colocated, is_paused=fact.is_colocated)
        self.engines[fact.engine] = seen

    def lose(self, fact: EngineLost) -> None:
        engine = self.engines.pop(fact.engine)
        self.lost.add(fact.engine)
        open_moves = [r for r, ends in self.moving.items() if engine in ends]
        require(not open_moves, f"engine {engine.id} is lost before the moves of {open_moves} are told")
        self.begun -= engine.seats.keys()
        self.copies.subtract(engine.held)
        for request in engine.seats:
            del self.owner[request]
            self.tokens.pop(request, None)
            self.aborting.discard(request)

    def lose_all(self) -> None:
        """Everything died."""
        for known in (self.engines, self.owner, self.moving, self.copies, self.tokens):
            known.clear()
        for requests in (self.aborting, self.begun, self.arrived_dead):
            requests.clear()
        self.lost.clear()

    def leave(self, fact: EngineLeft) -> None:
        engine = self.engines.pop(fact.engine)
        require(engine.is_dismissed, f"engine {engine.id} left without being dismissed")
        self.copies.subtract(engine.held)

    def loaded(self, fact: Loaded) -> None:
        engine = self.engines[fact.engine]
        require(engine.loading == fact.version, f"engine {engine.id} loaded {fact.version} unasked")
        engine.loading = None
        engine.num_own += 1
        engine.held.add(fact.version)
        self.copies[fact.version] += 1

    def load_failed(self, fact: LoadFailed) -> None:
        self.engines[fact.engine].loading = None

    def ask_drain(self, engine: int, is_asked: bool) -> None:
        """Somebody wants the engine to leave; or is refused."""
        self.engines[engine].is_draining = is_asked

    def paused(self, engine: int) -> None:
        seen = self.engines[engine]
        seen.is_pausing, seen.is_paused = False, True

    def progress(self, fact: Progressed) -> None:
        seats = self.engines[fact.engine].seats
        self.tokens.update((request, n) for request, n in fact.lengths if request in seats)

    def free(self, engine: int, request: RequestId) -> None:
        """A request left its row: finished, failed or given up."""
        owner = self.owner.pop(request, None)
        if owner is None or owner.id != engine:
            raise Violation(f"{request} ends on engine {engine}, not its owner")
        owner.num_of[owner.seats.pop(request)] -= 1
        self.aborting.discard(request)
        self.tokens.pop(request, None)

    def move(self, fact: Migrated) -> None:
        source, destination = self._end_move(fact)
        version = source.seats.pop(fact.request)
        require(self.owner[fact.request] is source, f"{fact.request} was moved by one who did not own it")
        require(
            fact.num_tokens >= self.tokens.get(fact.request, 0), f"{fact.request} lost tokens in its move"
        )
        source.num_of[version] -= 1
        destination.num_of[version] += 1
        destination.seats[fact.request] = version
        self.owner[fact.request] = destination
        if fact.request in self.aborting:
            self.arrived_dead.add(fact.request)

    def stay(self, fact: MigrationFailed) -> None:
        self._end_move(fact)

    def _end_move(self, fact: Migrated | MigrationFailed) -> tuple[Seen, Seen]:
        ends = self.moving.pop(fact.request, None)
        told = (fact.source, fact.destination)
        if ends is None or (ends[0].id, ends[1].id) != told:
            raise Violation(f"a move of {fact.request} over {told} is told, which nobody ordered")
        version = ends[1].arriving.pop(fact.request)
        ends[1].num_of[version] -= 1
        return ends

    # orders

    def generate(self, order: Generate, versions: Iterable[int]) -> None:
        """`versions` of the requests' groups, one for each."""
        engine = self._staffed(order.engine, "generates")
        version = order.version
        require(version in engine.held, f"engine {engine.id} does not hold version {version}")
        for request, admitted_at in zip(order.requests, versions, strict=True):
            if request in self.owner:
                raise Violation(f"{request} has two owners")
            if request in self.begun:
                raise Violation(f"{request} is regenerated, and no engine was lost")
            if admitted_at != version:
                raise Violation(f"C1: {request} changes its version")
            self.begun.add(request)
            self.owner[request] = engine
            engine.seats[request] = version
        engine.num_of[version] += len(order.requests)
        self._check_rows(engine)

    def migrate(self, order: Migrate) -> None:
        request, version = order.request, order.version
        source, destination = self.engines[order.source], self._staffed(order.destination, "receives")
        require(source is not destination, f"{request} moves to where it is")
        require(self.owner.get(request) is source, f"{request} is moved from engine {source.id}, not there")
        require(request not in self.moving, f"{request} is in two moves")
        require(request not in self.aborting, f"{request} is moved and given up")
        require(source.seats[request] == version, f"C1: {request} changes its version in a move")
        require(version in destination.held, f"{request} moves to engine {destination.id} without {version}")
        self.moving[request] = (source, destination)
        destination.arriving[request] = version
        destination.num_of[version] += 1
        self._check_rows(destination)

    def abort(self, order: Abort) -> None:
        for request in order.requests:
            owner = self.owner.get(request)
            require(owner is not None and owner.id == order.engine, f"{request} is given up where it is not")
            self.aborting.add(request)
            self.arrived_dead.discard(request)

    def rush(self, order: Rush) -> None:
        seats = self._known(order.engine).seats
        require(seats.keys() >= {*order.requests}, f"engine {order.engine} rushes requests it has not")

    def drop(self, order: Drop, is_pinned: bool) -> None:
        engine, version = self._known(order.engine), order.version
        require(not engine.num_of[version], f"engine {engine.id} drops version {version} under its requests")
        require(version in engine.held, f"engine {engine.id} drops version {version}, which it lacks")
        is_last = self.copies[version] == 1
        require(not (is_last and is_pinned), f"the last copy of pinned version {version} is dropped")
        engine.held.discard(version)
        engine.dropped[version] = self.num_news - engine.num_own
        self.copies[version] -= 1

    def load(self, order: Load, is_evaluated: bool) -> None:
        """An evaluation may be lent an engine again and again, for each time it gets on."""
        engine = self._known(order.engine)
        require(engine.loading is None, f"engine {engine.id} is ordered two loads at a time")
        require(order.version not in engine.held, f"engine {engine.id} loads what it holds")
        require(len(engine.held) < engine.num_slots, f"engine {engine.id} uses more than its slots")
        is_news = is_evaluated or engine.dropped.get(order.version) != self.num_news - engine.num_own
        require(is_news, f"engine {engine.id} drops and loads version {order.version} for nothing")
        engine.loading = order.version

    def pause(self, engine: int) -> None:
        seen = self._known(engine)
        require(seen.is_colocated, f"engine {engine} is paused and shares no device")
        seen.is_pausing = True

    def resume(self, engine: int) -> None:
        self._known(engine).is_paused = False

    def dismiss(self, engine_id: int) -> None:
        engine = self._known(engine_id)
        require(engine.is_draining, f"engine {engine_id} is dismissed, and nobody asked for it")
        require(
            not engine.seats and not engine.arriving, f"engine {engine_id} is dismissed with its requests"
        )
        require(
            any(not e.is_draining for e in self.engines.values()), f"the last engine, {engine_id}, leaves"
        )
        engine.is_dismissed = True

    def check_device(self) -> None:
        """The trainer may begin: no engine on its device decodes."""
        for engine in self.engines.values():
            is_silent = engine.is_paused or not engine.seats
            require(is_silent or not engine.is_colocated, f"engine {engine.id} decodes during a step")

    def check_idleness(self, pins: Counter[int]) -> None:
        """No request waits beside a free row of its version; no empty engine that drains is kept."""
        waiting = +pins
        for seen in self.engines.values():
            waiting.subtract(v for r, v in seen.seats.items() if r not in self.aborting)
        for seen in self.engines.values():
            if seen.is_draining:
                is_source = any(source is seen for source, _ in self.moving.values())
                is_busy = is_source or seen.num_of.total() > 0 or seen.loading is not None
                require(
                    is_busy or seen.is_dismissed, f"engine {seen.id} drains, is empty, and is not dismissed"
                )
            elif not (seen.is_paused or seen.is_pausing) and seen.num_of.total() < seen.num_rows:
                idle = [v for v in seen.held if waiting[v] > 0]
                require(not idle, f"requests of {idle} wait, and engine {seen.id} has free rows")

    def compare(self, truth: Truth) -> None:
        """What was told agrees with what is, but for moves whose outcome is not told yet."""
        for engine_id, engine in truth.engines.items():
            told = self.engines[engine_id].seats
            if not engine.is_lost:
                unknown = [r for r in engine.rows if r not in told and r not in engine.moves]
                require(not unknown, f"engine {engine_id} truly runs {unknown}, which nobody gave it")
            for request in told:
                is_there = engine.is_lost or request in engine.rows or request in engine.moves
                require(is_there, f"{request} is not on engine {engine_id}, which should run it")

    def _known(self, engine: int) -> Seen:
        seen = self.engines.get(engine)
        if seen is None or seen.is_dismissed:
            raise Violation(f"engine {engine} is given an order, and is gone or dismissed")
        return seen

    def _staffed(self, engine: int, verb: str) -> Seen:
        seen = self._known(engine)
        require(not seen.is_draining, f"engine {engine} {verb} requests while it drains")
        return seen

    def _check_rows(self, engine: Seen) -> None:
        load = len(engine.seats) + len(engine.arriving)
        require(load <= engine.num_rows, f"engine {engine.id} has {load} requests, more than its rows")
