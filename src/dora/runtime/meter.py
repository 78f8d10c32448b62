"""Measures a run while it goes: who was idle, what was alive, what was trained.

Times are integrated between facts from the orchestrator's own state; nothing here decides.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from dora.core.actions import Action, Admit, Fail, Filter, Train
from dora.core.events import EngineJoined, EngineLost, Event, RequestFinished, Resumed, Trained
from dora.core.orchestrator import Orchestrator
from dora.core.records import GroupId, Limits
from dora.core.state import State
from dora.runtime.lengths import Lengths
from dora.runtime.loads import Loads
from dora.runtime.occupancy import Occupancy
from dora.runtime.phases import Phases
from dora.runtime.recoveries import Recoveries
from dora.runtime.stalls import Stalls
from dora.runtime.telling import Teller
from dora.runtime.travels import Travels


class TimedOrchestrator(Orchestrator):
    """The orchestrator, with the wall time spent inside it."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.busy_s = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        began_s = time.perf_counter()
        try:
            return super().handle(event, now)
        finally:
            self.busy_s += time.perf_counter() - began_s


class Rewards(NamedTuple):
    """What is kept of the rewards of one step's samples."""

    mean: float
    std: float
    frac_zero_std: float  # of the groups, those whose rewards are all equal
    frac_solved: float  # of the samples, those with a reward of at least 1
    least: float
    most: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Rewards:
        """`groups`: the siblings' rewards of each."""
        every = [*chain.from_iterable(groups)]
        num_equal, num_solved = sum(len({*own}) == 1 for own in groups), sum(reward >= 1 for reward in every)
        shares = num_equal / len(groups), num_solved / len(every)
        return cls(statistics.fmean(every), statistics.pstdev(every), *shares, min(every), max(every))


@dataclass
class StepRecord:
    """What one training step consumed."""

    step: int
    t_s: float
    staleness: Counter[int]
    rewards: Rewards
    num_tokens: int
    wall_s: float  # since the step before, or the start
    stall_s: float  # of that
    effective: int  # staleness that aging allows for groups admitted from here on
    metrics: dict[str, float]

    def to_json(self) -> dict[str, float]:
        """One line of metrics.jsonl."""
        count = self.staleness.total()
        return {
            "step": self.step,
            "t_s": round(self.t_s, 3),
            "reward/mean": self.rewards.mean,
            "reward/std": self.rewards.std,
            "reward/min": self.rewards.least,
            "reward/max": self.rewards.most,
            "reward/frac_zero_std": self.rewards.frac_zero_std,
            "staleness/mean": sum(s * n for s, n in self.staleness.items()) / count,
            "staleness/min": min(self.staleness),
            "staleness/max": max(self.staleness),
            "staleness/effective": self.effective,
            **{f"staleness/num_{s}": n for s, n in sorted(self.staleness.items())},
            "tokens": self.num_tokens,
            "perf/throughput": round(self.num_tokens / max(1e-9, self.wall_s), 1),
            "timing_s/step": round(self.wall_s, 4),
            "timing_s/stall": round(self.stall_s, 4),
            **self.metrics,
        }


@dataclass
class Meter:
    """Sums over a run; times in seconds."""

    limits: Limits
    teller: Teller
    travels: Travels
    stalls: Stalls = field(default_factory=Stalls)
    phases: Phases = field(default_factory=Phases)
    lengths: Lengths = field(default_factory=Lengths)
    loads: Loads = field(default_factory=Loads)
    occupancy: Occupancy = field(default_factory=Occupancy)
    recoveries: Recoveries = field(default_factory=Recoveries)
    began_s: float = 0.0
    now_s: float = 0.0
    trainer_idle_s: float = 0.0
    exposed_rollout_s: float = 0.0
    live_version_s: float = 0.0  # versions alive, integrated over time
    rollout_s: float = 0.0  # time with any version alive
    live_versions_max: int = 0
    engine_losses: int = 0
    engine_restarts: int = 0
    lives: int = 1  # one more each time the run was resumed
    redone_steps: int = 0  # trained before, after a checkpoint that the run or its trainer went on from
    redone_tokens: int = 0
    num_segmented: int = 0  # answers of several versions, under policies that break C1
    staleness: Counter[int] = field(default_factory=Counter)
    trained_tokens: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    _versions: dict[GroupId, int] = field(default_factory=dict)
    _batch: tuple[GroupId, ...] = ()
    _has_admitted: bool = False
    _num_live: int = 0
    _is_trainer_idle: bool = True
    _stall_s: float = 0.0

    def hear(
        self, now: float, event: Event | None, orders: Sequence[Action], state: State
    ) -> StepRecord | None:
        """Take in one fact and its orders, after the state has changed; a finished step is returned."""
        self._integrate(now)
        self.phases.pass_to(now)
        record = None
        self.lengths.hear(event, orders, lambda group: group in state.groups)
        match event:
            case RequestFinished():
                self.num_segmented += len(event.chunks) > 1
                self.occupancy.finish(self.teller.uses)
            case EngineJoined(engine, rows):
                self.occupancy.join(engine, rows, self.teller.uses)
                self.engine_restarts += event.replaces is not None
            case EngineLost():
                self.engine_losses += 1
            case Resumed():  # new engines, whose numbers and clocks begin again
                self.lives += 1
                self.occupancy = Occupancy()
            case Trained(step) if step < len(self.steps):  # it was measured when it was trained first
                self.teller.step_metrics.pop(0)
                self.redone_steps += 1
                self.redone_tokens += self.steps[step].num_tokens
            case Trained(step):
                record = self._end_step(step, now, state)
            case _:
                pass
        for order in orders:
            if isinstance(order, Admit):
                self._versions[order.group] = order.version
                if not self._has_admitted:
                    self._has_admitted = True
                    self.occupancy.begin(self.teller.uses)
            elif isinstance(order, Train):
                self._batch = order.groups
            elif isinstance(order, Filter | Fail):
                self._versions.pop(order.group)
        self.travels.hear(event, orders)
        self.loads.hear(now, event, orders)
        self.stalls.look(state)
        self.phases.look(now, event, orders, state)
        self.recoveries.hear(now, event, state)
        self._num_live = sum(1 for count in state.unfinished.values() if count)
        self.live_versions_max = max(self.live_versions_max, self._num_live)
        self._is_trainer_idle = state.training is None and state.publishing is None
        return record

    def start(self, now: float) -> None:
        """The training run begins; what the engines did before is not counted."""
        self.began_s = self.now_s = now
        self.phases.begin(now)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained per second of wall time."""
        return self.trained_tokens / max(1e-9, self.now_s - self.began_s)

    def _integrate(self, now: float) -> None:
        passed_s, self.now_s = now - self.now_s, now
        if self._is_trainer_idle:
            self.trainer_idle_s += passed_s
        if self._num_live:
            self.live_version_s += passed_s * self._num_live
            self.rollout_s += passed_s
            if self._is_trainer_idle:
                self.exposed_rollout_s += passed_s

    def _end_step(self, step: int, now: float, state: State) -> StepRecord:
        size = self.limits.group_size
        staleness: Counter[int] = Counter()
        for group in self._batch:
            staleness[step - self._versions.pop(group)] += size
        rewards = Rewards.of([self.teller.rewards.pop(group) for group in self._batch])
        by_task = [self.teller.task_rewards.pop(group, {}) for group in self._batch]
        num_tokens = sum(self.teller.num_tokens.pop(group) for group in self._batch)
        metrics = self.lengths.train(self._batch) | self.teller.step_metrics.pop(0)[1]
        metrics |= _means(by_task)
        busy_ratio = round(self.occupancy.end_step(self.teller.uses), 4)
        metrics |= self.phases.end_step(state) | {"rollout/busy_ratio": busy_ratio}
        metrics |= self.recoveries.end_step()
        wall_s = now - (self.steps[-1].t_s if self.steps else self.began_s)
        stall_s = state.stall_s - self._stall_s
        effective = self.limits.max_staleness - state.aging.lowered
        record = StepRecord(step, now, staleness, rewards, num_tokens, wall_s, stall_s, effective, metrics)
        self._stall_s = state.stall_s
        self.staleness += staleness
        self.trained_tokens += num_tokens
        self.steps.append(record)
        return record


def _means(groups: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Mean reward of each task that judged all of these groups."""
    tasks = [task for task in groups[0] if all(task in group for group in groups)]
    rewards = {task: [*chain.from_iterable(group[task] for group in groups)] for task in tasks}
    return {f"reward/{task}/mean": statistics.fmean(own) for task, own in rewards.items()}
