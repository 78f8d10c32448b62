"""Measure a run: one record for each training step, and sums over the run for the summary.

Times are integrated between events over the orchestrator's state.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from dora.core.actions import Action, Admit
from dora.core.events import (
    DigestReported,
    EngineJoined,
    EngineLost,
    Event,
    Published,
    RequestFinished,
    Resumed,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import GroupId, Limits, passes
from dora.journal.timeline import GroupSpan, Span, Timeline
from dora.metrics.rollout import (
    EngineUsage,
    MigrationMetrics,
    ResponseLengths,
    RolloutUtilization,
    WeightLoadMetrics,
)
from dora.metrics.timing import RecoveryTimes, StallTracker, StepTiming


class TimedOrchestrator(Orchestrator):
    """The orchestrator, with the wall time that its event handling took."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.handling_s = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        started_s = time.perf_counter()
        try:
            return super().handle(event, now)
        finally:
            self.handling_s += time.perf_counter() - started_s


class SampleNumbers(Protocol):
    """Numbers about samples and engines that the driver keeps, because the orchestrator does not need
    them.
    """

    num_tokens: dict[GroupId, dict[int, int]]  # sampled, by sibling, for groups that are not trained
    num_turns: dict[GroupId, dict[int, int]]  # the same, if responses are episodes
    rewards: dict[GroupId, tuple[float, ...]]
    task_rewards: dict[GroupId, Mapping[str, Sequence[float]]]  # by task, if there are several
    step_metrics: list[tuple[int, dict[str, float]]]  # from the trainer: (step, metrics), not read yet
    engine_usage: dict[int, EngineUsage]  # engine -> as last reported
    num_recomputed: dict[int, int]  # engine -> tokens, as last reported

    def source_name(self, group: GroupId) -> str | None:
        """The source of a group's prompt; None if there is one dataset."""


class RewardStats(NamedTuple):
    """Statistics of the rewards of a batch."""

    mean: float
    std: float
    frac_zero_std: float  # of the groups: all rewards are equal
    solved_share: float  # of the responses: they solve their prompt
    frac_solve_all: float  # of the groups: all responses solve the prompt
    frac_solve_none: float  # of the groups
    is_binary: bool  # each reward is 0 or 1, so their mean is an accuracy
    min: float
    max: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]], pass_threshold: float) -> RewardStats:
        """`groups` has the rewards of each group's siblings."""
        rewards = [*chain.from_iterable(groups)]
        solves = [[passes(reward, pass_threshold) for reward in own] for own in groups]
        return cls(
            mean=statistics.fmean(rewards),
            std=statistics.pstdev(rewards),
            frac_zero_std=sum(len({*own}) == 1 for own in groups) / len(groups),
            solved_share=statistics.fmean(chain.from_iterable(solves)),
            frac_solve_all=statistics.fmean(map(all, solves)),
            frac_solve_none=statistics.fmean(not any(own) for own in solves),
            is_binary=all(reward in (0, 1) for reward in rewards),
            min=min(rewards),
            max=max(rewards),
        )


@dataclass
class StepRecord:
    """The metrics of one training step."""

    step: int
    t_s: float  # at its end, since the run started
    staleness: Counter[int]  # -> samples
    rewards: RewardStats
    num_tokens: int  # sampled for the batch
    wall_s: float  # since the step before, or the start
    stall_s: float  # part of wall_s
    staleness_bound: int  # for groups admitted from here on
    others: dict[str, float]  # other metrics by name

    def to_json(self) -> dict[str, float]:
        """The step's line of metrics.jsonl."""
        count = self.staleness.total()
        return {
            "step": self.step,
            "t_s": round(self.t_s, 3),
            "reward/mean": self.rewards.mean,
            "reward/std": self.rewards.std,
            "reward/min": self.rewards.min,
            "reward/max": self.rewards.max,
            "reward/frac_zero_std": self.rewards.frac_zero_std,
            "reward/solved_share": self.rewards.solved_share,
            "reward/frac_solve_all": self.rewards.frac_solve_all,
            "reward/frac_solve_none": self.rewards.frac_solve_none,
            "staleness/mean": sum(s * n for s, n in self.staleness.items()) / count,
            "staleness/min": min(self.staleness),
            "staleness/max": max(self.staleness),
            "staleness/bound": self.staleness_bound,
            **{f"staleness/num_{s}": n for s, n in sorted(self.staleness.items())},
            "num_response_tokens": self.num_tokens,
            "perf/throughput": round(self.num_tokens / max(1e-9, self.wall_s), 1),
            "timing_s/step": round(self.wall_s, 4),
            "timing_s/stall": round(self.stall_s, 4),
            **self.others,
        }

    @property
    def has_gradient(self) -> bool:
        """Whether the step can have changed the weights. A trainer of another kind may report no norm."""
        return self.others.get("actor/grad_norm", 1.0 - self.rewards.frac_zero_std) != 0.0


@dataclass
class RunMetrics:
    """Sums over a run and the metrics of its steps; times in seconds."""

    limits: Limits
    samples: SampleNumbers
    migrations: MigrationMetrics
    stalls: StallTracker = field(default_factory=StallTracker)
    timing: StepTiming = field(default_factory=StepTiming)
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    weight_loads: WeightLoadMetrics = field(default_factory=WeightLoadMetrics)
    utilization: RolloutUtilization = field(default_factory=RolloutUtilization)
    recoveries: RecoveryTimes = field(default_factory=RecoveryTimes)
    started_s: float = 0.0  # later by the time in which the run only evaluated
    now_s: float = 0.0
    live_version_s: float = 0.0  # versions with unfinished requests, integrated over time
    live_versions_max: int = 0
    engine_failures: int = 0
    engine_restarts: int = 0
    num_attempts: int = 1  # one more for each resume
    redone_steps: int = 0  # trained again after a resume or a crash of the trainer
    redone_tokens: int = 0
    differing_redone_versions: int = 0  # published again, or reported, with another digest than before
    num_segmented: int = 0  # responses of several versions, under policies that break C1
    staleness: Counter[int] = field(default_factory=Counter)  # -> samples trained
    trained_tokens: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)  # of each version, as first recorded
    _timeline: Timeline = field(default_factory=Timeline)
    _has_admitted: bool = False
    _num_live: int = 0  # versions with unfinished requests
    _is_only_evaluating: bool = False
    _step_started_s: float = 0.0  # as `started_s`, of this step
    _stall_s: float = 0.0  # before this step

    def start(self, now: float) -> None:
        """Start measuring."""
        self.started_s = self._step_started_s = self.now_s = now
        self.timing.start(now)

    def update(
        self, now: float, event: Event | None, actions: Sequence[Action], state: State
    ) -> StepRecord | None:
        """Account for an event and its actions, after the state has changed; returns a finished step.

        The time before training and after it, in which the run only evaluates, does not count.
        """
        self._advance(now)
        ended = [] if event is None else self._timeline.observe(now, event)
        step = self._on_event(now, event, state, ended)
        for action in actions:
            if isinstance(action, Admit) and not self._has_admitted:
                self._has_admitted = True
                self.utilization.start(self.samples.engine_usage)
            ended += self._timeline.observe(now, action)
        for span in ended:
            for metrics in (self.lengths, self.migrations, self.weight_loads):
                metrics.add(span)
        self.weight_loads.order(actions)
        self.stalls.update(state)
        self.timing.update(now, event, actions, state)
        self.recoveries.update(now, event, state)
        self._num_live = len(state.num_unfinished)
        self.live_versions_max = max(self.live_versions_max, self._num_live)
        self._is_only_evaluating = state.is_only_evaluating
        return step

    def stop(self, now: float) -> None:
        """Account for the time since the last event, because the run ends before the next one."""
        self._advance(now)

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second of wall time."""
        return self.trained_tokens / max(1e-9, self.now_s - self.started_s)

    def _advance(self, now: float) -> None:
        elapsed_s, self.now_s = now - self.now_s, now
        if self._is_only_evaluating:
            self.started_s += elapsed_s
            self._step_started_s += elapsed_s
            self.timing.start(now)
            return
        self.timing.advance(now)
        self.live_version_s += elapsed_s * self._num_live

    def _on_event(
        self, now: float, event: Event | None, state: State, ended: Sequence[Span]
    ) -> StepRecord | None:
        usage = self.samples.engine_usage
        match event:
            case RequestFinished():
                self.num_segmented += len(event.chunks) > 1
                if not self._is_only_evaluating:
                    self.utilization.finish_request(usage)
            case EngineJoined(engine, rows):
                self.utilization.join(engine, rows, usage)
                self.engine_restarts += event.replaces is not None
            case EngineLost():
                self.engine_failures += 1
            case Resumed():  # the engines are new and count their usage from 0
                self.num_attempts += 1
                self.utilization = RolloutUtilization()
                self.weight_loads.forget_engines()
            case Published(version, digest) | DigestReported(version, digest):
                self.differing_redone_versions += self.digests.setdefault(version, digest) != digest
            case Trained(step) if step < len(self.steps):  # redone: it was measured when it was trained first
                self.samples.step_metrics.pop(0)
                self.redone_steps += 1
                self.redone_tokens += self.steps[step].num_tokens
            case Trained(step):
                batch = [span for span in ended if isinstance(span, GroupSpan)]
                return self._end_step(step, now, state, batch)
            case _:
                pass
        return None

    def _end_step(self, step: int, now: float, state: State, batch: Sequence[GroupSpan]) -> StepRecord:
        samples, size = self.samples, self.limits.group_size
        groups = [span.group for span in batch]
        staleness: Counter[int] = Counter()
        for span in batch:
            staleness[step - span.admitted.version] += size
        task_rewards = [samples.task_rewards.pop(group, {}) for group in groups]
        rewards = {group: samples.rewards.pop(group) for group in groups}
        num_tokens = {group: sum(samples.num_tokens.pop(group).values()) for group in groups}
        num_turns = [num for group in groups for num in samples.num_turns.pop(group, {}).values()]
        metrics = StepRecord(
            step=step,
            t_s=now,
            staleness=staleness,
            rewards=RewardStats.of([*rewards.values()], self.limits.pass_threshold),
            num_tokens=sum(num_tokens.values()),
            wall_s=now - self._step_started_s,
            stall_s=state.stall_s - self._stall_s,
            staleness_bound=self.limits.max_staleness - state.adaptive_staleness.reduction,
            others={
                **self.lengths.train(batch),
                **_of_turns(num_turns, batch),
                **samples.step_metrics.pop(0)[1],
                **_mean_by_task(task_rewards),
                **_by_source(samples.source_name, rewards, num_tokens, self.limits.pass_threshold),
                **self.timing.end_step(state),
                "rollout/utilization": round(self.utilization.end_step(samples.engine_usage), 4),
                **self.recoveries.end_step(),
            },
        )
        self._step_started_s, self._stall_s = now, state.stall_s
        self.staleness += staleness
        self.trained_tokens += metrics.num_tokens
        self.steps.append(metrics)
        return metrics


def _of_turns(num_turns: Sequence[int], batch: Sequence[GroupSpan]) -> dict[str, float]:
    """Metrics of the turns of each episode; nothing if responses are no episodes."""
    if not num_turns:
        return {}
    ends = [response.end for span in batch for response in span.responses.values()]
    return {
        "num_turns/mean": statistics.fmean(num_turns),
        "num_turns/min": min(num_turns),
        "num_turns/max": max(num_turns),
        "num_turns/clip_ratio": ends.count("max_turns") / len(ends),
    }


def _by_source(
    name_of: Callable[[GroupId], str | None],
    rewards: Mapping[GroupId, Sequence[float]],
    num_tokens: Mapping[GroupId, int],
    pass_threshold: float,
) -> dict[str, float]:
    """Metrics of the groups of each source; nothing with one dataset."""
    groups = defaultdict[str, list[GroupId]](list)
    for group in rewards:
        if (name := name_of(group)) is not None:
            groups[name].append(group)
    found: dict[str, float] = {}
    for name, own in sorted(groups.items()):
        stats = RewardStats.of([rewards[group] for group in own], pass_threshold)
        num_responses = sum(len(rewards[group]) for group in own)
        found |= {
            f"source/{name}/num_groups": float(len(own)),
            f"source/{name}/reward/mean": stats.mean,
            f"source/{name}/reward/frac_zero_std": stats.frac_zero_std,
            f"source/{name}/reward/solved_share": stats.solved_share,
            f"source/{name}/response_length/mean": sum(num_tokens[group] for group in own) / num_responses,
        }
    return found


def _mean_by_task(groups: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Mean reward of each task that scored all of these groups."""
    tasks = [task for task in groups[0] if all(task in group for group in groups)]
    rewards = {task: [*chain.from_iterable(group[task] for group in groups)] for task in tasks}
    return {f"reward/{task}/mean": statistics.fmean(own) for task, own in rewards.items()}
