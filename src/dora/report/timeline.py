"""The activity of engines and trainer over time, as the report draws it, from the spans of a journal."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.types import GroupId, Limits, RequestId
from dora.journal.timeline import (
    EngineSpan,
    GroupSpan,
    LoadSpan,
    MigrationSpan,
    PauseSpan,
    RequestSpan,
    ScoringSpan,
    Span,
    TrainerSpan,
    of_kind,
)

MAX_TRACKS = 64  # engines drawn
MAX_SPANS = 40_000  # drawn one by one; a longer run is drawn as sums over bins
MAX_BINS = 60_000  # of all engines together
MAX_MIGRATIONS = 2_000
MAX_INTERVALS = 8_000  # of the trainer
NUM_LONGEST_WAITS = 20  # of the trainer, listed one by one


# --- engines


class DecodeSegment(NamedTuple):
    """The time (s) of a request on an engine, or the part of it in which one version decoded it."""

    from_s: float
    to_s: float
    version: int
    request: RequestId


def engines_to_json(spans: Sequence[Span], now: float) -> dict[str, Any]:
    """The tracks of the engines and the migrations between them; open spans end at `now`."""
    engines = sorted(of_kind(spans, EngineSpan), key=lambda engine: engine.ordinal)
    shown = engines[:MAX_TRACKS]
    requests, loads = _by_engine(spans, RequestSpan), _by_engine(spans, LoadSpan)
    segments = [
        sorted(
            DecodeSegment(from_s, to_s, version, span.request)
            for span in requests[engine]
            for from_s, to_s, version in span.segments(now)
        )
        for engine in shown
    ]
    is_summed = sum(map(len, segments)) > MAX_SPANS
    started_s = min((engine.start_s for engine in shown), default=0.0)
    num_bins = max(60, min(1_200, MAX_BINS // max(1, len(shown))))
    bin_s = max(1e-3, (now - started_s) / num_bins)
    ended = sorted(of_kind(spans, MigrationSpan), key=lambda span: span.until(now))
    migrations = [_describe_migration(span) for span in ended if span.migrated is not None]
    return {
        "tracks": [
            {
                "engine": engine.engine,
                "attempt": engine.attempt,
                "rows": engine.joined.max_num_seqs,
                "replaces": engine.joined.replaces,
                "from": _ms(engine.start_s),
                "to": _ms(engine.until(now)),
                "end": engine.end if engine.end in ("lost", "removed") else None,
                "reason": engine.reason,
                "loads": [*filter(None, map(_describe_load, loads[engine]))],
                **({"bins": _bins(own, started_s, bin_s)} if is_summed else {"spans": _columns(own)}),
            }
            for engine, own in zip(shown, segments, strict=True)
        ],
        "num_tracks": len(engines),
        "num_spans": sum(map(len, segments)),
        "bin_ms": round(1e3 * bin_s, 3) if is_summed else None,
        "from": _ms(started_s),
        "to": _ms(now),
        "migrations": migrations[-MAX_MIGRATIONS:],
        "num_migrations": len(migrations),
        "num_failed_migrations": sum(span.failure is not None for span in ended),
    }


def _describe_load(load: LoadSpan) -> list[Any] | None:
    """Start, end, version, pause (ms), failure; None unless it has succeeded or failed."""
    if load.loaded is None and not load.end.startswith("failed: "):
        return None
    pause_s = 0.0 if load.loaded is None else load.loaded.stop_s
    failure = load.end.removeprefix("failed: ")
    return [_ms(load.start_s), _ms(load.until(0.0)), load.version, round(1e3 * pause_s, 1), failure]


def _describe_migration(span: MigrationSpan) -> dict[str, Any]:
    return {
        "t": round(span.until(0.0), 3),
        "from": None if span.source is None else span.source.ordinal,
        "to": None if span.destination is None else span.destination.ordinal,
    }


def _columns(spans: Sequence[DecodeSegment]) -> dict[str, list[Any]]:
    """Start and duration (ms), version and request as columns, which are smaller than objects."""
    return {
        "t": [_ms(span.from_s) for span in spans],
        "d": [_ms(span.to_s) - _ms(span.from_s) for span in spans],
        "v": [span.version for span in spans],
        "r": [str(span.request) for span in spans],
    }


def _bins(spans: Sequence[DecodeSegment], started_s: float, bin_s: float) -> list[tuple[int, int, float]]:
    """(bin, version, mean number of occupied rows), where it is not 0."""
    occupied: defaultdict[tuple[int, int], float] = defaultdict(float)
    for span in spans:
        at_s = span.from_s
        while at_s < span.to_s:
            number = int((at_s - started_s) / bin_s + 1e-9)
            until_s = min(span.to_s, started_s + (number + 1) * bin_s)
            occupied[number, span.version] += max(0.0, until_s - at_s)
            at_s = max(until_s, at_s + 1e-9)
    return [
        (number, version, round(row_s / bin_s, 2)) for (number, version), row_s in sorted(occupied.items())
    ]


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)


# --- the trainer

PHASES = {"train": "train", "publish": "publish", "publish again": "publish", "wait": "wait", "lost": "wait"}


class TrainerWait(NamedTuple):
    """The trainer waited (s) until `group` completed its batch; `request` was the group's last response."""

    from_s: float
    to_s: float
    step: int
    group: GroupId | None
    request: RequestId | None
    engine: int | None
    generation_s: float  # of the wait: until the last response finished
    scoring_s: float  # of the wait: from there until the group was scored


def trainer_waits(spans: Iterable[Span]) -> list[TrainerWait]:
    """The waits of the trainer, each before a training step."""
    waits: list[TrainerWait] = []
    before: TrainerSpan | None = None
    for span in of_kind(spans, TrainerSpan):
        if span.phase == "train" and before is not None and before.start_s < span.start_s:
            waits.append(_explain_wait(before.start_s, span))
        before = span
    return waits


def _explain_wait(since_s: float, step: TrainerSpan) -> TrainerWait:
    """The last scored group of the batch ended the wait, if it was scored during the wait."""
    now = step.start_s
    last = max(reversed(step.batch), key=lambda group: group.scored_s or 0.0, default=None)
    if last is None or last.scored_s is None or not last.responses or not since_s < last.scored_s:
        return TrainerWait(since_s, now, step.number, None, None, None, now - since_s, 0.0)
    response = max(reversed(last.responses.values()), key=lambda response: response.until(now))
    finished_s = min(now, max(since_s, response.until(now)))
    spent = finished_s - since_s, now - finished_s
    ends = last.group, response.request, response.engine.engine
    return TrainerWait(since_s, now, step.number, *ends, *spent)


def trainer_to_json(spans: Iterable[Span], now: float) -> dict[str, Any]:
    """Intervals in ms (the latest ones of a very long run), sums, and the longest waits."""
    phases = of_kind(spans, TrainerSpan)
    waits = trainer_waits(phases)
    intervals = [
        [PHASES[span.phase], _ms(span.start_s), _ms(span.end_s), span.number]
        for span in phases
        if span.end_s is not None and span.end_s > span.start_s and PHASES[span.phase] != "wait"
    ]
    longest = heapq.nlargest(NUM_LONGEST_WAITS, waits, key=lambda wait: wait.to_s - wait.from_s)
    return {
        "intervals": intervals[-MAX_INTERVALS:],
        "sums": _sums(phases, waits, now),
        "num_waits": len(waits),
        "waits": [
            {
                "from": round(wait.from_s, 3),
                "s": round(wait.to_s - wait.from_s, 4),
                "step": wait.step,
                "group": None if wait.group is None else str(wait.group),
                "request": None if wait.request is None else str(wait.request),
                "engine": wait.engine,
                "generation_s": round(wait.generation_s, 4),
                "scoring_s": round(wait.scoring_s, 4),
            }
            for wait in longest
        ],
    }


def _sums(phases: Iterable[TrainerSpan], waits: Iterable[TrainerWait], now: float) -> dict[str, float]:
    """Seconds by phase; waits are split into generation, scoring and other."""
    spent = defaultdict[str, float](float)
    for span in phases:
        spent[PHASES[span.phase]] += span.until(now) - span.start_s
    generation_s = sum(wait.generation_s for wait in waits if wait.group is not None)
    scoring_s = sum(wait.scoring_s for wait in waits)
    sums = {
        "train": spent["train"],
        "publish": spent["publish"],
        "generation": generation_s,
        "scoring": scoring_s,
        "other": max(0.0, spent["wait"] - generation_s - scoring_s),
    }
    return {phase: round(seconds, 3) for phase, seconds in sums.items()}


# --- rows

CAUSES = ("train", "publish", "scoring", "generation", "other", "end")  # why a row is free
Segment = tuple[float, float, str]  # start, end, cause
CauseIntegral = Callable[[Sequence[float]], NDArray[np.float64]]  # [n] times -> [causes, n] seconds before


def rows_to_json(spans: Sequence[Span], limits: Limits, now: float) -> list[dict[str, Any]]:
    """Row-seconds of every engine by activity, until `now`.

    A row with a request decodes, is paused or loads weights. A free row waits for whatever delays the
    admission of the next group: the trainer while it trains or publishes, else scoring, else the responses of
    other rows.
    """
    causes_s = _integrate(_free_causes(spans, limits, now))
    requests, pauses, loads = (_by_engine(spans, kind) for kind in (RequestSpan, PauseSpan, LoadSpan))
    return [
        {
            "attempt": engine.attempt,
            "engine": engine.engine,
            "rows": engine.joined.max_num_seqs,
            "row_s": _row_seconds(engine, requests[engine], pauses[engine], loads[engine], causes_s, now),
        }
        for engine in sorted(of_kind(spans, EngineSpan), key=lambda engine: engine.ordinal)
    ]


def _by_engine(spans: Iterable[Span], kind: type[Any]) -> defaultdict[EngineSpan, list[Any]]:
    found: defaultdict[EngineSpan, list[Any]] = defaultdict(list)
    for span in of_kind(spans, kind):
        found[span.engine].append(span)
    return found


def _row_seconds(
    engine: EngineSpan,
    requests: Sequence[RequestSpan],
    pauses: Sequence[PauseSpan],
    loads: Iterable[LoadSpan],
    causes_s: CauseIntegral,
    now: float,
) -> dict[str, float]:
    rows, end_s = engine.joined.max_num_seqs, engine.until(now)
    loaded = [load for load in loads if load.loaded is not None]
    has_weights_s = min((load.until(now) for load in loaded), default=end_s)
    occupied_s = sum(span.until(now) - span.start_s for span in requests)
    latest_ends = [*accumulate((pause.until(now) for pause in pauses), max)]
    paused_s = sum(_paused_s(span, pauses, bisect_right(latest_ends, span.start_s), now) for span in requests)
    loading_s = sum(load.num_paused * load.loaded.stop_s for load in loaded if load.loaded is not None)
    row_s = {
        "decoding": occupied_s - paused_s - loading_s,
        "paused": paused_s,
        "loading": loading_s,
        "weights": rows * (has_weights_s - engine.start_s),
    }
    existing_s = rows * (causes_s([end_s]) - causes_s([has_weights_s]))
    starts, ends = [span.start_s for span in requests], [span.until(now) for span in requests]
    free_s = existing_s.sum(axis=1) - (causes_s(ends) - causes_s(starts)).sum(axis=1)
    row_s |= dict(zip(CAUSES, free_s.tolist(), strict=True))
    return {cause: round(max(0.0, seconds), 3) for cause, seconds in row_s.items()}


def _paused_s(span: RequestSpan, pauses: Sequence[PauseSpan], first: int, now: float) -> float:
    """How long the engine of a request decoded others only, or nothing; pauses before `first` have ended."""
    from_s, to_s = span.start_s, span.until(now)
    paused_s, until_s = 0.0, from_s
    for number in range(first, len(pauses)):
        pause = pauses[number]  # by their start; a pause of the whole engine and one of some rows may overlap
        if pause.start_s >= to_s:
            break
        if span.request not in pause.requests and pause.until(now) > until_s:
            start_s, until_s = max(until_s, pause.start_s), min(to_s, pause.until(now))
            paused_s += max(0.0, until_s - start_s)
    return paused_s


def _integrate(segments: Sequence[Segment]) -> CauseIntegral:
    """The integral of `segments`, which follow one another without a gap."""
    edges_s = np.array([start_s for start_s, _, _ in segments] + [segments[-1][1]])
    sums = np.zeros((len(edges_s), len(CAUSES)))
    for row, (start_s, end_s, cause) in enumerate(segments, 1):
        sums[row, CAUSES.index(cause)] = end_s - start_s
    columns = sums.cumsum(axis=0).T
    return lambda times_s: np.array([np.interp(times_s, edges_s, column) for column in columns])


def _free_causes(spans: Iterable[Span], limits: Limits, now: float) -> list[Segment]:
    """The cause of free rows over time."""
    changes: list[tuple[float, str, int]] = []  # (time, quantity, change)
    for span in spans:
        match span:
            case TrainerSpan(phase="train" | "publish" | "publish again" as phase):
                quantity = PHASES[phase]
            case ScoringSpan():
                quantity = "scoring"
            case RequestSpan():
                quantity = "generation"
            case GroupSpan(outcome="trained"):
                changes.append((span.start_s, "end", 1))
                continue
            case GroupSpan():
                quantity = "end"
            case _:
                continue
        changes.append((span.start_s, quantity, 1))
        if span.end_s is not None:
            changes.append((span.end_s, quantity, -1))
    changes.sort()
    num_groups = limits.num_steps * limits.batch_size
    numbers = dict.fromkeys(CAUSES, 0)
    segments: list[Segment] = []
    cause, since_s = "other", 0.0
    for t_s, quantity, change in changes:
        numbers[quantity] += change
        is_over = numbers["end"] >= num_groups
        order = ("train", "publish", "scoring", "generation")
        after = "end" if is_over else next((name for name in order if numbers[name] > 0), "other")
        if after != cause:
            segments.append((since_s, t_s, cause))
            cause, since_s = after, t_s
    return [*segments, (since_s, now, cause)]
