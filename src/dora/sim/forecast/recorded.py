"""What a real run's journal says of its parts: how long each took, and what the others did meanwhile.

A life is what a request spent on one engine; trainings know what engines did, and lives what the trainer did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dora.core.actions import Action, Admit, Generate, Load, Publish, Rush, Score, Train
from dora.core.events import (
    EngineJoined,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.records import GroupId, Limits, RequestId

Lines = Iterable[tuple[float, Event | Action]]


@dataclass
class Life:
    """A request on one engine, where it gained so many tokens."""

    engine: int
    version: int
    began_s: float
    ended_s: float = 0.0
    tokens: int = 0
    is_whole: bool = True  # it decoded all the time, and was nowhere else

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True)
class Training:
    """A step: from its complete batch to new weights; of it or before it, work on what was there early."""

    began_s: float
    ended_s: float
    tokens: int
    early_s: float = 0.0

    @property
    def took_s(self) -> float:
        return self.early_s + self.ended_s - self.began_s


@dataclass
class Recorded:
    """A run, heard line by line. `works`: seconds that the trainer computed, by step, where that is known.

    `least_early`: tokens of an incomplete batch from which on the trainer worked on it; None: it waited.
    """

    limits: Limits
    works: Mapping[int, float] = field(default_factory=dict)
    least_early: int | None = None
    engines: list[tuple[int, int, int, bool]] = field(default_factory=list)  # number, rows, slots, colocated
    answers: dict[GroupId, dict[int, int]] = field(default_factory=dict)
    index: dict[GroupId, int] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of loads, moves, publications, rewards
    _since: dict[object, float] = field(default_factory=dict)
    _running: dict[RequestId, Life] = field(default_factory=dict)
    _rushed: dict[int, frozenset[RequestId]] = field(default_factory=dict)
    _batch: tuple[GroupId, ...] = ()

    def hear(self, now: float, record: Event | Action) -> None:
        """The next fact or order."""
        match record:
            case EngineJoined():
                self.engines.append((record.engine, record.rows, record.slots, record.is_colocated))
            case Admit():
                self.index[record.group] = record.index
            case Load():
                self._since["load", record.engine] = now
            case Loaded():
                self._end("load", ("load", record.engine), now)
                self.seconds.setdefault("load stop", []).append(record.stop_s)
            case Score():
                self._since[record.group] = now
            case GroupScored():
                self._end("reward", record.group, now)
            case Publish():
                self._since["publish"] = now
            case Published():
                self._end("publish", "publish", now)
            case Train():
                self._since["train"], self._batch = now, record.groups
            case Trained():
                self._trained(now, record.step)
            case _:
                self._hear_request(now, record)

    def _hear_request(self, now: float, record: Event | Action) -> None:
        match record:
            case Generate():
                for request in record.requests:
                    is_whole = not self._rushed.get(record.engine)
                    self._running[request] = Life(record.engine, record.version, now, is_whole=is_whole)
            case Rush():
                self._rushed[record.engine] = frozenset(record.requests)
                for request, life in self._running.items():
                    if record.requests and life.engine == record.engine:
                        life.is_whole &= request in record.requests
            case Migrated() if record.request in self._running:
                self.seconds.setdefault("move", []).append(record.copy_s)
                left = self._running[record.request]
                self._end_life(left, now, record.num_tokens)
                arrived = Life(record.destination, left.version, now, tokens=-record.num_tokens)
                self._running[record.request] = arrived
                left.is_whole = arrived.is_whole = False
            case RequestFinished():
                if record.request in self._running:
                    self._end_life(self._running.pop(record.request), now, record.num_tokens)
                if not record.request.is_held_out:
                    group = self.answers.setdefault(record.request.group, {})
                    group[record.request.sibling] = record.num_tokens
            case _:
                pass

    def _end(self, what: str, key: object, now: float) -> None:
        if key in self._since:
            self.seconds.setdefault(what, []).append(now - self._since.pop(key))

    def _end_life(self, life: Life, now: float, tokens: int) -> None:
        life.ended_s, life.tokens = now, life.tokens + tokens
        if life.took_s > 0 and life.tokens > 0:
            self.lives.append(life)

    def _trained(self, now: float, step: int) -> None:
        tokens, began_s = (
            sum(sum(self.answers[group].values()) for group in self._batch),
            self._since["train"],
        )
        early_s = max(0.0, self.works.get(step, 0.0) - (now - began_s))
        self.trainings.append(Training(began_s, now, tokens, early_s))

    @property
    def tokens_per_s(self) -> float:
        """Of trained answers, from the first training step's end to the last's."""
        first, *others = self.trainings
        return sum(step.tokens for step in others) / (others[-1].ended_s - first.ended_s)


def read(
    limits: Limits, lines: Lines, works: Mapping[int, float] | None = None, least_early: int | None = None
) -> Recorded:
    """A run as its journal tells it."""
    recorded = Recorded(limits, works or {}, least_early)
    for now, record in lines:
        recorded.hear(now, record)
    return recorded
