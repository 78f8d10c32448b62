"""All stations of a run, played by hand: orders become facts, which a test tells when it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dora.core import invariants
from dora.core.actions import Abort, Action, Fetch, Generate, Load, Publish, Score, Train
from dora.core.events import (
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    Loaded,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import Chunk, GroupId, Limits, RequestId
from dora.core.state import State
from dora.sim.checker import Ledger

Order = TypeVar("Order", bound=Action)


def limits(**changes: Any) -> Limits:
    """Four steps of two groups with one sibling each, on-policy, unless said otherwise."""
    settings: dict[str, Any] = {"num_steps": 4, "batch_size": 2, "group_size": 1, "max_staleness": 0}
    return Limits(**(settings | changes))


def finished(engine: int, request: RequestId, version: int) -> RequestFinished:
    return RequestFinished(engine, request, version, 3, (Chunk(version, f"v{version}", 3),), "stop")


class Stations:
    """`pending` holds the facts that may be told; every fact is checked by invariants and ledger."""

    def __init__(self, limits: Limits, num_prompts: int = 1000) -> None:
        self.core = Orchestrator(limits)
        self.now = 0.0
        self.given: list[Action] = []
        self.pending: list[Event] = []
        self.ledger = Ledger(limits)
        self._limits = limits
        self._num_prompts = num_prompts
        self._cursor = 0
        self._obey(self.core.start(self.now))

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
        if isinstance(event, EngineLost):
            self.pending = [f for f in self.pending if getattr(f, "engine", None) != event.engine]
        self.ledger.hear(event)
        orders = self.core.handle(event, self.now)
        self._obey(orders)
        assert invariants.check(self.state) == []
        return orders

    def possible(self) -> list[Event]:
        """Pending facts that may come next: all but those of a dataset that answers out of order."""
        fetches = [fact for fact in self.pending if isinstance(fact, PromptsFetched)]
        return [fact for fact in self.pending if fact not in fetches[1:]]

    def settle(self, but: Callable[[Event], bool] = lambda fact: False) -> None:
        """Tell what is pending, and what comes of it, in order; but not the facts that `but` keeps back."""
        while not self.core.done and (told := [fact for fact in self.pending if not but(fact)]):
            self.tell(told[0])

    def join(self, engine: int, rows: int, slots: int) -> None:
        self.tell(EngineJoined(engine, rows, slots))

    def refuse(self, request: RequestId) -> list[Action]:
        """The engine of a request fails it."""
        finish = next(f for f in self.pending if isinstance(f, RequestFinished) and f.request == request)
        self.pending.remove(finish)
        return self.tell(RequestFailed(finish.engine, request, "refused"))

    def finish(self, group: GroupId) -> None:
        """Finish all siblings of a group and score it."""
        self.settle(but=lambda fact: not _is_about(fact, group))

    def _obey(self, orders: list[Action]) -> None:
        for order in orders:
            self.ledger.obey(order)
            self.given.append(order)
            if isinstance(order, Abort):
                self.pending = [f for f in self.pending if getattr(f, "request", None) not in order.requests]
            self.pending += self._facts(order)

    def _facts(self, order: Action) -> list[Event]:
        match order:
            case Fetch(count):
                first, self._cursor = self._cursor, self._cursor + count
                ids = (GroupId(*divmod(index, self._num_prompts)) for index in range(first, first + count))
                return [PromptsFetched(first, tuple(ids))]
            case Generate(engine, version, requests):
                return [finished(engine, request, version) for request in requests]
            case Abort(engine, requests):
                return [RequestsAborted(engine, requests, 0)]
            case Score(group):
                return [GroupScored(group, tuple(map(float, range(self._limits.group_size))))]
            case Train(step):
                return [Trained(step)]
            case Publish(version):
                return [Published(version, f"v{version}")]
            case Load(engine, version):
                return [Loaded(engine, version, f"v{version}")]
            case _:
                return []


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
