"""What minds of other systems have in common: groups, rows and steps, without the orchestrator's rules.

They hear the same facts and give the same orders, so that stations cannot tell them apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from dora.core.actions import Abort, Action, Admit, Fetch, Generate, Load, Publish, Score, Stop, Train
from dora.core.events import (
    EngineJoined,
    Event,
    GroupScored,
    Loaded,
    PromptsFetched,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.records import GroupId, Limits, RequestId


@dataclass
class Seats:
    """One engine: what runs on it."""

    id: int
    rows: int
    held: int | None = None
    loading: int | None = None
    running: dict[RequestId, None] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.rows - len(self.running)


class Foreign(ABC):
    """The part of a mind that all have. `_decide` is each one's own."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.engines: dict[int, Seats] = {}
        self.prompts: deque[GroupId] = deque()
        self.num_fetching = 0
        self.unfinished: dict[GroupId, int] = {}
        self.where: dict[RequestId, int] = {}
        self.ready: list[GroupId] = []
        self.step = 0
        self.newest: int | None = None
        self.is_training = False
        self.done = False

    def start(self, now: float) -> list[Action]:
        return [Publish(0)]

    def handle(self, event: Event, now: float) -> list[Action]:
        return [*self._hear(event), *([] if self.done else self._decide(now))]

    @abstractmethod
    def _decide(self, now: float) -> list[Action]:
        """What is to be done, after each fact."""

    def _hear(self, event: Event) -> list[Action]:
        match event:
            case EngineJoined():
                self.engines[event.engine] = Seats(event.engine, event.rows)
            case PromptsFetched():
                self.prompts.extend(event.groups)
                self.num_fetching -= len(event.groups)
            case Loaded():
                engine = self.engines[event.engine]
                engine.held, engine.loading = event.version, None
            case RequestFinished():
                return self._finished(event)
            case GroupScored():
                if event.group in self.unfinished:  # else it was given up meanwhile
                    del self.unfinished[event.group]
                    self.ready.append(event.group)
            case Trained():
                self.is_training = False
                self.step += 1
                return [Publish(self.step)]
            case Published():
                self.newest = event.version
                if event.version == self.limits.num_steps:
                    self.done = True
                    return [Stop()]
            case _:
                pass
        return []

    def _finished(self, event: RequestFinished) -> list[Action]:
        engine = self.where.pop(event.request, None)
        if engine is None:
            return []  # it was given up meanwhile
        del self.engines[engine].running[event.request]
        group = event.request.group
        self.unfinished[group] -= 1
        return [] if self.unfinished[group] else [Score(group)]

    def _fetch(self, num_wanted: int) -> list[Action]:
        count = num_wanted - len(self.prompts) - self.num_fetching
        if count <= 0:
            return []
        self.num_fetching += count
        return [Fetch(count)]

    def _begin(self, group: GroupId, version: int) -> tuple[Action, list[RequestId]]:
        self.unfinished[group] = self.limits.group_size
        requests = [RequestId(*group, k) for k in range(self.limits.group_size)]
        return Admit(group, group.row, version, self.limits.num_steps), requests

    def _seat(self, engine: Seats, requests: list[RequestId]) -> Action:
        assert engine.held is not None
        for request in requests:
            engine.running[request] = None
            self.where[request] = engine.id
        return Generate(engine.id, engine.held, tuple(requests))

    def _give_up(self, groups: list[GroupId]) -> list[Action]:
        """Whatever these groups have is thrown away."""
        gone: dict[int, list[RequestId]] = {}
        for group in groups:
            del self.unfinished[group]
            for k in range(self.limits.group_size):
                request = RequestId(*group, k)
                number = self.where.pop(request, None)
                if number is not None:
                    del self.engines[number].running[request]
                    gone.setdefault(number, []).append(request)
        return [Abort(number, tuple(requests)) for number, requests in gone.items()]

    def _load(self, engine: Seats) -> Action:
        assert self.newest is not None
        engine.loading = self.newest
        return Load(engine.id, self.newest)

    def _train(self) -> list[Action]:
        """The oldest groups that are ready, as soon as they make a batch."""
        size = self.limits.batch_size
        if self.is_training or self.newest != self.step or len(self.ready) < size:
            return []
        batch, self.ready = tuple(self.ready[:size]), self.ready[size:]
        self.is_training = True
        return [Train(self.step, batch)]
