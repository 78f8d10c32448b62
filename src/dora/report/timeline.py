"""The activity of engines and trainer over time, from the events and actions of a journal."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora.core.actions import (
    Action,
    Admit,
    DecodeOnly,
    Fail,
    Filter,
    Generate,
    Load,
    PauseEngine,
    Publish,
    ReportDigest,
    ResumeEngine,
    Score,
    Train,
)
from dora.core.events import (
    DigestReported,
    EngineJoined,
    EngineLost,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    ScoringFailed,
    StepFailed,
    Trained,
    TrainerLost,
)
from dora.core.types import GroupId, Limits, RequestId

MAX_TRACKS = 64  # engines drawn
MAX_SPANS = 40_000  # drawn one by one; a longer run is drawn as sums over bins
MAX_BINS = 60_000  # of all engines together
MAX_MIGRATIONS = 2_000
MAX_INTERVALS = 8_000  # of the trainer
NUM_LONGEST_WAITS = 20  # of the trainer, listed one by one


# --- engines


class RequestSpan(NamedTuple):
    """The time (s) of a request on an engine, or the part of it in which one version decoded it."""

    from_s: float
    to_s: float
    version: int
    request: RequestId


@dataclass
class EngineTrack:
    """One engine, from when it joined to its end."""

    engine: int
    attempt: int  # of the run, from 0: a resume starts the next one
    rows: int
    is_colocated: bool
    replaces: int | None
    from_s: float
    to_s: float | None = None
    end: str | None = None  # "lost" or "removed"
    reason: str = ""
    spans: list[RequestSpan] = field(default_factory=list)
    loads: list[tuple[float, float, int, float, str]] = field(default_factory=list)  # ..., pause_s, failure
    running: dict[RequestId, tuple[float, int]] = field(default_factory=dict)  # -> since, version
    loading: tuple[float, int] | None = None  # since, version

    def start(self, now: float, request: RequestId, version: int) -> None:
        self.running[request] = (now, version)

    def stop(self, now: float, request: RequestId) -> int | None:
        """End the span of a request; returns its version."""
        if (started := self.running.pop(request, None)) is None:
            return None
        self.spans.append(RequestSpan(started[0], now, started[1], request))
        return started[1]

    def update_versions(self, now: float, version: int) -> None:
        """Without C1, responses continue with the newer version that was loaded; held-out ones do not."""
        for request, (_, before) in [*self.running.items()]:
            if before < version and not request.is_held_out:
                self.stop(now, request)
                self.start(now, request, version)

    def close(self, now: float, end: str | None, reason: str = "") -> None:
        for request in [*self.running]:
            self.stop(now, request)
        self.to_s, self.end, self.reason, self.loading = now, end, reason, None


@dataclass
class EngineTimeline:
    """The tracks of all engines, and the migrations between them."""

    breaks_c1: bool = False
    tracks: list[EngineTrack] = field(default_factory=list)
    migrations: list[dict[str, Any]] = field(default_factory=list)
    failed_migrations: list[dict[str, Any]] = field(default_factory=list)
    attempt: int = 0
    _current: dict[int, int] = field(default_factory=dict)  # engine -> index of its track

    def observe(self, now: float, record: Event | Action) -> None:
        match record:
            case EngineJoined(engine, rows, _, is_colocated, replaces):
                self._current[engine] = len(self.tracks)
                self.tracks.append(EngineTrack(engine, self.attempt, rows, is_colocated, replaces, now))
            case EngineLost(engine, reason):
                self._close(now, engine, "lost", reason)
            case EngineRemoved(engine):
                self._close(now, engine, "removed", "")
            case Resumed():
                for engine in [*self._current]:
                    self._close(now, engine, None, "the run was resumed")
                self.attempt += 1
            case Generate(engine, version, requests):
                for request in requests:
                    self._track(engine).start(now, request, version)
            case RequestFinished(engine, request) | RequestFailed(engine, request):
                self._track(engine).stop(now, request)
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._track(engine).stop(now, request)
            case _:
                self._observe_transfer(now, record)

    def to_json(self, now: float) -> dict[str, Any]:
        """What the page draws; open spans end at `now`."""
        shown = self.tracks[:MAX_TRACKS]
        spans = [_spans_until(track, now) for track in shown]
        is_summed = sum(map(len, spans)) > MAX_SPANS
        started_s = min((track.from_s for track in shown), default=0.0)
        num_bins = max(60, min(1_200, MAX_BINS // max(1, len(shown))))
        bin_s = max(1e-3, (now - started_s) / num_bins)
        return {
            "tracks": [
                {
                    "engine": track.engine,
                    "attempt": track.attempt,
                    "rows": track.rows,
                    "colocated": track.is_colocated,
                    "replaces": track.replaces,
                    "from": _ms(track.from_s),
                    "to": _ms(now if track.to_s is None else track.to_s),
                    "end": track.end,
                    "reason": track.reason,
                    "loads": [
                        [_ms(a), _ms(b), version, round(1e3 * pause_s, 1), failure]
                        for a, b, version, pause_s, failure in track.loads
                    ],
                    **({"bins": _bins(own, started_s, bin_s)} if is_summed else {"spans": _columns(own)}),
                }
                for track, own in zip(shown, spans, strict=True)
            ],
            "num_tracks": len(self.tracks),
            "num_spans": sum(map(len, spans)),
            "bin_ms": round(1e3 * bin_s, 3) if is_summed else None,
            "from": _ms(started_s),
            "to": _ms(now),
            "migrations": self.migrations[-MAX_MIGRATIONS:],
            "num_migrations": len(self.migrations),
            "failed_migrations": self.failed_migrations[-MAX_MIGRATIONS:],
            "num_failed_migrations": len(self.failed_migrations),
        }

    def _observe_transfer(self, now: float, record: Event | Action) -> None:
        """Migrations of requests and loads of weights."""
        match record:
            case Migrated(request, source, destination):
                version = self._track(source).stop(now, request)
                if version is None:
                    return
                self._track(destination).start(now, request, version)
                self.migrations.append(self._describe_migration(now, record, version))
            case MigrationFailed(request, source, destination, reason):
                ends = {"from": self._current.get(source), "to": self._current.get(destination)}
                failed = {"t": round(now, 3), **ends, "request": str(request), "reason": reason}
                self.failed_migrations.append(failed)
            case Load(engine, version):
                self._track(engine).loading = (now, version)
            case Loaded(engine, version, _, pause_s):
                self._end_load(now, engine, version, pause_s, "")
            case LoadFailed(engine, version, reason):
                self._end_load(now, engine, version, 0.0, reason)
            case _:
                pass

    def _track(self, engine: int) -> EngineTrack:
        return self.tracks[self._current[engine]]

    def _close(self, now: float, engine: int, end: str | None, reason: str) -> None:
        self.tracks[self._current.pop(engine)].close(now, end, reason)

    def _end_load(self, now: float, engine: int, version: int, pause_s: float, failure: str) -> None:
        track = self._track(engine)
        since_s = track.loading[0] if track.loading else now
        track.loads.append((since_s, now, version, pause_s, failure))
        track.loading = None
        if self.breaks_c1 and not failure:
            track.update_versions(now, version)

    def _describe_migration(self, now: float, event: Migrated, version: int) -> dict[str, Any]:
        return {
            "t": round(now, 3),
            "from": self._current.get(event.source),
            "to": self._current.get(event.destination),
            "version": version,
            "request": str(event.request),
            "tokens": event.num_tokens,
            "bytes": event.num_bytes,
            "downtime_ms": round(1e3 * event.stop_s, 2),
        }


def _spans_until(track: EngineTrack, now: float) -> list[RequestSpan]:
    """All spans by their start; those of running requests end `now`."""
    running = [
        RequestSpan(since_s, now, version, request) for request, (since_s, version) in track.running.items()
    ]
    return sorted([*track.spans, *running])


def _columns(spans: Sequence[RequestSpan]) -> dict[str, list[Any]]:
    """Start and duration (ms), version and request as columns, which are smaller than objects."""
    return {
        "t": [_ms(span.from_s) for span in spans],
        "d": [_ms(span.to_s) - _ms(span.from_s) for span in spans],
        "v": [span.version for span in spans],
        "r": [str(span.request) for span in spans],
    }


def _bins(spans: Sequence[RequestSpan], started_s: float, bin_s: float) -> list[tuple[int, int, float]]:
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


@dataclass
class TrainerTimeline:
    """When the trainer trained, published and waited."""

    intervals: list[tuple[str, float, float, int]] = field(default_factory=list)  # phase, from, to, number
    waits: list[TrainerWait] = field(default_factory=list)
    _since_s: float | None = None  # start of the current phase; None before the run starts
    _phase: tuple[str, int] = ("wait", 0)  # with the number of a step or version
    _last_response: dict[GroupId, tuple[float, RequestId, int]] = field(default_factory=dict)
    _scored: GroupId | None = None  # by the last event

    def observe(self, now: float, record: Event | Action) -> None:
        match record:
            case RequestFinished(engine, request):
                self._last_response[request.group] = (now, request, engine)
                self._scored = None
            case GroupScored(group):
                self._scored = group
            case Train(step):
                self._start_training(now, step)
            case Publish(version) | ReportDigest(version):
                self._enter(now, "publish", version)
            case Published(version):
                self._enter(now, "wait", version)
                self._scored = None
            case TrainerLost() | DigestReported():
                self._enter(now, "wait", self._phase[1])
            case StepFailed(step):
                self._enter(now, "wait", step)
            case Resumed(from_step):
                self._enter(now, "wait", from_step)
            case Filter(group) | Fail(group):
                self._last_response.pop(group, None)
            case _:
                pass

    def sums(self, now: float) -> dict[str, float]:
        """Seconds by phase; waits are split into generation, scoring and other."""
        spent = defaultdict[str, float](float)
        for phase, from_s, to_s, _ in self.intervals:
            spent[phase] += to_s - from_s
        if self._since_s is not None:
            spent[self._phase[0]] += now - self._since_s
        generation_s = sum(wait.generation_s for wait in self.waits if wait.group is not None)
        scoring_s = sum(wait.scoring_s for wait in self.waits)
        sums = {
            "train": spent["train"],
            "publish": spent["publish"],
            "generation": generation_s,
            "scoring": scoring_s,
            "other": max(0.0, spent["wait"] - generation_s - scoring_s),
        }
        return {phase: round(seconds, 3) for phase, seconds in sums.items()}

    def to_json(self, now: float) -> dict[str, Any]:
        """Intervals in ms (the latest ones of a very long run), sums, and the longest waits."""
        intervals = [interval for interval in self.intervals if interval[0] != "wait"][-MAX_INTERVALS:]
        longest = heapq.nlargest(NUM_LONGEST_WAITS, self.waits, key=lambda wait: wait.to_s - wait.from_s)
        return {
            "intervals": [[phase, _ms(a), _ms(b), number] for phase, a, b, number in intervals],
            "sums": self.sums(now),
            "num_waits": len(self.waits),
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

    def _start_training(self, now: float, step: int) -> None:
        if self._since_s is not None and now > self._since_s:
            since_s, group = self._since_s, self._scored
            last = self._last_response.get(group) if group else None
            finished_s, request, engine = last or (now, None, None)
            finished_s = min(now, max(since_s, finished_s))
            spent = finished_s - since_s, now - finished_s
            self.waits.append(TrainerWait(since_s, now, step, group, request, engine, *spent))
        self._enter(now, "train", step)

    def _enter(self, now: float, phase: str, number: int) -> None:
        """The trainer starts another phase; `number` is that of a step or version."""
        before, number_before = self._phase
        if self._since_s is not None and now > self._since_s:
            self.intervals.append((before, self._since_s, now, number_before))
        self._since_s, self._phase = now, (phase, number)


# --- rows


@dataclass
class _EngineRows:
    rows: int
    since_s: float
    requests: set[RequestId] = field(default_factory=set)
    decode_only: set[RequestId] = field(default_factory=set)  # empty: all decode
    is_paused: bool = False
    has_weights: bool = False
    row_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by cause


@dataclass
class RowTime:
    """Row-seconds of every engine by activity.

    A row with a request decodes, is paused or loads weights. A free row waits for whatever delays the
    admission of the next group: the trainer while it trains or publishes, else scoring, else the responses of
    other rows.
    """

    limits: Limits
    engines: dict[tuple[int, int], _EngineRows] = field(default_factory=dict)  # (attempt, engine) -> rows
    _current: dict[int, _EngineRows] = field(default_factory=dict)
    _attempt: int = 0
    _trainer: str = ""  # "train", "publish" or ""
    _scoring: set[GroupId] = field(default_factory=set)
    _num_admitted: int = 0  # groups, without filtered and failed ones
    _num_running: int = 0  # requests
    _cause: str = "other"  # of free rows

    def observe(self, now: float, record: Event | Action) -> None:
        self._observe_causes(record)
        self._observe_rows(now, record)
        cause = self._free_cause()
        if cause != self._cause:
            for rows in self._current.values():
                self._integrate(rows, now)
            self._cause = cause

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """Row-seconds of each engine until `now`."""
        for rows in self._current.values():
            self._integrate(rows, now)
        return [
            {
                "attempt": attempt,
                "engine": engine,
                "rows": rows.rows,
                "row_s": {cause: round(max(0.0, row_s), 3) for cause, row_s in rows.row_s.items()},
            }
            for (attempt, engine), rows in self.engines.items()
        ]

    def _observe_causes(self, record: Event | Action) -> None:
        match record:
            case Admit():
                self._num_admitted += 1
            case Filter(group) | Fail(group):
                self._num_admitted -= 1
                self._scoring.discard(group)
            case Score(group):
                self._scoring.add(group)
            case GroupScored(group) | ScoringFailed(group):
                self._scoring.discard(group)
            case Train():
                self._trainer = "train"
            case Publish() | ReportDigest():
                self._trainer = "publish"
            case Trained() | StepFailed() | Published() | DigestReported() | TrainerLost():
                self._trainer = ""
            case Resumed():
                self._trainer = ""
                self._scoring.clear()
            case _:
                pass

    def _observe_rows(self, now: float, record: Event | Action) -> None:
        match record:
            case EngineJoined(engine, num_rows):
                rows = _EngineRows(num_rows, now)
                self._current[engine] = self.engines[self._attempt, engine] = rows
            case EngineLost(engine) | EngineRemoved(engine):
                self._remove(engine, now)
            case Resumed():
                for engine in [*self._current]:
                    self._remove(engine, now)
                self._attempt += 1
            case Generate(engine, _, requests):
                self._rows_of(engine, now).requests.update(requests)
                self._num_running += len(requests)
            case RequestFinished(engine, request) | RequestFailed(engine, request):
                self._free(engine, now, request)
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._free(engine, now, request)
            case Migrated(request, source, destination):
                self._free(source, now, request)
                self._rows_of(destination, now).requests.add(request)
                self._num_running += 1
            case DecodeOnly(engine, requests):
                self._rows_of(engine, now).decode_only = {*requests}
            case PauseEngine(engine) | ResumeEngine(engine):
                self._rows_of(engine, now).is_paused = isinstance(record, PauseEngine)
            case Loaded(engine, stop_s=pause_s):
                rows = self._rows_of(engine, now)
                rows.has_weights = True
                rows.row_s["loading"] += pause_s * len(rows.requests)
                rows.row_s["decoding"] -= pause_s * len(rows.requests)
            case _:
                pass

    def _rows_of(self, engine: int, now: float) -> _EngineRows:
        """The rows of an engine, up to date, for a change."""
        self._integrate(self._current[engine], now)
        return self._current[engine]

    def _free(self, engine: int, now: float, request: RequestId) -> None:
        rows = self._rows_of(engine, now)
        self._num_running -= request in rows.requests
        rows.requests.discard(request)

    def _remove(self, engine: int, now: float) -> None:
        self._num_running -= len(self._rows_of(engine, now).requests)
        del self._current[engine]

    def _free_cause(self) -> str:
        if self._num_admitted >= self.limits.num_steps * self.limits.batch_size:
            return "end"
        if self._trainer:
            return self._trainer
        return "scoring" if self._scoring else "generation" if self._num_running else "other"

    def _integrate(self, rows: _EngineRows, now: float) -> None:
        elapsed_s, rows.since_s = now - rows.since_s, now
        num_occupied = len(rows.requests)
        num_paused = 0
        if rows.is_paused:
            num_paused = num_occupied
        elif rows.decode_only:
            num_paused = len(rows.requests - rows.decode_only)
        rows.row_s["decoding"] += elapsed_s * (num_occupied - num_paused)
        rows.row_s["paused"] += elapsed_s * num_paused
        cause = self._cause if rows.has_weights else "weights"
        rows.row_s[cause] += elapsed_s * max(0, rows.rows - num_occupied)
