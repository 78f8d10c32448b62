"""Costs measured in a real run, and what a forecast made of them says of the same or of another run.

From a journal: a decode step's time by its rows, loads, moves, scores and training steps, and every answer's
length. What its engines and its trainer do to each other where they share cores is in these costs, as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dora.core.actions import Action, Admit, Load, Publish, Score, Train
from dora.core.events import (
    EngineJoined,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    Progressed,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import GroupId, Limits
from dora.errors import InputError
from dora.sim.forecast.costs import Pace, Terms
from dora.sim.forecast.fluid import FluidEngine
from dora.sim.forecast.lengths import CHUNK
from dora.sim.forecast.outcome import Outcome
from dora.sim.forecast.player import Manner, Player

Lines = Iterable[tuple[float, Event | Action]]


@dataclass(frozen=True)
class Line:
    """Seconds of something that takes `fixed_s` and `each_s` for each unit of it, by least squares."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Never falling, and never below zero at none; of points that do not differ, their mean."""
        if not points:
            return cls()
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return cls(mean_y - slope * mean_x, slope)

    def at(self, units: float) -> float:
        return self.fixed_s + self.each_s * units


@dataclass(frozen=True)
class Measured:
    """What a run's parts took. An engine's step by rows, a training step by thousands of tokens."""

    decode: Line = Line()
    train: Line = Line()
    loading_s: float = 0.0
    moving_s: float = 0.0
    publishing_s: float = 0.0
    reward_s: float = 0.0
    expert: int = 1
    kv_tokens: int = 1 << 60
    kv_bytes: float = 0.0

    def terms(self, num_rows: int, rank_rows: int) -> Terms:
        return Terms(self.decode.at(num_rows), 0.0, 0.0, 0.0, 0.0)

    def pace(self, num_rows: int, rank_rows: int, rank_context: float, num_versions: int = 1) -> Pace:
        return self.terms(num_rows, rank_rows).pace(rank_context, num_versions)

    def prefill_s(self, tokens: float) -> float:
        return 0.0  # it is in the steps, as they were reported

    def move_s(self, tokens: float) -> float:
        return self.moving_s

    def swap_s(self, tokens: float) -> float:
        return 0.0

    def load_s(self) -> float:
        return self.loading_s

    def work_s(self, tokens: float) -> float:
        return self.train.each_s * tokens / 1000

    @property
    def fixed_s(self) -> float:
        return self.train.fixed_s

    def publish_s(self) -> float:
        return self.publishing_s


@dataclass
class Recorded:
    """What a journal says, heard line by line."""

    limits: Limits
    engines: list[tuple[int, int, int, bool]] = field(default_factory=list)  # number, rows, slots, colocated
    answers: dict[GroupId, dict[int, int]] = field(default_factory=dict)
    index: dict[GroupId, int] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)  # when trained, tokens
    _since: dict[object, float] = field(default_factory=dict)
    _took: dict[str, list[float]] = field(default_factory=dict)
    _decode: list[tuple[float, float]] = field(default_factory=list)
    _train: list[tuple[float, float]] = field(default_factory=list)
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
            case Score():
                self._since[record.group] = now
            case GroupScored():
                self._end("reward", record.group, now)
            case Publish():
                self._since["publish"] = now
            case Published():
                self._end("publish", "publish", now)
            case Migrated():
                self._took.setdefault("move", []).append(record.copy_s)
            case Progressed() if record.row_tokens_per_s > 0 and record.lengths:
                self._decode.append((float(len(record.lengths)), 1 / record.row_tokens_per_s))
            case RequestFinished() if not record.request.is_held_out:
                group = self.answers.setdefault(record.request.group, {})
                group[record.request.sibling] = record.num_tokens
            case Train():
                self._since["train"], self._batch = now, record.groups
            case Trained():
                tokens = sum(sum(self.answers[group].values()) for group in self._batch)
                self._train.append((tokens / 1000, now - self._since["train"]))
                self.steps.append((now, tokens))
            case _:
                pass

    def _end(self, what: str, key: object, now: float) -> None:
        if key in self._since:
            self._took.setdefault(what, []).append(now - self._since.pop(key))

    @cached_property
    def measured(self) -> Measured:
        """Raises InputError where the run says too little."""
        if len(self.steps) < 3 or not self._decode:
            raise InputError(
                f"the run has {len(self.steps)} training steps and {len(self._decode)} reports of engines "
                "that decode; to calibrate takes at least 3 and 1"
            )
        mean = {what: sum(found) / len(found) for what, found in self._took.items()}
        return Measured(
            Line.through(self._decode), Line.through(self._train), mean.get("load", 0.0),
            mean.get("move", 0.0), mean.get("publish", 0.0), mean.get("reward", 0.0),
        )  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        """Of trained answers, from the first training step's end to the last's."""
        return sum(tokens for _, tokens in self.steps[1:]) / (self.steps[-1][0] - self.steps[0][0])


class RecordedLengths:
    """The answers of a run by their prompts' positions; those that it did not finish are as others were."""

    prompt, turns, delay_s = 0, 1, 0.0

    def __init__(self, recorded: Recorded) -> None:
        size = recorded.limits.group_size
        known = {
            recorded.index[group]: [lengths[k] for k in range(size)]
            for group, lengths in recorded.answers.items()
            if len(lengths) == size and group in recorded.index
        }
        self._known = known
        self._others = [known[index] for index in sorted(known)]

    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        positions = range(chunk * CHUNK, (chunk + 1) * CHUNK)
        return [self._known.get(p) or self._others[p % len(self._others)] for p in positions]


def read(limits: Limits, lines: Lines) -> Recorded:
    """A run as its journal tells it."""
    recorded = Recorded(limits)
    for now, record in lines:
        recorded.hear(now, record)
    return recorded


def forecast(run: Recorded, costs: Measured, is_streamed: bool = False) -> Outcome:
    """The run's limits, engines and answers, played with costs that may be another run's."""
    engines = [FluidEngine(number, costs, rows, shared) for number, rows, _, shared in run.engines]
    slots = max(slots for _, _, slots, _ in run.engines)
    manner = Manner(reward_s=costs.reward_s, report_s=1.0, slots=slots, is_streamed=is_streamed)
    limits = replace(run.limits, num_steps=len(run.steps), evaluation=None, filter_groups=False)
    sizes = (limits.batch_size, limits.group_size)
    return Player(Orchestrator(limits), engines, costs, RecordedLengths(run), sizes, manner).play()


def forecast_speed(run: Recorded, costs: Measured) -> float:
    """Trained tokens a second, as `Recorded.tokens_per_s` counts them."""
    steps = forecast(run, costs).steps
    return sum(step.tokens for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)
