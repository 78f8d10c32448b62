"""Fits costs to the journals of real runs, and forecasts runs with them.

Spans are read from a journal: requests on engines, and training steps. Costs are fitted to them by least
squares:

response = report + tokens * (step + per_row * rows + per_version * (versions - 1))
training step = fixed + per_token * tokens

Engines and trainer slow each other down by a constant ratio while both work, because they may use the same
cores. The fit of this ratio needs a run in which they work one after the other, such as a synchronous run,
and a run in which they work concurrently.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dora.core.events import Trained
from dora.core.orchestrator import Orchestrator
from dora.core.types import GroupId, Limits
from dora.errors import InputError
from dora.journal.reader import JournalLine
from dora.journal.timeline import (
    EngineSpan,
    GroupSpan,
    LoadSpan,
    MigrationSpan,
    RequestSpan,
    ScoringSpan,
    Span,
    TrainerSpan,
    fold,
    of_kind,
)
from dora.planner.costs import StepTimeTerms
from dora.planner.fluid import FluidEngine
from dora.planner.lengths import CHUNK_SIZE
from dora.planner.simulator import Contention, Simulator, SimulatorOptions

Floats = NDArray[np.float64]
Changes = Iterable[tuple[float, float]]  # (time, change) of a quantity
MIN_SPANS = 3  # of responses, and of training steps
SLOWDOWN_STEP = 0.02  # between the slowdowns that are tried
ERROR_TOLERANCE = 1.001  # relative: the smallest slowdown wins that is so close to the least error


# Reading runs


@dataclass(frozen=True)
class TrainingSpan:
    """A training step, from its complete batch to new weights; `early_s` is work on it before."""

    started_s: float
    ended_s: float
    num_tokens: int
    early_s: float = 0.0

    @property
    def work_started_s(self) -> float:
        return self.started_s - self.early_s

    @property
    def work_s(self) -> float:
        return self.early_s + self.ended_s - self.started_s


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's journal that calibration needs.

    `update_s`: compute time of the trainer by step, where known. `min_stream_tokens`: tokens of an
    incomplete batch at which the trainer starts on it; None: it waits for the whole batch.
    """

    limits: Limits
    update_s: Mapping[int, float]
    min_stream_tokens: int | None
    engines: list[EngineSpan]
    groups: dict[GroupId, GroupSpan]
    requests: list[RequestSpan]  # on engines where they got tokens, by their start
    trainings: list[TrainingSpan]
    durations_s: Mapping[str, list[float]]  # by kind

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second, from the end of the first training step to that of the last."""
        first, *others = self.trainings
        return sum(step.num_tokens for step in others) / (others[-1].ended_s - first.ended_s)


def read_run(
    limits: Limits,
    lines: Iterable[JournalLine],
    update_s: Mapping[int, float] | None = None,
    min_stream_tokens: int | None = None,
) -> RecordedRun:
    """A run by the lines of its journal."""
    spans, update_s = fold(lines), update_s or {}
    groups = {span.group: span for span in of_kind(spans, GroupSpan)}
    requests = [
        span
        for span in of_kind(spans, RequestSpan)
        if (span.finished or span.migrated_to) and span.duration_s > 0 and span.num_new_tokens > 0
    ]
    trainings = []
    for span in of_kind(spans, TrainerSpan):
        if isinstance(span.result, Trained):
            num_tokens = sum(groups[group].num_tokens for group in span.groups)
            early_s = max(0.0, update_s.get(span.number, 0.0) - span.duration_s)
            trainings.append(TrainingSpan(span.start_s, span.until(span.start_s), num_tokens, early_s))
    engines = sorted(of_kind(spans, EngineSpan), key=lambda engine: engine.ordinal)
    durations_s = _durations_s(spans)
    return RecordedRun(limits, update_s, min_stream_tokens, engines, groups, requests, trainings, durations_s)


def _durations_s(spans: Iterable[Span]) -> Mapping[str, list[float]]:
    """Durations of what has ended well, by its kind."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        match span:
            case MigrationSpan(migrated=migrated) if migrated is not None:
                found["migration"].append(migrated.copy_s)
            case LoadSpan(loaded=loaded) if loaded is not None:
                found["load"].append(span.duration_s)
                found["load stop"].append(loaded.stop_s)
            case ScoringSpan(rewards=rewards) if rewards is not None:
                found["reward"].append(span.duration_s)
            case TrainerSpan(phase="publish") if span.end_s is not None:
                found["publish"].append(span.duration_s)
            case _:
                pass
    return found


# Fitting costs


@dataclass(frozen=True)
class LinearCost:
    """A duration (s) with a fixed part and a part per unit."""

    fixed_s: float = 0.0
    per_unit_s: float = 0.0

    def at(self, units: float) -> float:
        return self.fixed_s + self.per_unit_s * units


@dataclass(frozen=True)
class FittedCosts:
    """Costs of engines and trainer, fitted to real runs. Implements `EngineCosts` and `TrainerCosts`."""

    decode: LinearCost = LinearCost()  # a decode step, by rows
    train: LinearCost = LinearCost()  # a training step, by thousands of tokens
    per_version_s: float = 0.0  # of a decode step, for each version beyond the first
    finish_report_s: float = 0.0  # of a response, beside its decode steps
    load_s: float = 0.0
    load_stop_s: float = 0.0  # part of a load in which the engine's requests are stopped
    migration_s: float = 0.0
    publish_s: float = 0.0
    reward_s: float = 0.0
    contention: Contention = field(default_factory=Contention)
    ep_size: int = 1
    kv_capacity: int = 1 << 60
    kv_bytes: float = 0.0
    kv_growth: float = 1.0

    def kv_tokens(self, context: float, final: float = 0.0) -> float:
        return context

    def terms(self, num_rows: int, rank_rows: int) -> StepTimeTerms:
        overhead_s = self.decode.at(num_rows) - self.per_version_s
        return StepTimeTerms(0.0, overhead_s, self.per_version_s, 0.0, 0.0)

    def prefill_s(self, num_tokens: float) -> float:
        return 0.0  # part of `finish_report_s`

    def migrate_s(self, num_tokens: float) -> float:
        return self.migration_s

    def swap_s(self, num_tokens: float) -> float:
        return 0.0

    def sequence_s(self, num_tokens: float) -> float:
        return self.train.per_unit_s * num_tokens / 1000

    @property
    def step_overhead_s(self) -> float:
        return self.train.fixed_s


def fit_costs(runs: Sequence[RecordedRun]) -> FittedCosts:
    """Costs fitted to several runs of one machine and model. Raises InputError if they have too few spans."""
    num_steps = sum(len(run.trainings) for run in runs)
    num_requests = sum(span.is_uninterrupted for run in runs for span in run.requests)
    if num_steps < MIN_SPANS or num_requests < MIN_SPANS:
        raise InputError(
            f"the run has {num_steps} training steps and {num_requests} responses that were decoded without "
            f"interruption; calibration needs at least {MIN_SPANS} of each"
        )
    decode, decode_slowdown = fit([_request_data(run) for run in runs], max_slowdown=1.0)
    finish_report_s, step_s, per_row_s, per_version_s = decode
    num_engines = max(len(run.engines) for run in runs)
    train, train_slowdown = fit([_training_data(run) for run in runs], max_slowdown=float(num_engines))

    def mean(what: str) -> float:
        durations_s = [seconds for run in runs for seconds in run.durations_s.get(what, ())]
        return sum(durations_s) / len(durations_s) if durations_s else 0.0

    return FittedCosts(
        decode=LinearCost(step_s, per_row_s),
        train=LinearCost(*train),
        per_version_s=per_version_s,
        finish_report_s=finish_report_s,
        load_s=mean("load"),
        load_stop_s=mean("load stop"),
        migration_s=mean("migration"),
        publish_s=mean("publish"),
        reward_s=mean("reward"),
        contention=Contention(decode_slowdown, train_slowdown),
    )


@dataclass(frozen=True)
class FitData:
    """n spans to fit k costs to."""

    durations_s: Floats  # [n]
    units: Floats  # [n, k], of each cost in a span
    overlaps: Floats  # [n], fraction of the span in which the other component works
    weights: Floats  # [n]


def fit(data: Sequence[FitData], max_slowdown: float) -> tuple[list[float], float]:
    """Seconds per unit of each cost, none negative, and the slowdown of spans while the other component
    works.

    Where several slowdowns fit equally well, the smallest is taken.
    """
    durations_s = np.concatenate([one.durations_s * one.weights for one in data])
    units = np.concatenate([one.units * one.weights[:, None] for one in data])
    overlaps = np.concatenate([one.overlaps for one in data])
    tried: list[tuple[float, float, list[float]]] = []
    if np.ptp(overlaps) <= 0.5:  # the data do not show a slowdown
        max_slowdown = 0.0
    for slowdown in np.arange(0.0, max_slowdown + SLOWDOWN_STEP / 2, SLOWDOWN_STEP):
        scaled = units * (1 + slowdown * overlaps)[:, None]
        costs_s = _fit_non_negative(scaled, durations_s)
        error = float(((scaled @ costs_s - durations_s) ** 2).sum())
        tried.append((error, float(slowdown), costs_s.tolist()))
    least = min(error for error, _, _ in tried)
    return next((costs, slowdown) for error, slowdown, costs in tried if error <= ERROR_TOLERANCE * least)


def _fit_non_negative(units: Floats, durations_s: Floats) -> Floats:
    """Least squares; negative costs are set to 0, the most negative first."""
    left = [k for k in range(units.shape[1]) if units[:, k].any()]
    costs_s = np.zeros(units.shape[1])
    while left:
        costs_s[:] = 0.0
        costs_s[left] = np.linalg.lstsq(units[:, left], durations_s, rcond=None)[0]
        worst = min(left, key=lambda k: costs_s[k])
        if costs_s[worst] >= 0:
            break
        left.remove(worst)
    return costs_s


def _request_data(run: RecordedRun) -> FitData:
    """Uninterrupted responses. Units: 1, tokens, tokens of all rows meanwhile, steps x further versions."""
    training_s = integrate(
        change for step in run.trainings for change in ((step.work_started_s, 1.0), (step.ended_s, -1.0))
    )
    decoded, version_s = {}, {}
    for engine in run.engines:
        own = [span for span in run.requests if span.engine is engine]
        decoded[engine] = integrate(_rate_changes(own))
        version_s[engine] = integrate(_count_changes(own, lambda span: span.version))
    rows = []
    for span in (span for span in run.requests if span.is_uninterrupted):
        start, end, num_tokens = span.start_s, span.until(span.start_s), span.num_new_tokens
        num_decoded = decoded[span.engine](end) - decoded[span.engine](start)
        num_versions = (version_s[span.engine](end) - version_s[span.engine](start)) / span.duration_s
        overlap = min(1.0, (training_s(end) - training_s(start)) / span.duration_s)
        extra_versions = num_tokens * max(0.0, num_versions - 1)
        rows.append((1.0, num_tokens, num_decoded, extra_versions, span.duration_s, overlap))
    table = np.array(rows, dtype=float).reshape(-1, 6)
    return FitData(table[:, 4], table[:, :4], table[:, 5], 1 / np.sqrt(table[:, 1]))


def _rate_changes(spans: Iterable[RequestSpan]) -> Changes:
    """Changes of the tokens per second of all these requests."""
    for span in spans:
        tokens_per_s = span.num_new_tokens / span.duration_s
        yield span.start_s, tokens_per_s
        yield span.until(span.start_s), -tokens_per_s


def _count_changes(spans: Sequence[RequestSpan], key: Callable[[RequestSpan], int]) -> Changes:
    """Changes of the number of different keys among the requests that run."""
    running: Counter[int] = Counter()
    changes = [(span.start_s, 1, key(span)) for span in spans]
    changes += [(span.until(span.start_s), -1, key(span)) for span in spans]
    for time_s, change, of_span in sorted(changes):
        before = len(+running)
        running[of_span] += change
        if (after := len(+running)) != before:
            yield time_s, float(after - before)


def _training_data(run: RecordedRun) -> FitData:
    """The training steps. Units: 1, thousands of tokens. Overlaps: the fraction of engines that decode."""
    busy_s = integrate(_count_changes(run.requests, lambda span: span.engine.engine))
    rows = [
        (1.0, step.num_tokens / 1000, step.work_s, busy_s(step.ended_s) - busy_s(step.work_started_s))
        for step in run.trainings
    ]
    table = np.array(rows, dtype=float).reshape(-1, 4)
    overlaps = table[:, 3] / table[:, 2] / len(run.engines)
    return FitData(table[:, 2], table[:, :2], overlaps, np.ones(len(table)))


def integrate(changes: Changes) -> Callable[[float], float]:
    """The integral over time of a quantity that changes in steps, from its first change on."""
    ordered = sorted(changes) or [(0.0, 0.0)]
    times_s = np.array([time_s for time_s, _ in ordered])
    levels = np.cumsum([change for _, change in ordered])
    sums = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(times_s))])
    return lambda time_s: float(np.interp(time_s, times_s, sums))


# Forecasting runs


class RecordedLengths:
    """Lengths of a run's responses, by position in the dataset; unfinished groups get those of others."""

    num_turns, turn_delay_s = 1, 0.0

    def __init__(self, run: RecordedRun) -> None:
        size = run.limits.group_size
        self._known = {
            group.admitted.index: [group.responses[k].num_tokens for k in range(size)]
            for group in run.groups.values()
            if len(group.responses) == size
        }
        self._others = [self._known[position] for position in sorted(self._known)]

    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        positions = range(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)
        return [self._known.get(p) or self._others[p % len(self._others)] for p in positions]

    def draw_prompts(self, chunk: int, group_size: int) -> Sequence[int]:
        return [0] * CHUNK_SIZE  # the fitted costs count the tokens of responses alone


def forecast_tokens_per_s(run: RecordedRun, costs: FittedCosts) -> float:
    """Trained tokens per second, counted as in `RecordedRun.tokens_per_s`.

    The run is simulated with its limits, engines and lengths, but without any of its times.
    """
    joined = [engine.joined for engine in run.engines]
    engines = [FluidEngine(e.engine, costs, e.max_num_seqs, e.is_colocated) for e in joined]
    options = SimulatorOptions(
        min_stream_tokens=run.min_stream_tokens,
        reward_s=costs.reward_s,
        # With inflight updates, a delayed report would name a version that is too old.
        finish_report_s=0.0 if run.limits.breaks_c1 else costs.finish_report_s,
        contention=costs.contention,
        report_interval_s=1.0,
        version_slots=max(e.version_slots for e in joined),
        zero_variance=frozenset(g.admitted.index for g in run.groups.values() if g.outcome == "filtered"),
    )
    limits = replace(run.limits, num_steps=len(run.trainings), evaluation=None)
    simulator = Simulator(Orchestrator(limits), engines, costs, RecordedLengths(run), limits, options)
    steps = simulator.run().steps
    return sum(step.num_response_tokens for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)


@dataclass(frozen=True)
class RunForecast:
    """Measured and forecast speed of a run, in trained tokens per second."""

    name: str
    is_fitted: bool  # the costs were fitted to this run, too
    num_steps: int
    measured_tokens_per_s: float
    forecast_tokens_per_s: float

    @property
    def error(self) -> float:
        return self.forecast_tokens_per_s / self.measured_tokens_per_s - 1


def forecast_all(
    fitted: Mapping[str, RecordedRun], others: Mapping[str, RecordedRun], costs: FittedCosts | None = None
) -> list[RunForecast]:
    """Forecast each run, by name. Without `costs`, they are fitted to the runs of `fitted`.

    The error of `fitted` runs shows how well the model fits, the error of `others` how well it predicts.
    Raises InputError if a run is too short.
    """
    for name, run in {**fitted, **others}.items():
        if len(run.trainings) < 2:
            raise InputError(
                f"{name} has {len(run.trainings)} training steps; its speed is measured from the end of the "
                "first step to the end of the last and needs at least 2; leave out this run, or resume it"
            )
    costs = costs or fit_costs([*fitted.values()])
    return [
        RunForecast(
            name, name in fitted, len(run.trainings), run.tokens_per_s, forecast_tokens_per_s(run, costs)
        )
        for name, run in {**fitted, **others}.items()
    ]
