"""Schedulers of other systems, which decide by rules that the orchestrator does not have: Laminar and
RollPacker.

They handle the same events and give the same actions as the orchestrator, and run in the same simulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field

from dora.core import events
from dora.core.actions import (
    Abort,
    Action,
    Admit,
    FetchPrompts,
    Generate,
    Load,
    Migrate,
    PauseEngine,
    Publish,
    ResumeEngine,
    Score,
    Stop,
    Train,
)
from dora.core.types import GroupId, Limits, RequestId

# Laminar
REPACK_INTERVAL_S = 5.0
MAX_READY_BATCHES = 2  # of finished groups, at which engines start nothing more

# RollPacker
OVERSAMPLING = 1.25  # groups that a short round starts, over a batch


@dataclass
class EngineRows:
    """The requests and the version of one engine."""

    id: int
    num_rows: int
    held: int | None = None
    loading: int | None = None
    requests: dict[RequestId, None] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self.requests)


class BaseScheduler(ABC):
    """Groups, rows and steps, which both schedulers need. Subclasses implement the scheduling rules."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.engines: dict[int, EngineRows] = {}
        self.prompts: deque[GroupId] = deque()
        self.num_unfinished: dict[GroupId, int] = {}  # siblings, of groups that are admitted and not scored
        self.engine_of: dict[RequestId, int] = {}
        self.ready: list[GroupId] = []  # scored, oldest first
        self.step = 0
        self.newest: int | None = None
        self.is_training = False
        self.done = False
        self._num_fetching = 0

    def start(self, now: float) -> list[Action]:
        return [Publish(0)]

    def handle(self, event: events.Event, now: float) -> list[Action]:
        return [*self._handle(event), *([] if self.done else self._decide(now))]

    @abstractmethod
    def _decide(self, now: float) -> list[Action]:
        """The actions after an event."""

    def _handle(self, event: events.Event) -> list[Action]:
        """Follow an event; returns the actions that follow from it alone."""
        match event:
            case events.EngineJoined():
                self.engines[event.engine] = EngineRows(event.engine, event.max_num_seqs)
            case events.PromptsFetched():
                self.prompts.extend(event.groups)
                self._num_fetching -= len(event.groups)
            case events.Loaded():
                engine = self.engines[event.engine]
                engine.held, engine.loading = event.version, None
            case events.RequestFinished():
                return self._on_finished(event)
            case events.GroupScored():
                if event.group in self.num_unfinished:  # else it was dropped meanwhile
                    del self.num_unfinished[event.group]
                    self.ready.append(event.group)
            case events.Trained():
                self.is_training = False
                self.step += 1
                return [Publish(self.step)]
            case events.Published():
                self.newest = event.version
                if event.version == self.limits.num_steps:
                    self.done = True
                    return [Stop()]
            case _:
                pass
        return []

    def _on_finished(self, event: events.RequestFinished) -> list[Action]:
        engine = self.engine_of.pop(event.request, None)
        if engine is None:
            return []  # its group was dropped meanwhile
        del self.engines[engine].requests[event.request]
        group = event.request.group
        self.num_unfinished[group] -= 1
        return [] if self.num_unfinished[group] else [Score(group)]

    def _fetch_prompts(self, num_wanted: int) -> list[Action]:
        count = num_wanted - len(self.prompts) - self._num_fetching
        if count <= 0:
            return []
        self._num_fetching += count
        return [FetchPrompts(count)]

    def _admit(self, group: GroupId, version: int) -> tuple[Action, list[RequestId]]:
        """The action, and the requests of the group."""
        self.num_unfinished[group] = self.limits.group_size
        requests = [RequestId(*group, k) for k in range(self.limits.group_size)]
        return Admit(group, group.row, version, self.limits.num_steps), requests

    def _generate(self, engine: EngineRows, requests: list[RequestId]) -> Action:
        assert engine.held is not None
        for request in requests:
            engine.requests[request] = None
            self.engine_of[request] = engine.id
        return Generate(engine.id, engine.held, tuple(requests))

    def _drop(self, groups: list[GroupId]) -> list[Action]:
        """Abort all requests of these groups."""
        aborted: dict[int, list[RequestId]] = {}
        for group in groups:
            del self.num_unfinished[group]
            for k in range(self.limits.group_size):
                request = RequestId(*group, k)
                engine = self.engine_of.pop(request, None)
                if engine is not None:
                    del self.engines[engine].requests[request]
                    aborted.setdefault(engine, []).append(request)
        return [Abort(engine, tuple(requests)) for engine, requests in aborted.items()]

    def _load_newest(self, engine: EngineRows) -> Action:
        assert self.newest is not None
        engine.loading = self.newest
        return Load(engine.id, self.newest)

    def _train(self) -> list[Action]:
        """Train the oldest groups that are ready, as soon as they make a batch."""
        size = self.limits.batch_size
        if self.is_training or self.newest != self.step or len(self.ready) < size:
            return []
        batch, self.ready = tuple(self.ready[:size]), self.ready[size:]
        self.is_training = True
        return [Train(self.step, batch)]


class LaminarScheduler(BaseScheduler):
    """One version per trajectory, without a staleness bound: an engine loads the newest version when it has
    no requests left.

    Every few seconds the requests of engines with few requests migrate to other engines of their version,
    best fit by rows, so that these engines become idle sooner. Only the number of groups that wait for the
    trainer limits admission.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._destination_of: dict[RequestId, int] = {}  # of running migrations
        self._waiting: dict[int, list[RequestId]] = {}  # engine -> siblings that its rows have no room for
        self._last_repack_s = 0.0

    def _handle(self, event: events.Event) -> list[Action]:
        if isinstance(event, events.Migrated | events.MigrationFailed):
            destination = self._destination_of.pop(event.request)
            if isinstance(event, events.Migrated) and event.request in self.engine_of:
                del self.engines[self.engine_of[event.request]].requests[event.request]
                self.engines[destination].requests[event.request] = None
                self.engine_of[event.request] = destination
            return []
        return super()._handle(event)

    def _decide(self, now: float) -> list[Action]:
        actions = self._fetch_prompts(2 * self.limits.batch_size) + self._train()
        if self.newest is None:
            return actions
        for engine_id in [*self._waiting]:
            actions += self._place(self.engines[engine_id])
        if now >= self._last_repack_s + REPACK_INTERVAL_S:
            self._last_repack_s = now
            actions += self._repack()
        destinations = set(self._destination_of.values())
        for engine in self.engines.values():
            if not engine.requests and engine.loading is None and engine.id not in destinations:
                actions += self._refill(engine)
        return actions

    def _refill(self, engine: EngineRows) -> list[Action]:
        """Load the newest weights into an engine without requests, then fill its rows with new groups."""
        if engine.held is None or engine.held != self.newest:
            return [self._load_newest(engine)]
        actions: list[Action] = []
        size = self.limits.group_size
        is_full = len(self.ready) >= MAX_READY_BATCHES * self.limits.batch_size
        while self.prompts and engine.num_free >= min(size, engine.num_rows) and not is_full:
            admit, self._waiting[engine.id] = self._admit(self.prompts.popleft(), engine.held)
            actions += [admit, *self._place(engine)]
        return actions

    def _place(self, engine: EngineRows) -> list[Action]:
        """Give the free rows of an engine to the siblings that wait for them."""
        waiting = self._waiting.pop(engine.id, [])
        started, left = waiting[: engine.num_free], waiting[engine.num_free :]
        if left:
            self._waiting[engine.id] = left
        return [self._generate(engine, started)] if started else []

    def _repack(self) -> list[Action]:
        """Migrate all requests of engines with few, each to the engine with the fewest free rows that fit."""
        actions: list[Action] = []
        incoming = Counter(self._destination_of.values())  # engine -> requests
        emptied = {self.engine_of[request] for request in self._destination_of if request in self.engine_of}
        for engine in sorted(self.engines.values(), key=lambda e: (len(e.requests), e.id)):
            is_small = 0 < 2 * len(engine.requests) <= engine.num_rows
            is_taken = engine.id in incoming or engine.id in emptied or engine.id in self._waiting
            if not is_small or is_taken or engine.held is None:
                continue
            destination = self._best_fit(engine, incoming, emptied)
            if destination is None:
                continue
            emptied.add(engine.id)
            incoming[destination] += len(engine.requests)
            for request in engine.requests:
                self._destination_of[request] = destination
                actions.append(Migrate(request, engine.id, destination, engine.held, "repack"))
        return actions

    def _best_fit(self, engine: EngineRows, incoming: Counter[int], emptied: set[int]) -> int | None:
        """The engine of the same version with the fewest free rows that take all requests of this one."""
        num_requests = len(engine.requests)
        fits = [
            (num_free, other.id)
            for other in self.engines.values()
            if other is not engine
            and other.held == engine.held
            and other.requests
            and other.id not in emptied
            and other.id not in self._waiting
            and other.loading is None
            and (num_free := other.num_free - incoming[other.id]) >= num_requests <= len(other.requests)
        ]
        return min(fits)[1] if fits else None


class RollPackerScheduler(BaseScheduler):
    """Synchronous rounds that start more groups than a batch and drop the slowest, as RollPacker does.

    All engines decode, then all devices train. Dropped groups lose their tokens, and start again in a long
    round of their own, without oversampling, once there is a batch of them.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._waiting: deque[RequestId] = deque()
        self._dropped: deque[GroupId] = deque()
        self._last_opened = -1  # step
        self._last_closed = -1  # step
        self._num_paused = 0
        self._is_decoding = False

    def _handle(self, event: events.Event) -> list[Action]:
        if isinstance(event, events.EnginePaused):
            self._num_paused += 1
        return super()._handle(event)

    def _decide(self, now: float) -> list[Action]:
        actions = self._fetch_prompts(int(OVERSAMPLING * self.limits.batch_size))
        if self.newest != self.step or self.is_training or not self.engines:
            return actions
        if not self._is_decoding:
            self._is_decoding, self._num_paused = True, 0
            for engine in self.engines.values():
                actions += [ResumeEngine(engine.id), self._load_newest(engine)]
        if self._last_opened < self.step and all(e.held == self.newest for e in self.engines.values()):
            actions += self._open_round()
        actions += self._place()
        if self._last_closed < self._last_opened and len(self.ready) >= self.limits.batch_size:
            actions += self._close_round()
        if self._num_paused == len(self.engines):
            self._is_decoding = False
            actions += self._train()
        return actions

    def _open_round(self) -> list[Action]:
        size = self.limits.batch_size
        is_long = len(self._dropped) >= size
        queue, count = (self._dropped, size) if is_long else (self.prompts, int(OVERSAMPLING * size))
        if len(queue) < count:
            return []
        self._last_opened = self.step
        actions = []
        for _ in range(count):
            admit, requests = self._admit(queue.popleft(), self.step)
            actions.append(admit)
            self._waiting.extend(requests)
        return actions

    def _place(self) -> list[Action]:
        """Give waiting requests to the engine with the most free rows, up to a group at a time."""
        actions = []
        while self._waiting:
            engine = max(self.engines.values(), key=lambda e: (e.num_free, -e.id))
            if engine.num_free <= 0:
                break
            count = min(engine.num_free, self.limits.group_size, len(self._waiting))
            actions.append(self._generate(engine, [self._waiting.popleft() for _ in range(count)]))
        return actions

    def _close_round(self) -> list[Action]:
        """The batch is complete: drop the other groups, and pause all engines for the trainer."""
        self._last_closed = self.step
        dropped = list(self.num_unfinished)
        actions = self._drop(dropped)
        self._dropped.extend(dropped)
        self._waiting.clear()
        return [*actions, *(PauseEngine(engine) for engine in self.engines)]
