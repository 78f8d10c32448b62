"""Write a run in Chrome's trace event format, for https://ui.perfetto.dev and chrome://tracing.

A trace has processes, a process has tracks, and a track has as many lanes as slices on it overlap. Slices are
the spans of `dora.journal.timeline`, counters are sums over them, and marks are single lines of the journal.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple, TextIO

from dora.core import actions, events
from dora.errors import InputError
from dora.journal.reader import Journal, read_journal
from dora.journal.timeline import (
    EngineSpan,
    EvaluationSpan,
    GroupSpan,
    LoadSpan,
    MigrationSpan,
    PauseSpan,
    RequestSpan,
    ScoringSpan,
    Span,
    StoredSpan,
    TrainerSpan,
    VersionSpan,
    fold,
    of_kind,
)
from dora.text import plural, step_number

TRACE_FILE = "trace.json"
OPEN_AT_END = "open at the end of the journal"
FIRST_ENGINE_RANK = 100  # engines come below the other processes
RUN, TRAINER, SCORING, VERSIONS = "run", "trainer", "reward workers", "versions in the weight store"


def main(run: Path, out: Path | None = None) -> str:
    """Write the trace of a run; returns a message about it. Raises InputError."""
    journal, out = read_journal(run), out or run / TRACE_FILE
    try:
        with _open(out) as file:
            num_events, num_migrations = write(journal, str(run), file)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): give another --out") from error
    torn = "; the journal's last line was cut off and is omitted" if journal.is_torn else ""
    return (
        f"{out}: {plural(num_events, 'event')}, {plural(num_migrations, 'migration')}{torn}\n"
        "open it at https://ui.perfetto.dev, which keeps it in your browser, or at chrome://tracing"
    )


def write(journal: Journal, name: str, file: TextIO) -> tuple[int, int]:
    """Write the trace of a run called `name`; returns the numbers of trace events and of migrations."""
    about = {"run": name, "max_staleness": journal.limits.max_staleness}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    trace = _Trace(file)
    num_migrations = _add_run(trace, journal)
    file.write("\n]}\n")
    return trace.num_events, num_migrations


def _add_run(trace: _Trace, journal: Journal) -> int:
    """Write the events of a run; returns the number of migrations."""
    spans = fold(journal.lines, breaks_c1=journal.limits.breaks_c1)
    end_s = journal.lines[-1].t_s if journal.lines else 0.0
    for rank, name in enumerate((RUN, TRAINER, SCORING, VERSIONS)):
        trace.add_process(name, rank)
    for number in sorted({span.engine for span in of_kind(spans, EngineSpan)}):
        trace.add_process(_engine_name(number), FIRST_ENGINE_RANK + number)
    lane_of = trace.add_slices([each for span in spans for each in _slices(span, end_s)])
    requests = of_kind(spans, RequestSpan)
    num_migrations = trace.add_migrations(requests, of_kind(spans, MigrationSpan), lane_of)
    for line in journal.lines:
        for mark in _marks(line.record):
            trace.add_mark(line.t_s, *mark)
        if isinstance(line.record, events.ProgressReported):
            name = _engine_name(line.record.engine)
            trace.count(name, "tokens/s", "per row", line.t_s, line.record.row_tokens_per_s)
            trace.count(name, "KV", "in use (%)", line.t_s, round(100 * line.record.kv_usage, 2))
    _count_requests(trace, requests)
    groups = of_kind(spans, GroupSpan)
    _count_steps(trace, [span for span in of_kind(spans, TrainerSpan) if span.phase == "train"])
    _count_groups(trace, groups)
    return num_migrations


def _open(out: Path) -> TextIO:
    """Compress if the name ends in .gz; Perfetto reads both."""
    if out.suffix == ".gz":
        return gzip.open(out, "wt", encoding="utf-8")
    return out.open("w", encoding="utf-8")


# --- the format


class Slice(NamedTuple):
    """An interval on a track of a process; `key` names it for arrows."""

    process: str
    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]
    key: object


class Mark(NamedTuple):
    """An instant of a process."""

    process: str
    name: str
    args: Mapping[str, Any]


class _Trace:
    """Processes, tracks and lanes of a trace; times in seconds."""

    def __init__(self, file: TextIO) -> None:
        self.num_events = 0
        self._file = file
        self._ids = itertools.count(1)  # 0 would be the idle process
        self._pids: dict[str, int] = {}
        self._num_tracks: Counter[str] = Counter()  # of each process
        self._mark_lanes: dict[str, int] = {}  # of each process
        self._last_counts: dict[tuple[str, str, str], float] = {}

    def add_process(self, name: str, rank: int) -> None:
        """`rank` orders the processes from top to bottom."""
        self._pids[name] = next(self._ids)
        self._emit_metadata("process_name", name, 0, {"name": name})
        self._emit_metadata("process_sort_index", name, 0, {"sort_index": rank})

    def add_slices(self, slices: Sequence[Slice]) -> dict[object, tuple[int, int]]:
        """Draw each slice on the lowest free lane of its track; returns (process, lane) by their keys."""
        tracks: defaultdict[tuple[str, str], list[Slice]] = defaultdict(list)
        for each in sorted(slices, key=lambda each: (each.start_s, each.end_s > each.start_s, each.name)):
            tracks[each.process, each.track].append(each)
        return {
            each.key: (self._pids[process], lane)
            for (process, track), own in tracks.items()
            for each, lane in self._add_track(process, track, own)
        }

    def _add_track(self, process: str, track: str, slices: Iterable[Slice]) -> Iterator[tuple[Slice, int]]:
        lanes: list[int] = []
        free: list[int] = []  # heap of indices of `lanes`
        busy: list[tuple[float, int]] = []  # heap of (end, index)
        rank = self._rank_of_track(process)
        for each in slices:
            while busy and busy[0][0] <= each.start_s:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, len(lanes))
                lanes.append(self._add_lane(process, track, rank, len(lanes)))
            index = heapq.heappop(free)
            heapq.heappush(busy, (each.end_s, index))
            start_us = _microseconds(each.start_s)
            self._emit(
                {
                    "ph": "X",
                    "name": each.name,
                    "cat": track,
                    "pid": self._pids[process],
                    "tid": lanes[index],
                    "ts": start_us,
                    "dur": _microseconds(each.end_s) - start_us,
                    "args": each.args,
                }
            )
            yield each, lanes[index]

    def add_migrations(
        self,
        requests: Sequence[RequestSpan],
        migrations: Iterable[MigrationSpan],
        lane_of: Mapping[object, tuple[int, int]],
    ) -> int:
        """Draw an arrow from the engine that a request leaves to its next one; returns their number."""
        started_s = {(each.action.request, each.end_s): each.start_s for each in migrations}
        moved = [(span, span.migrated_to) for span in requests if span.migrated_to is not None]
        for source, target in moved:
            shared = {"name": "migration", "cat": "migration", "id": next(self._ids)}
            start_s = started_s.get((source.request, source.end_s), target.start_s)
            (pid, tid), (pid_to, tid_to) = lane_of[source, len(source.updates)], lane_of[target, 0]
            start_us = _microseconds(max(start_s, source.segments(start_s)[-1][0]))
            self._emit({"ph": "s", "pid": pid, "tid": tid, "ts": start_us, **shared})
            end = {"ph": "f", "bp": "e", "pid": pid_to, "tid": tid_to, "ts": _microseconds(target.start_s)}
            self._emit(end | shared)
        return len(moved)

    def count(self, process: str, counter: str, series: str, t_s: float, value: float) -> None:
        """Set a counter from now on, if it changes; Perfetto shows it under both names."""
        if process not in self._pids or self._last_counts.get((process, counter, series)) == value:
            return  # without a process: an engine that never joined
        self._last_counts[process, counter, series] = value
        pid, ts = self._pids[process], _microseconds(t_s)
        self._emit({"ph": "C", "name": counter, "pid": pid, "ts": ts, "args": {series: value}})

    def add_mark(self, t_s: float, process: str, name: str, args: Mapping[str, Any]) -> None:
        """Mark an instant; all marks of a process share one lane."""
        if process not in self._pids:  # of an engine that never joined
            return
        if process not in self._mark_lanes:
            self._mark_lanes[process] = self._add_lane(process, "marks", self._rank_of_track(process), 0)
        self._emit(
            {
                "ph": "i",
                "s": "p",
                "name": name,
                "cat": "mark",
                "pid": self._pids[process],
                "tid": self._mark_lanes[process],
                "ts": _microseconds(t_s),
                "args": args,
            }
        )

    def _emit(self, event: Mapping[str, Any]) -> None:
        self._file.write((",\n" if self.num_events else "") + json.dumps(event))
        self.num_events += 1

    def _rank_of_track(self, process: str) -> int:
        self._num_tracks[process] += 1
        return self._num_tracks[process] - 1

    def _add_lane(self, process: str, track: str, rank: int, number: int) -> int:
        lane = next(self._ids)
        name = f"{track} {number}" if number else track
        self._emit_metadata("thread_name", process, lane, {"name": name})
        self._emit_metadata("thread_sort_index", process, lane, {"sort_index": 1000 * rank + number})
        return lane

    def _emit_metadata(self, kind: str, process: str, tid: int, args: dict[str, Any]) -> None:
        pid = self._pids[process]
        self._emit({"ph": "M", "name": kind, "pid": pid, "tid": tid or pid, "args": args})


def _microseconds(t_s: float) -> int:
    """Whole microseconds, so that a slice ends exactly where the next one starts."""
    return round(1e6 * t_s)


# --- slices


def version_name(version: int) -> str:
    """`v12m`: Perfetto colours slices by their name without digits, so each version has a letter."""
    return f"v{version}{ascii_lowercase[version % len(ascii_lowercase)]}"


def _engine_name(engine: int) -> str:
    return f"engine {engine}"


def _slices(span: Span, end_s: float) -> Iterator[Slice]:
    """The slices of a span; an open span ends at `end_s`, the end of the journal."""
    if isinstance(span, RequestSpan):
        yield from _request_slices(span, end_s)
    elif (drawn := _describe_span(span)) is not None:
        process, track, name, args = drawn
        end = OPEN_AT_END if span.end_s is None else span.end
        yield Slice(
            process, track, name, span.start_s, span.until(end_s), args | ({"end": end} if end else {}), span
        )


def _request_slices(span: RequestSpan, end_s: float) -> Iterator[Slice]:
    """A slice for each version that decoded the request on this engine."""
    segments = span.segments(end_s)
    for number, (from_s, to_s, version) in enumerate(segments):
        args: dict[str, Any] = {"request": str(span.request), "version": version}
        is_last = number == len(span.updates)
        if is_last and span.finished is not None:
            args["tokens"] = span.num_tokens
            chunks = [[chunk.version, chunk.num_tokens] for chunk in span.finished.chunks]
            if len({version for version, _ in chunks}) > 1:
                args["segments"] = chunks
        if not is_last:
            args["end"] = f"continues with version {segments[number + 1][2]}"
        else:
            args["end"] = OPEN_AT_END if span.end_s is None else span.end
        name = f"{version_name(version)} {span.request}"
        process = _engine_name(span.engine.engine)
        yield Slice(process, "requests", name, from_s, to_s, args, (span, number))


def _describe_span(span: Span) -> tuple[str, str, str, dict[str, Any]] | None:
    """Process, track, name and arguments of its slice."""
    match span:
        case MigrationSpan(action=action):
            source, name = _engine_name(action.source), f"to engine {action.destination}: {action.request}"
            return (source, "migrations", name, _describe_migration(span)) if span.source else None
        case VersionSpan(engine=engine, version=version):
            args: dict[str, Any] = {"version": version}
            return _engine_name(engine.engine), "versions", version_name(version), args
        case LoadSpan(engine=engine, version=version, loaded=loaded):
            args = {} if loaded is None else {"digest": loaded.digest, "pause_ms": 1e3 * loaded.stop_s}
            return _engine_name(engine.engine), "loads", f"load {version_name(version)}", args
        case PauseSpan(engine=engine, name="decode only", requests=requests):
            names = [str(request) for request in requests]
            name = f"decodes only {', '.join(names)}"
            return _engine_name(engine.engine), "pauses", name, {"requests": names}
        case PauseSpan(engine=engine, name=name):
            return _engine_name(engine.engine), "pauses", f"{name} for the trainer", {}
        case TrainerSpan():
            return _describe_phase(span)
        case ScoringSpan(group=group, rewards=rewards):
            args = {"group": str(group)} | ({} if rewards is None else {"rewards": rewards})
            return SCORING, "groups", f"score {group}", args
        case StoredSpan(version=version, digest=digest):
            return VERSIONS, "versions", version_name(version), {"digest": digest}
        case EvaluationSpan(version=version):
            name = f"evaluation of {version_name(version)}"
            return VERSIONS, "evaluations", name, {"version": version}
        case _:
            return None


def _describe_migration(span: MigrationSpan) -> dict[str, Any]:
    args: dict[str, Any] = {"request": str(span.action.request), "reason": span.action.reason}
    if (event := span.migrated) is not None:
        args |= {
            "tokens": event.num_tokens,
            "kv_bytes": event.num_bytes,
            "copy_ms": 1e3 * event.copy_s,
            "downtime_ms": 1e3 * event.stop_s,
            "prefilled_tokens": event.num_prefilled,
        }
    return args


def _describe_phase(span: TrainerSpan) -> tuple[str, str, str, dict[str, Any]] | None:
    """A phase of the trainer; its name has no version, so each kind of phase has one colour."""
    number, args = span.number, dict[str, Any]()
    match span.phase:
        case "train":
            name = f"train step {step_number(number)}"
            args = {"step": step_number(number), "groups": [str(group) for group in span.groups]}
            if isinstance(span.result, events.Trained):
                args |= {"ess": span.result.ess, "kl": span.result.kl}
        case "wait":
            if span.end_s == span.start_s:
                return None
            name = f"wait for the batch of step {step_number(number)}"
            args = {"step": step_number(number)}
        case "lost":
            name, args = "LOST: a new trainer is starting", {"reason": span.reason}
        case _:
            name = f"publish {number}" if span.phase == "publish" else f"publish {number} again"
            args = {"version": number}
            if isinstance(span.result, events.Published | events.DigestReported):
                args["digest"] = span.result.digest
    return TRAINER, "phases", name, args


# --- marks


def _marks(record: events.Event | actions.Action) -> Iterator[Mark]:
    """The marks of a record, each in the lane of its engine or process."""
    match record:
        case events.EngineJoined(engine, rows, slots, _, replaces):
            name = "joined" if replaces is None else f"joined, replaces engine {replaces}"
            yield Mark(_engine_name(engine), name, {"rows": rows, "slots": slots})
        case events.EngineLost(engine, reason):
            yield Mark(_engine_name(engine), f"LOST: {reason}", {})
        case events.EngineRemoved(engine):
            yield Mark(_engine_name(engine), "removed", {})
        case events.DrainRequested(engine):
            yield Mark(_engine_name(engine), "drain requested", {})
        case actions.RejectDrain(engine, reason):
            yield Mark(_engine_name(engine), f"drain rejected: {reason}", {})
        case actions.SkipLoad(engine, version):
            yield Mark(_engine_name(engine), f"skips v{version}", {})
        case actions.SkipEvaluation(version, running_version):
            name = f"evaluation of version {version} skipped: that of {running_version} is running"
            yield Mark(VERSIONS, name, {})
        case actions.Filter(group, reason) | actions.Fail(group, reason):
            yield Mark(RUN, f"group {group} {type(record).__name__.lower()}ed: {reason}", {})
        case _:
            yield from _marks_of_trainer(record)


def _marks_of_trainer(record: events.Event | actions.Action) -> Iterator[Mark]:
    match record:
        case events.StepFailed(step, reason):
            yield Mark(TRAINER, f"step {step_number(step)} FAILED: {reason}", {})
        case events.TrainerReplaced(from_step, redone):
            yield Mark(TRAINER, f"REPLACED after step {from_step}, {len(redone)} to redo", {})
        case actions.ReportStall(step, group, requests, since_s):
            name = f"STALL: step {step_number(step)} waits for group {group}"
            yield Mark(TRAINER, name, {"requests": [str(each) for each in requests], "since_s": since_s})
        case events.Resumed(from_step):
            for process in (RUN, TRAINER):
                yield Mark(process, f"RESUMED from step {from_step}", {})
        case _:
            pass


# --- counters


def _count_requests(trace: _Trace, requests: Iterable[RequestSpan]) -> None:
    """The running requests of each engine."""
    changes: defaultdict[int, Counter[float]] = defaultdict(Counter)  # engine -> time -> change
    for span in requests:
        changes[span.engine.engine][span.start_s] += 1
        if span.end_s is not None:
            changes[span.engine.engine][span.end_s] -= 1
    for engine, own in changes.items():
        num_running = 0
        for t_s, change in sorted(own.items()):
            num_running += change
            trace.count(_engine_name(engine), "requests", "running", t_s, num_running)


def _count_steps(trace: _Trace, steps: Iterable[TrainerSpan]) -> None:
    """Staleness, reward and tokens of each step when it starts; not again for a repeated step."""
    num_tokens = 0
    for span in steps:
        if not span.batch:
            continue
        staleness = [span.number - group.admitted.version for group in span.batch]
        num_tokens += sum(group.num_tokens for group in span.batch)
        trace.count(RUN, "staleness", "mean of the step", span.start_s, statistics.fmean(staleness))
        trace.count(RUN, "staleness", "maximum of the step", span.start_s, max(staleness))
        rewards = [statistics.fmean(group.rewards) for group in span.batch if group.rewards]
        if rewards:
            trace.count(RUN, "reward", "mean of the step", span.start_s, statistics.fmean(rewards))
        trace.count(RUN, "tokens", "trained", span.start_s, num_tokens)


def _count_groups(trace: _Trace, groups: Iterable[GroupSpan]) -> None:
    """Open groups by stage, and their versions."""
    changes: defaultdict[float, list[tuple[str, int, int]]] = defaultdict(list)  # -> stage, version, change
    for group in groups:
        version = group.admitted.version
        left_s = group.end_s if group.train_s is None else group.train_s
        before = ""
        for stage, t_s in (
            ("not scored", group.start_s),
            ("scored, not committed", group.scored_s),
            ("in the next batch", group.committed_s),
            ("", left_s),
        ):
            if t_s is not None:
                changes[t_s] += [(before, version, -1), (stage, version, 1)]
                before = stage
    numbers: Counter[str] = Counter()
    versions: Counter[int] = Counter()
    for t_s, own in sorted(changes.items()):
        for stage, version, change in own:
            if stage:
                numbers[stage] += change
                versions[version] += change
        for stage in ("not scored", "scored, not committed", "in the next batch"):
            trace.count(RUN, "groups", stage, t_s, numbers[stage])
        trace.count(RUN, "versions", "of open groups", t_s, len(+versions))
