"""Who waited for whom: the time of the trainer and of every row, by what it went into.

A row with a request is busy. A free row waits for whoever keeps the next group from being admitted: that
is taken to be the trainer while it trains, else the store while it publishes, else the rewarder while it
judges, else the answers that other rows have not finished.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora.core.actions import (
    Action,
    Admit,
    Attest,
    Fail,
    Filter,
    Generate,
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
    GroupUnscorable,
    Loaded,
    Migrated,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    StepFailed,
    Trained,
    TrainerLost,
)
from dora.core.records import GroupId, Limits, RequestId

NUM_NAMED = 20  # the trainer's longest waits are named
MAX_DRAWN = 8_000  # intervals of the trainer


class Wait(NamedTuple):
    """The trainer had nothing to train on (s): until `group` was there, whose last answer was `request`."""

    from_s: float
    to_s: float
    step: int
    group: GroupId | None
    request: RequestId | None
    engine: int | None
    generation_s: float  # of it, until that answer was finished
    reward_s: float  # and from there until its group was judged


@dataclass
class TrainerTime:
    """When it trained, published and waited, from facts and orders."""

    intervals: list[tuple[str, float, float, int]] = field(default_factory=list)  # name, from, to, number
    waits: list[Wait] = field(default_factory=list)
    _since_s: float | None = None  # it trains, publishes or waits since; None: the run has not begun
    _doing: tuple[str, int] = ("wait", 0)
    _last: dict[GroupId, tuple[float, RequestId, int]] = field(default_factory=dict)  # latest answers
    _cause: GroupId | None = None  # that the last fact has completed

    def hear(self, now: float, record: Event | Action) -> None:
        match record:
            case RequestFinished(engine, request):
                self._last[request.group] = (now, request, engine)
                self._cause = None
            case GroupScored(group):
                self._cause = group
            case Train(step):
                self._begin_training(now, step)
            case Publish(version):
                self._turn(now, "publish", version)
            case Published(version):
                self._turn(now, "wait", version)
                self._cause = None
            case Attest(version):
                self._turn(now, "publish", version)
            case TrainerLost() | Attested():
                self._turn(now, "wait", self._doing[1])
            case StepFailed(step):
                self._turn(now, "wait", step)
            case Resumed(from_step):
                self._turn(now, "wait", from_step)
            case Filter(group) | Fail(group):
                self._last.pop(group, None)
            case _:
                pass

    def _begin_training(self, now: float, step: int) -> None:
        if self._since_s is not None and now > self._since_s:
            since_s, group = self._since_s, self._cause
            at_s, request, engine = self._last.get(group, (now, None, None)) if group else (now, None, None)
            at_s = min(now, max(since_s, at_s))
            reward_s = now - at_s
            self.waits.append(Wait(since_s, now, step, group, request, engine, at_s - since_s, reward_s))
        self._turn(now, "train", step)

    def _turn(self, now: float, doing: str, number: int) -> None:
        """From now on it does something else."""
        before, numbered = self._doing
        if self._since_s is not None and now > self._since_s:
            self.intervals.append((before, self._since_s, now, numbered))
        self._since_s, self._doing = now, (doing, number)

    def sums(self, now: float) -> dict[str, float]:
        """Seconds by what they went into."""
        summed = defaultdict[str, float](float)
        for doing, from_s, to_s, _ in self.intervals:
            summed[doing] += to_s - from_s
        if self._since_s is not None:
            summed[self._doing[0]] += now - self._since_s
        generation_s = sum(wait.generation_s for wait in self.waits if wait.group is not None)
        reward_s = sum(wait.reward_s for wait in self.waits)
        other_s = max(0.0, summed["wait"] - generation_s - reward_s)
        found = {"train": summed["train"], "publish": summed["publish"], "answers": generation_s}
        return {k: round(v, 3) for k, v in (found | {"rewards": reward_s, "other": other_s}).items()}

    def to_json(self, now: float) -> dict[str, Any]:
        """Intervals in ms; of a very long run the latest are drawn."""
        drawn = [interval for interval in self.intervals if interval[0] != "wait"][-MAX_DRAWN:]
        longest = heapq.nlargest(NUM_NAMED, self.waits, key=lambda wait: wait.to_s - wait.from_s)
        return {
            "intervals": [[doing, round(1e3 * a), round(1e3 * b), number] for doing, a, b, number in drawn],
            "sums": self.sums(now),
            "num_waits": len(self.waits),
            "waits": [
                {
                    "from": round(wait.from_s, 3), "s": round(wait.to_s - wait.from_s, 4), "step": wait.step,
                    "group": None if wait.group is None else str(wait.group),
                    "request": None if wait.request is None else str(wait.request),
                    "engine": wait.engine,
                    "answers_s": round(wait.generation_s, 4), "rewards_s": round(wait.reward_s, 4),
                }
                for wait in longest
            ],
        }  # fmt: skip


@dataclass
class _Rows:
    """The rows of one engine."""

    rows: int
    since_s: float
    requests: set[RequestId] = field(default_factory=set)
    rushed: set[RequestId] = field(default_factory=set)  # empty: all decode
    is_paused: bool = False
    has_weights: bool = False
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # row-seconds


@dataclass
class RowTime:
    """What the rows of every engine were doing, in row-seconds, from facts and orders."""

    limits: Limits
    engines: dict[tuple[int, int], _Rows] = field(default_factory=dict)  # (life, engine), also of the gone
    _here: dict[int, _Rows] = field(default_factory=dict)
    _life: int = 0
    _trainer: str = ""  # "train", "publish" or ""
    _judged: set[GroupId] = field(default_factory=set)
    _num_admitted: int = 0  # groups that have not ended untrained
    _num_running: int = 0  # requests
    _cause: str = "other"  # what a free row waits for

    def hear(self, now: float, record: Event | Action) -> None:
        self._hear_of_others(record)
        self._hear_of_rows(now, record)
        cause = self._found_cause()
        if cause != self._cause:
            for rows in self._here.values():
                self._integrate(rows, now)
            self._cause = cause

    def _hear_of_others(self, record: Event | Action) -> None:
        """Whom free rows may wait for."""
        match record:
            case Admit():
                self._num_admitted += 1
            case Filter(group) | Fail(group):
                self._num_admitted -= 1
                self._judged.discard(group)
            case Score(group):
                self._judged.add(group)
            case GroupScored(group) | GroupUnscorable(group):
                self._judged.discard(group)
            case Train():
                self._trainer = "train"
            case Publish() | Attest():
                self._trainer = "publish"
            case Trained() | StepFailed() | Published() | Attested() | TrainerLost():
                self._trainer = ""
            case Resumed():
                self._trainer = ""
                self._judged.clear()
            case _:
                pass

    def _hear_of_rows(self, now: float, record: Event | Action) -> None:
        match record:
            case EngineJoined(engine, num_rows):
                self._here[engine] = self.engines[self._life, engine] = _Rows(num_rows, now)
            case EngineLost(engine) | EngineLeft(engine):
                self._leave(engine, now)
            case Resumed():
                for engine in [*self._here]:
                    self._leave(engine, now)
                self._life += 1
            case Generate(engine, _, requests):
                self._at(engine, now).requests.update(requests)
                self._num_running += len(requests)
            case RequestFinished(engine, request) | RequestFailed(engine, request):
                self._free(engine, now, request)
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._free(engine, now, request)
            case Migrated(request, source, destination):
                self._free(source, now, request)
                self._at(destination, now).requests.add(request)
                self._num_running += 1
            case Rush(engine, requests):
                self._at(engine, now).rushed = {*requests}
            case Pause(engine) | Resume(engine):
                self._at(engine, now).is_paused = isinstance(record, Pause)
            case Loaded(engine, stop_s=stop_s):
                rows = self._at(engine, now)
                rows.has_weights = True
                rows.spent["loading"] += stop_s * len(rows.requests)
                rows.spent["decoding"] -= stop_s * len(rows.requests)
            case _:
                pass

    def _at(self, engine: int, now: float) -> _Rows:
        """The rows of an engine, which are about to change."""
        self._integrate(self._here[engine], now)
        return self._here[engine]

    def _free(self, engine: int, now: float, request: RequestId) -> None:
        rows = self._at(engine, now)
        self._num_running -= request in rows.requests
        rows.requests.discard(request)

    def _leave(self, engine: int, now: float) -> None:
        self._num_running -= len(self._at(engine, now).requests)
        del self._here[engine]

    def _found_cause(self) -> str:
        if self._num_admitted >= self.limits.num_steps * self.limits.batch_size:
            return "end"
        return self._trainer or ("rewards" if self._judged else "answers" if self._num_running else "other")

    def _integrate(self, rows: _Rows, now: float) -> None:
        passed_s, rows.since_s = now - rows.since_s, now
        num_busy = len(rows.requests)
        num_held = num_busy if rows.is_paused else len(rows.requests - rows.rushed) if rows.rushed else 0
        rows.spent["decoding"] += passed_s * (num_busy - num_held)
        rows.spent["held"] += passed_s * num_held
        cause = self._cause if rows.has_weights else "weights"
        rows.spent[cause] += passed_s * max(0, rows.rows - num_busy)

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """Of each engine, in row-seconds until `now`."""
        for rows in self._here.values():
            self._integrate(rows, now)
        return [
            {"life": life, "engine": engine, "rows": rows.rows,
             "spent": {cause: round(max(0.0, row_s), 3) for cause, row_s in rows.spent.items()}}
            for (life, engine), rows in self.engines.items()
        ]  # fmt: skip
