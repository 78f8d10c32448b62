"""All stations of a run, played by hand: orders become facts, which a test tells when it likes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from tests.core.midway import ledger_of

from dora.core import invariants
from dora.core.actions import (
    Abort,
    Action,
    Attest,
    Dismiss,
    Fetch,
    Generate,
    Load,
    Migrate,
    Pause,
    Publish,
    Resume,
    Rush,
    Score,
    Train,
)
from dora.core.events import (
    Attested,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Paused,
    Progressed,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    StepFailed,
    Trained,
    TrainerLost,
    TrainerReplaced,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import Chunk, GroupId, Limits, Member, RequestId
from dora.core.state import State
from dora.sim.checker import Ledger

Order = TypeVar("Order", bound=Action)


def limits(**changes: Any) -> Limits:
    """Four steps of two groups with one sibling each, on-policy, unless said otherwise."""
    settings: dict[str, Any] = {"num_steps": 4, "batch_size": 2, "group_size": 1, "max_staleness": 0}
    return Limits(**(settings | changes))


def finished(engine: int, request: RequestId, version: int, num_tokens: int = 3) -> RequestFinished:
    chunks = (Chunk(version, f"v{version}", num_tokens),)
    return RequestFinished(engine, request, version, num_tokens, chunks, "stop")


class Stations:
    """`pending` holds the facts that may be told; every fact is checked by invariants and ledger.

    With a `state`, the run is already under way. The facts about a moving request are those of its
    owner, a move is settled before one of its ends is lost, and a failure takes the place of the
    success that was pending.
    """

    def __init__(self, limits: Limits, num_prompts: int = 1000, state: State | None = None) -> None:
        self.core = Orchestrator(limits, state)
        self.now = state.now_s if state else 0.0
        self.given: list[Action] = []
        self.pending: list[Event] = []
        self.ledger = ledger_of(state) if state else Ledger(limits)
        self._limits = limits
        self._num_prompts = num_prompts
        self._cursor = state.next_index if state else 0
        self._paused = {e.id for e in self.state.engines.values() if e.is_paused}
        self._rushed: dict[int, tuple[RequestId, ...]] = {}
        self._trained: list[tuple[Member, ...]] = []  # the batch of each step
        if state is None:
            self._obey(self.core.start(self.now))
        else:
            assert invariants.check(state) == []
            running = [(r, request) for r, request in state.requests.items() if request.engine is not None]
            self.pending += [finished(q.engine or 0, r, q.version) for r, q in running]

    @property
    def state(self) -> State:
        return self.core.snapshot()

    def orders(self, kind: type[Order]) -> list[Order]:
        """All orders of a kind that were given so far."""
        return [order for order in self.given if isinstance(order, kind)]

    def tell(self, event: Event) -> list[Action]:
        """Tell one fact, pending or not; returns the orders that follow."""
        if event in self.pending:
            self.pending.remove(event)
        self._follow(event)
        self.ledger.hear(event)
        if isinstance(event, Trained) and event.step in self.state.batches:
            groups = [self.state.groups[group] for group in self.state.batches[event.step]]
            self._trained.append(tuple(Member(g.id, g.index, g.version) for g in groups))
        orders = self.core.handle(event, self.now)
        self._obey(orders)
        assert invariants.check(self.state) == []
        return orders

    def possible(self) -> list[Event]:
        """Pending facts that may come next: a dataset answers in order, a row that stands still never."""
        fetches = [fact for fact in self.pending if isinstance(fact, PromptsFetched)]
        return [fact for fact in self.pending if fact not in fetches[1:] and not self._stands_still(fact)]

    def settle(self, but: Callable[[Event], bool] = lambda fact: False) -> None:
        """Tell what is possible, and what comes of it, in order; but not the facts that `but` keeps back."""
        while not self.core.done and (told := [fact for fact in self.possible() if not but(fact)]):
            self.tell(told[0])

    def join(self, engine: int, rows: int, slots: int, is_colocated: bool = False) -> None:
        self.tell(EngineJoined(engine, rows, slots, is_colocated))

    def die(self, from_step: int, kept: Collection[int] | None = None) -> list[Action]:
        """All processes die; new ones go on from the checkpoint of a step, which keeps older versions."""
        state, redone = self.state, tuple(self._trained[from_step:])
        self.pending, self._cursor, self._paused, self._rushed = [], state.next_index, set(), {}
        del self._trained[from_step:]
        older = tuple((v, digest) for v, digest in state.store.items() if v < from_step)
        held = tuple(version for version in older if kept is None or version[0] in kept)
        return self.tell(Resumed(from_step, held, redone))

    def lose_trainer(self) -> list[Action]:
        """The trainer dies alone, with what it was at."""
        return self.tell(TrainerLost("killed"))

    def replace_trainer(self, from_step: int) -> list[Action]:
        """Another one begins with the checkpoint of a step."""
        redone = self._trained[from_step:]
        batches = tuple(tuple(member.group for member in batch) for batch in redone)
        return self.tell(TrainerReplaced(from_step, batches))

    def refuse(self, request: RequestId) -> list[Action]:
        """The engine of a request fails it."""
        finish = next(f for f in self.pending if isinstance(f, RequestFinished) and f.request == request)
        self.pending.remove(finish)
        return self.tell(RequestFailed(finish.engine, request, "refused"))

    def finish(self, group: GroupId) -> None:
        """Finish all siblings of a group and score it."""
        self.settle(but=lambda fact: not _is_about(fact, group))

    def rows(self, engine: int) -> list[int]:
        """Dataset rows of what an engine runs."""
        return sorted(request.row for request in self.state.engines[engine].requests)

    def _stands_still(self, fact: Event) -> bool:
        if not isinstance(fact, RequestFinished):
            return False
        rushed = self._rushed.get(fact.engine)
        return fact.engine in self._paused or (rushed is not None and fact.request not in rushed)

    def _follow(self, event: Event) -> None:
        """What else may be told changes with a fact."""
        match event:
            case RequestFinished(_, request) | RequestFailed(_, request):
                self._end_moves(lambda move: move.request == request, "it has ended")
            case RequestsAborted(_, requests):
                self._end_moves(lambda move: move.request in requests, "it was given up")
            case Migrated(request, source, destination):
                self.pending = [_after_move(f, request, source, destination) for f in self.pending]
            case MigrationFailed(request):
                self._withdraw(lambda fact: isinstance(fact, Migrated) and fact.request == request)
            case LoadFailed(engine):
                self._withdraw(lambda fact: isinstance(fact, Loaded) and fact.engine == engine)
            case StepFailed():
                self._withdraw(lambda fact: isinstance(fact, Trained))
            case TrainerLost():
                self._withdraw(lambda fact: isinstance(fact, Trained | Published | Attested))
            case Paused(engine):
                self._paused.add(engine)
            case Progressed(_, lengths):
                known = dict(lengths)
                for move in [f for f in self.pending if isinstance(f, Migrated)]:
                    told = replace(move, num_tokens=known.get(move.request, move.num_tokens))
                    self.pending[self.pending.index(move)] = told
            case EngineLost(engine):
                while broken := self._move_of(engine):
                    ends = (broken.source, broken.destination)
                    self.tell(MigrationFailed(broken.request, *ends, "an engine died"))
                self._withdraw(lambda fact: getattr(fact, "engine", None) == engine)
            case EngineLeft(engine):
                self._withdraw(lambda fact: getattr(fact, "engine", None) == engine)

    def _withdraw(self, is_void: Callable[[Event], bool]) -> None:
        self.pending = [fact for fact in self.pending if not is_void(fact)]

    def _move_of(self, engine: int) -> Migrated | MigrationFailed | None:
        """A move of this engine that is not settled yet."""
        moves = (fact for fact in self.pending if isinstance(fact, Migrated | MigrationFailed))
        return next((move for move in moves if engine in (move.source, move.destination)), None)

    def _end_moves(self, is_over: Callable[[Migrated], bool], reason: str) -> None:
        self.pending = [
            MigrationFailed(f.request, f.source, f.destination, reason)
            if isinstance(f, Migrated) and is_over(f)
            else f
            for f in self.pending
        ]

    def _obey(self, orders: list[Action]) -> None:
        for order in orders:
            self.ledger.obey(order)
            self.given.append(order)
            match order:
                case Abort(_, requests):
                    ended = [
                        f for f in self.pending if isinstance(f, RequestFinished) and f.request in requests
                    ]
                    self.pending = [f for f in self.pending if f not in ended]
                case Resume(engine):
                    self._paused.discard(engine)
                case Rush(engine, ()):
                    self._rushed.pop(engine, None)
                case Rush(engine, requests):
                    self._rushed[engine] = requests
            self.pending += self._facts(order)

    def _facts(self, order: Action) -> list[Event]:
        match order:
            case Fetch(count):
                first, self._cursor = self._cursor, self._cursor + count
                ids = (GroupId(*divmod(index, self._num_prompts)) for index in range(first, first + count))
                return [PromptsFetched(first, tuple(ids))]
            case Generate(engine, version, requests):
                return [finished(engine, request, version) for request in requests]
            case Migrate(request, source, destination):
                num_tokens = self.state.requests[request].num_tokens
                return [Migrated(request, source, destination, num_tokens, 0, 0.0, 0.0)]
            case Abort(engine, requests):
                return [RequestsAborted(engine, requests, 0)]
            case Pause(engine):
                return [Paused(engine)]
            case Dismiss(engine):
                return [EngineLeft(engine)]
            case Score(group):
                rule = self._limits.evaluation
                size = rule.num_answers if group.is_held_out and rule else self._limits.group_size
                return [GroupScored(group, tuple(map(float, range(size))))]
            case Train(step):
                return [Trained(step)]
            case Publish(version):
                return [Published(version, f"v{version}")]
            case Attest(version):
                return [Attested(version, f"v{version} again")]
            case Load(engine, version):
                return [Loaded(engine, version, f"v{version}")]
            case _:
                return []


def _after_move(fact: Event, request: RequestId, source: int, destination: int) -> Event:
    """What the source would have told of the request is the destination's business now."""
    match fact:
        case RequestFinished(engine, of) if of == request and engine == source:
            return replace(fact, engine=destination)
        case RequestsAborted(engine, requests) if engine == source:
            return replace(fact, requests=tuple(r for r in requests if r != request))
        case _:
            return fact


def _is_about(fact: Event, group: GroupId) -> bool:
    match fact:
        case RequestFinished(_, request):
            return request.group == group
        case GroupScored(of):
            return of == group
        case _:
            return False


def is_work(fact: Event) -> bool:
    """Whether a fact ends generation or training: what a test tells by itself."""
    return isinstance(fact, RequestFinished | GroupScored | Trained)
