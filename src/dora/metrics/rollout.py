"""Metrics of the rollout: utilisation of rows, response lengths, migrations, weight loads.

They are computed from the spans of `dora.journal.timeline`, as these end, and from the engines' usage
counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from dora.core.actions import Action, Load, SkipLoad
from dora.core.types import GroupId
from dora.journal.timeline import GroupSpan, LoadSpan, MigrationSpan, RequestSpan, Span

Number = TypeVar("Number", int, float)
DRIFT_LIMIT = 0.1  # of the mean response length; a larger drift is reported


def percentile(values: Sequence[Number], fraction: float) -> Number | None:
    """The value that `fraction` of the values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


# --- utilisation


class EngineUsage(NamedTuple):
    """Counters that an engine reports with its responses and once a second; both only grow."""

    decoding_row_s: float  # rows that decoded x time, summed over steps
    uptime_s: float  # since the engine was ready

    def since(self, before: EngineUsage) -> EngineUsage:
        return EngineUsage(self.decoding_row_s - before.decoding_row_s, self.uptime_s - before.uptime_s)


UsageByEngine = Mapping[int, EngineUsage]  # as last reported
NO_USAGE = EngineUsage(0.0, 0.0)


class RolloutUtilization:
    """Decoding row-seconds over available row-seconds, since the run started or resumed.

    An engine takes both counters at the same instant by its own clock, so the ratio never exceeds 1 and does
    not depend on when the report arrives. A row counts once, whichever versions its engine holds. An engine
    that was lost or removed counts until its last report.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._at_start: dict[int, EngineUsage] = {}  # at the first admission, or when the engine joined
        self._at_last_finish: dict[int, EngineUsage] = {}
        self._at_last_step: dict[int, EngineUsage] = {}
        self._last_ratio = 0.0  # of a step

    def join(self, engine: int, rows: int, usage: UsageByEngine) -> None:
        """An engine with this number of rows has joined."""
        self._rows[engine] = rows
        self._at_start[engine] = self._at_last_step[engine] = usage.get(engine, NO_USAGE)

    def start(self, usage: UsageByEngine) -> None:
        """The first group is admitted: the time before does not count."""
        for engine in self._rows:
            self._at_start[engine] = self._at_last_step[engine] = usage.get(engine, NO_USAGE)

    def finish_request(self, usage: UsageByEngine) -> None:
        """A response has finished: the run is measured up to here."""
        self._at_last_finish = dict(usage)

    def end_step(self, usage: UsageByEngine) -> float:
        """Utilisation since the step before; repeated if no engine has reported since."""
        self._last_ratio = self._ratio(self._between(self._at_last_step, usage), self._last_ratio)
        self._at_last_step |= {engine: usage[engine] for engine in self._rows if engine in usage}
        return self._last_ratio

    def overall(self) -> float:
        """Utilisation from the first admission to the last finished response, over all rows."""
        return self._ratio(self._between(self._at_start, self._at_last_finish), 0.0)

    def by_engine(self) -> dict[int, float]:
        """The same by engine, for engines that have reported."""
        usages = self._between(self._at_start, self._at_last_finish)
        return {engine: self._ratio({engine: usage}, 0.0) for engine, usage in sorted(usages.items())}

    def _between(self, before: UsageByEngine, after: UsageByEngine) -> dict[int, EngineUsage]:
        usages = {engine: after[engine].since(before[engine]) for engine in self._rows if engine in after}
        return {engine: usage for engine, usage in usages.items() if usage.uptime_s > 0}

    def _ratio(self, usages: UsageByEngine, default: float) -> float:
        row_s = {engine: self._rows[engine] * usage.uptime_s for engine, usage in usages.items()}
        # A paced step is timed from the end of the previous step, slightly before that step's report: without
        # `min` the ratio could exceed 1.
        decoding_s = sum(min(usage.decoding_row_s, row_s[engine]) for engine, usage in usages.items())
        return decoding_s / sum(row_s.values()) if row_s else default


# --- response lengths


class ResponseLengths:
    """Lengths in tokens of the responses that were generated, trained and filtered.

    Groups with equal rewards are filtered and are seldom as long as the others: training on other lengths
    than those generated is a drift.
    """

    def __init__(self) -> None:
        self.generated = Counter[int]()  # length -> responses
        self.trained = Counter[int]()
        self.filtered = Counter[int]()

    def add(self, span: Span) -> None:
        """Count the lengths of a finished request, or of a filtered group."""
        match span:
            case RequestSpan(finished=finished) if finished is not None and not span.request.is_held_out:
                self.generated[span.num_tokens] += 1
            case GroupSpan(outcome="filtered"):
                self.filtered.update(response.num_tokens for response in span.responses.values())
            case _:
                pass

    def train(self, groups: Iterable[GroupSpan]) -> dict[str, float]:
        """The groups were trained: the metrics of their step."""
        responses = [response for group in groups for response in group.responses.values()]
        lengths = [response.num_tokens for response in responses]
        num_clipped = sum(response.end in ("length", "observation_length") for response in responses)
        self.trained.update(lengths)
        return {
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/min": min(lengths),
            "response_length/max": max(lengths),
            "response_length/clip_ratio": num_clipped / len(responses),
        }

    def drift(self) -> float | None:
        """Mean length trained over mean length generated, minus 1; None before the first training step."""
        if not self.trained:
            return None
        trained, generated = (fmean(one, weights=one.values()) for one in (self.trained, self.generated))
        return trained / generated - 1

    def to_json(self) -> dict[str, Any]:
        """The lengths in the summary."""
        drift = self.drift()
        return {
            "response_length_generated": length_distribution(self.generated),
            "response_length_trained": length_distribution(self.trained),
            "response_length_drift": None if drift is None else round(drift, 4),
            "filtered_samples_by_length": _by_power_of_two(self.filtered),
        }


def length_distribution(lengths: Counter[int]) -> dict[str, float | None] | None:
    """Mean, percentiles and maximum; None without any."""
    if not lengths:
        return None
    values = [*lengths.elements()]
    return {
        "mean": round(fmean(lengths, weights=lengths.values()), 2),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def _by_power_of_two(lengths: Counter[int]) -> dict[str, int]:
    """Responses by length: {"33-64": 7}."""
    buckets = Counter[int]()
    for length, num in lengths.items():
        buckets[max(0, length - 1).bit_length()] += num
    return {
        f"{2 ** (power - 1) + 1 if power else 0}-{2**power}": num for power, num in sorted(buckets.items())
    }


# --- migrations


@dataclass
class MigrationMetrics:
    """Migrations of a run and their costs. `prompt_length` gives the prompt tokens of a group."""

    prompt_length: Callable[[GroupId], int]
    succeeded: Counter[str] = field(default_factory=Counter)  # by the reason of the migration
    failed: Counter[str] = field(default_factory=Counter)  # by the reason of the failure
    kv_bytes: int = 0
    downtimes_s: list[float] = field(default_factory=list)  # in which a request got no token
    reprefill_tokens: int = 0  # of requests restarted although no engine was lost, or migrated without KV

    def add(self, span: Span) -> None:
        """Count a migration that has ended, or the tokens that a restarted request computes again."""
        match span:
            case MigrationSpan(failure=str(reason)):
                self.failed[reason] += 1
            case MigrationSpan(migrated=event) if event is not None:
                self.succeeded[span.action.reason] += 1
                self.kv_bytes += event.num_bytes
                self.reprefill_tokens += event.num_prefilled
                if event.num_bytes or event.num_prefilled:  # else the destination was lost before the report
                    self.downtimes_s.append(event.stop_s)
            case RequestSpan(end="restarted"):
                self.reprefill_tokens += self.prompt_length(span.request.group) + span.num_tokens
            case _:
                pass

    def to_json(self) -> dict[str, Any]:
        """The migrations in the summary."""
        return {
            "migrations": self.succeeded.total(),
            "migration_reasons": dict(sorted(self.succeeded.items())),
            "failed_migrations": self.failed.total(),
            "failed_migration_reasons": dict(sorted(self.failed.items())),
            "migrated_kv_bytes": self.kv_bytes,
            "migration_downtime_s_p50": percentile(self.downtimes_s, 0.5),
            "migration_downtime_s_max": max(self.downtimes_s, default=None),
        }


# --- weight loads


@dataclass
class WeightLoadMetrics:
    """Weight loads of the engines and how long requests paused for them."""

    num_loads: int = 0
    num_skipped: int = 0  # and not loaded later to keep the staleness bound
    load_s: float = 0.0  # from `Load` to `Loaded`, summed
    pause_s: float = 0.0  # the part of it in which the engine's requests were paused
    _skipped: dict[int, int] = field(default_factory=dict)  # engine -> version

    def add(self, span: Span) -> None:
        """Count a load that has ended."""
        if isinstance(span, LoadSpan) and span.loaded is not None:
            self.num_loads += 1
            self.load_s += span.duration_s
            self.pause_s += span.loaded.stop_s

    def order(self, actions: Iterable[Action]) -> None:
        """Account for loads that are skipped, or done after all."""
        for action in actions:
            if isinstance(action, Load):
                self.num_skipped -= self._skipped.pop(action.engine, None) == action.version
            elif isinstance(action, SkipLoad):
                self._skipped[action.engine] = action.version
                self.num_skipped += 1

    def forget_engines(self) -> None:
        """All engines are new."""
        self._skipped.clear()

    def to_json(self) -> dict[str, Any]:
        """The weight loads in the summary."""
        return {
            "weight_loads": self.num_loads,
            "weight_loads_skipped": self.num_skipped,
            "weight_load_s": round(self.load_s, 4),
            "weight_load_pause_s": round(self.pause_s, 4),
        }
