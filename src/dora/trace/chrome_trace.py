"""Write a run in Chrome's trace event format, for https://ui.perfetto.dev and chrome://tracing.

A trace has processes, a process has tracks, and a track has as many lanes as slices on it overlap. Trace
events are written as soon as they are complete, in no particular order of time; the file is never held in
memory.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple, TextIO

from dora.core.actions import (
    Action,
    Admit,
    Commit,
    DecodeOnly,
    Drop,
    Fail,
    Filter,
    FinishEvaluation,
    Generate,
    Load,
    Migrate,
    PauseEngine,
    Publish,
    RejectDrain,
    ReportDigest,
    ReportStall,
    ResumeEngine,
    Retire,
    Score,
    SkipEvaluation,
    SkipLoad,
    StartEvaluation,
    Stop,
    Train,
)
from dora.core.events import (
    DigestReported,
    DrainRequested,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    ProgressReported,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    ScoringFailed,
    StepFailed,
    Trained,
    TrainerLost,
    TrainerReplaced,
)
from dora.core.types import GroupId, RequestId
from dora.errors import InputError
from dora.journal.reader import Journal, read_journal
from dora.text import plural, step_number

TRACE_FILE = "trace.json"
OPEN_AT_END = "open at the end of the journal"
CRASHED = "all processes crashed"
FIRST_ENGINE_RANK = 100  # engines come below the other processes

TraceEvent = dict[str, Any]
Emit = Callable[[TraceEvent], None]


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
    num_events = 0

    def emit(event: TraceEvent) -> None:
        nonlocal num_events
        file.write((",\n" if num_events else "") + json.dumps(event))
        num_events += 1

    about = {"run": name, "max_staleness": journal.limits.max_staleness}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    num_migrations = emit_trace(journal, emit)
    file.write("\n]}\n")
    return num_events, num_migrations


def emit_trace(journal: Journal, emit: Emit) -> int:
    """Emit the trace events of a run; returns the number of migrations."""
    ids = IdCounter()
    run = RunProcess(emit, ids)
    processes = (
        TrainerProcess(emit, ids),
        ScoringProcess(emit, ids),
        VersionProcess(emit, ids),
        engines := EngineProcesses(emit, ids, journal.limits.breaks_c1),
    )
    for line in journal.lines:
        for process in (run, *processes):
            process.observe(line.t_s, line.record)
    end_s = journal.lines[-1].t_s if journal.lines else 0.0
    for process in processes:
        process.close(end_s, OPEN_AT_END)
    return engines.num_migrations


def _open(out: Path) -> TextIO:
    """Compress if the name ends in .gz; Perfetto reads both."""
    if out.suffix == ".gz":
        return gzip.open(out, "wt", encoding="utf-8")
    return out.open("w", encoding="utf-8")


# --- the format


class Lane(NamedTuple):
    """One line of a track: `number` within the track, `tid` in the file."""

    track: str
    number: int
    tid: int


@dataclass(eq=False, slots=True)
class Slice:
    """An open interval on a lane."""

    process: TraceProcess
    lane: Lane
    name: str
    start_us: int
    args: dict[str, Any]


class IdCounter:
    """Unique ids of processes, lanes and arrows; 0 would be the idle process."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def next(self) -> int:
        return next(self._ids)


@dataclass
class _Track:
    rank: int
    num_lanes: int = 0
    free: list[Lane] = field(default_factory=list)  # heap: the lowest lane is used first


class TraceProcess:
    """A process of the trace with its tracks, counters and marks; times in seconds."""

    def __init__(self, emit: Emit, ids: IdCounter, name: str, rank: int) -> None:
        """`rank` orders the processes from top to bottom."""
        self._emit, self._ids = emit, ids
        self.pid = ids.next()
        self._tracks: dict[str, _Track] = {}
        self._open: dict[Slice, None] = {}  # by their start
        self._emit_metadata("process_name", self.pid, {"name": name})
        self._emit_metadata("process_sort_index", self.pid, {"sort_index": rank})

    def start(self, track: str, name: str, t_s: float, **args: Any) -> Slice:
        """Open a slice on the lowest free lane of `track`."""
        opened = Slice(self, self._take_lane(track), name, _microseconds(t_s), args)
        self._open[opened] = None
        return opened

    def end(self, opened: Slice, t_s: float, **args: Any) -> None:
        """Close a slice; `args` are added to those of its start."""
        del self._open[opened]
        lane, duration_us = opened.lane, _microseconds(t_s) - opened.start_us
        heapq.heappush(self._tracks[lane.track].free, lane)
        self._emit(
            {
                "ph": "X",
                "name": opened.name,
                "cat": lane.track,
                "pid": self.pid,
                "tid": lane.tid,
                "ts": opened.start_us,
                "dur": duration_us,
                "args": opened.args | args,
            }
        )

    def end_all(self, t_s: float, **args: Any) -> None:
        """Close all open slices."""
        for opened in [*self._open]:
            self.end(opened, t_s, **args)

    def count(self, counter: str, series: str, t_s: float, value: float) -> None:
        """Set a counter from now on; Perfetto shows it under both names."""
        args = {series: value}
        self._emit({"ph": "C", "name": counter, "pid": self.pid, "ts": _microseconds(t_s), "args": args})

    def mark(self, name: str, t_s: float, **args: Any) -> None:
        """Mark an instant; all marks share one lane."""
        lane = self._take_lane("marks")
        heapq.heappush(self._tracks["marks"].free, lane)
        self._emit(
            {
                "ph": "i",
                "s": "p",
                "name": name,
                "cat": "mark",
                "pid": self.pid,
                "tid": lane.tid,
                "ts": _microseconds(t_s),
                "args": args,
            }
        )

    def _take_lane(self, track: str) -> Lane:
        own = self._tracks.setdefault(track, _Track(rank=len(self._tracks)))
        if own.free:
            return heapq.heappop(own.free)
        lane = Lane(track, own.num_lanes, self._ids.next())
        own.num_lanes += 1
        name = f"{track} {lane.number}" if lane.number else track
        self._emit_metadata("thread_name", lane.tid, {"name": name})
        self._emit_metadata("thread_sort_index", lane.tid, {"sort_index": 1000 * own.rank + lane.number})
        return lane

    def _emit_metadata(self, kind: str, tid: int, args: dict[str, Any]) -> None:
        self._emit({"ph": "M", "name": kind, "pid": self.pid, "tid": tid, "args": args})


def _emit_arrow(emit: Emit, ids: IdCounter, name: str, source: Slice, source_s: float, target: Slice) -> None:
    """Draw an arrow from `source` at `source_s` to the start of `target`."""
    shared = {"name": name, "cat": name, "id": ids.next()}
    start_us = max(_microseconds(source_s), source.start_us)
    emit({"ph": "s", "pid": source.process.pid, "tid": source.lane.tid, "ts": start_us, **shared})
    end = {"ph": "f", "bp": "e", "pid": target.process.pid, "tid": target.lane.tid, "ts": target.start_us}
    emit(end | shared)


def _microseconds(t_s: float) -> int:
    """Whole microseconds, so that a slice ends exactly where the next one starts."""
    return round(1e6 * t_s)


def version_name(version: int) -> str:
    """`v12m`: Perfetto colours slices by their name without digits, so each version has a letter."""
    return f"v{version}{ascii_lowercase[version % len(ascii_lowercase)]}"


# --- engines


@dataclass
class _EngineSlices:
    process: TraceProcess
    requests: dict[RequestId, Slice] = field(default_factory=dict)
    versions: dict[int, Slice] = field(default_factory=dict)
    loads: dict[int, Slice] = field(default_factory=dict)  # by version
    decode_only: Slice | None = None
    pause: Slice | None = None


class EngineProcesses:
    """One process for each engine: its requests, versions, loads, migrations and pauses."""

    def __init__(self, emit: Emit, ids: IdCounter, breaks_c1: bool) -> None:
        """With `breaks_c1` requests continue with the version that their engine loads."""
        self._emit, self._ids, self._breaks_c1 = emit, ids, breaks_c1
        self._engines: dict[int, _EngineSlices] = {}  # lost ones too: a resume uses their numbers again
        self._migrations: dict[RequestId, tuple[float, Slice]] = {}  # in progress: start (s), slice
        self.num_migrations = 0

    def observe(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Generate(engine, version, requests):
                for request in requests:
                    self._start_request(t_s, engine, version, request)
            case RequestFinished(engine, request, _, num_tokens, chunks, reason):
                segments = [[chunk.version, chunk.num_tokens] for chunk in chunks]
                mixed = {"segments": segments} if len({version for version, _ in segments}) > 1 else {}
                self._end_request(t_s, engine, request, tokens=num_tokens, end=reason, **mixed)
            case RequestFailed(engine, request, reason):
                self._end_request(t_s, engine, request, end=f"rejected: {reason}")
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._end_request(t_s, engine, request, end="aborted")
            case Migrate() | Migrated() | MigrationFailed():
                self._observe_migration(t_s, record)
            case ProgressReported(engine, _, row_tokens_per_s, kv_share):
                process = self._engine(engine).process
                process.count("tokens/s", "per row", t_s, row_tokens_per_s)
                process.count("KV", "in use (%)", t_s, round(100 * kv_share, 2))
            case Load() | Loaded() | LoadFailed() | Drop() | SkipLoad():
                self._observe_version(t_s, record)
            case _:
                self._observe_engine(t_s, record)

    def close(self, t_s: float, reason: str) -> None:
        """Close all open slices for a reason."""
        for engine in self._engines:
            self._close_engine(t_s, engine, reason)

    def _engine(self, number: int) -> _EngineSlices:
        if number not in self._engines:
            rank = FIRST_ENGINE_RANK + number
            process = TraceProcess(self._emit, self._ids, f"engine {number}", rank)
            self._engines[number] = _EngineSlices(process)
        return self._engines[number]

    def _start_request(self, t_s: float, number: int, version: int, request: RequestId) -> Slice:
        engine = self._engine(number)
        name = f"{version_name(version)} {request}"
        opened = engine.process.start("requests", name, t_s, request=str(request), version=version)
        engine.requests[request] = opened
        engine.process.count("requests", "running", t_s, len(engine.requests))
        return opened

    def _end_request(self, t_s: float, number: int, request: RequestId, **args: object) -> None:
        engine = self._engine(number)
        opened = engine.requests.pop(request, None)
        if opened is None:
            return  # the request was lost with the engine, or the migration is reported twice
        engine.process.end(opened, t_s, **args)
        engine.process.count("requests", "running", t_s, len(engine.requests))

    def _observe_migration(self, t_s: float, record: Migrate | Migrated | MigrationFailed) -> None:
        engine, request = self._engine(record.source), record.request
        if isinstance(record, Migrate):
            name, reason = f"to engine {record.destination}: {request}", record.reason
            opened = engine.process.start("migrations", name, t_s, request=str(request), reason=reason)
            self._migrations[request] = (t_s, opened)
            return
        since_s, migration = self._migrations.pop(request, (t_s, None))
        if isinstance(record, MigrationFailed):
            if migration is not None:
                engine.process.end(migration, t_s, end=f"failed: {record.reason}")
            return
        cost = {
            "tokens": record.num_tokens,
            "kv_bytes": record.num_bytes,
            "copy_ms": 1e3 * record.copy_s,
            "downtime_ms": 1e3 * record.stop_s,
            "prefilled_tokens": record.num_prefilled,
        }
        if migration is not None:
            engine.process.end(migration, t_s, **cost)
        source = engine.requests.get(request)
        if source is not None:
            self._end_request(t_s, record.source, request, end=f"migrated to engine {record.destination}")
            target = self._start_request(t_s, record.destination, source.args["version"], request)
            _emit_arrow(self._emit, self._ids, "migration", source, since_s, target)
            self.num_migrations += 1

    def _observe_version(self, t_s: float, record: Load | Loaded | LoadFailed | Drop | SkipLoad) -> None:
        engine, version = self._engine(record.engine), record.version
        process, load = engine.process, engine.loads.pop(version, None)
        name = version_name(version)
        match record:
            case Load():
                engine.loads[version] = process.start("loads", f"load {name}", t_s)
            case Loaded():
                if load is not None:
                    process.end(load, t_s, digest=record.digest, pause_ms=1e3 * record.stop_s)
                engine.versions[version] = process.start("versions", name, t_s, version=version)
                if self._breaks_c1:
                    self._update_versions(t_s, record.engine, version)
            case LoadFailed():
                if load is not None:
                    process.end(load, t_s, end=f"failed: {record.reason}")
            case Drop():
                if (held := engine.versions.pop(version, None)) is not None:
                    process.end(held, t_s)
            case SkipLoad():
                process.mark(f"skips v{version}", t_s)

    def _update_versions(self, t_s: float, number: int, version: int) -> None:
        """Requests for training continue with the newer version."""
        for request, opened in [*self._engine(number).requests.items()]:
            if opened.args["version"] < version and not request.is_held_out:
                self._end_request(t_s, number, request, end=f"continues with version {version}")
                self._start_request(t_s, number, version, request)

    def _observe_engine(self, t_s: float, record: Event | Action) -> None:
        match record:
            case EngineJoined(engine, rows, slots, _, replaces):
                name = "joined" if replaces is None else f"joined, replaces engine {replaces}"
                self._engine(engine).process.mark(name, t_s, rows=rows, slots=slots)
            case EngineLost(engine, reason):
                self._engine(engine).process.mark(f"LOST: {reason}", t_s)
                self._close_engine(t_s, engine, f"engine lost: {reason}")
            case EngineRemoved(engine):
                self._close_engine(t_s, engine, "engine removed")
                self._engine(engine).process.mark("removed", t_s)
            case DrainRequested(engine):
                self._engine(engine).process.mark("drain requested", t_s)
            case RejectDrain(engine, reason):
                self._engine(engine).process.mark(f"drain rejected: {reason}", t_s)
            case DecodeOnly(engine, requests):
                self._decode_only(t_s, self._engine(engine), requests)
            case PauseEngine(engine):
                self._pause(t_s, self._engine(engine), "pausing for the trainer")
            case EnginePaused(engine):
                self._pause(t_s, self._engine(engine), "paused for the trainer")
            case ResumeEngine(engine):
                self._pause(t_s, self._engine(engine), None)
            case Resumed():
                self.close(t_s, f"{CRASHED}; the run was resumed")
            case _:
                pass

    def _decode_only(self, t_s: float, engine: _EngineSlices, requests: tuple[RequestId, ...]) -> None:
        if engine.decode_only is not None:
            engine.process.end(engine.decode_only, t_s)
            engine.decode_only = None
        if requests:
            names = [str(request) for request in requests]
            name = f"decodes only {', '.join(names)}"
            engine.decode_only = engine.process.start("pauses", name, t_s, requests=names)

    def _pause(self, t_s: float, engine: _EngineSlices, name: str | None) -> None:
        if engine.pause is not None:
            engine.process.end(engine.pause, t_s)
        engine.pause = None if name is None else engine.process.start("pauses", name, t_s)

    def _close_engine(self, t_s: float, number: int, reason: str) -> None:
        engine = self._engines.get(number)
        if engine is None:
            return
        process = engine.process
        process.end_all(t_s, end=reason)
        process.count("requests", "running", t_s, 0)
        self._migrations = {r: each for r, each in self._migrations.items() if each[1].process is not process}
        self._engines[number] = _EngineSlices(process)


# --- the other processes


class TrainerProcess:
    """Phases of the trainer; their names have no version, so each kind of phase has one colour."""

    def __init__(self, emit: Emit, ids: IdCounter) -> None:
        self._process = TraceProcess(emit, ids, "trainer", rank=1)
        self._phase: Slice | None = None

    def observe(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Train(step, groups):
                number, names = step_number(step), [str(group) for group in groups]
                self._start(t_s, f"train step {number}", step=number, groups=names)
            case StepFailed(step, reason):
                self._process.mark(f"step {step_number(step)} FAILED: {reason}", t_s)
                self._end(t_s, end=f"failed: {reason}")
            case Trained(_, ess, kl):
                self._end(t_s, ess=ess, kl=kl)
            case Publish(version):
                self._start(t_s, f"publish {version}", version=version)
            case Published(version, digest):
                self._end(t_s, digest=digest)
                number = step_number(version)  # of the step that trains on this version
                self._start(t_s, f"wait for the batch of step {number}", step=number)
            case TrainerLost(reason):
                self._start(t_s, "LOST: a new trainer is starting", reason=reason)
            case TrainerReplaced(from_step, redone):
                self._process.mark(f"REPLACED after step {from_step}, {len(redone)} to redo", t_s)
            case ReportDigest(version):
                self._start(t_s, f"publish {version} again", version=version)
            case DigestReported(version, digest):
                self._end(t_s, digest=digest)
            case ReportStall(step, group, requests, since_s):
                name = f"STALL: step {step_number(step)} waits for group {group}"
                self._process.mark(name, t_s, requests=[str(each) for each in requests], since_s=since_s)
            case Resumed(from_step):
                self.close(t_s, CRASHED)
                self._process.mark(f"RESUMED from step {from_step}", t_s)
            case Stop():
                self.close(t_s, "the run has finished")
            case _:
                pass

    def close(self, t_s: float, reason: str) -> None:
        self._end(t_s, end=reason)

    def _start(self, t_s: float, name: str, **args: object) -> None:
        self._end(t_s)
        self._phase = self._process.start("phases", name, t_s, **args)

    def _end(self, t_s: float, **args: object) -> None:
        if self._phase is not None:
            self._process.end(self._phase, t_s, **args)
        self._phase = None


class ScoringProcess:
    """Groups that are being scored."""

    def __init__(self, emit: Emit, ids: IdCounter) -> None:
        self._process = TraceProcess(emit, ids, "reward workers", rank=2)
        self._groups: dict[GroupId, Slice] = {}

    def observe(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Score(group):
                self._end(t_s, group, end="requested again")
                self._groups[group] = self._process.start("groups", f"score {group}", t_s, group=str(group))
            case GroupScored(group, rewards):
                self._end(t_s, group, rewards=rewards)
            case ScoringFailed(group, reason):
                self._end(t_s, group, end=f"failed: {reason}")
            case Resumed():
                self.close(t_s, CRASHED)
            case _:
                pass

    def close(self, t_s: float, reason: str) -> None:
        self._process.end_all(t_s, end=reason)
        self._groups.clear()

    def _end(self, t_s: float, group: GroupId, **args: object) -> None:
        if (opened := self._groups.pop(group, None)) is not None:
            self._process.end(opened, t_s, **args)


class VersionProcess:
    """Versions in the weight store, and their evaluations."""

    def __init__(self, emit: Emit, ids: IdCounter) -> None:
        self._process = TraceProcess(emit, ids, "versions in the weight store", rank=3)
        self._stored: dict[int, Slice] = {}
        self._evaluation: Slice | None = None

    def observe(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Published(version, digest):
                self._retire(t_s, version, end="published again")
                name = version_name(version)
                self._stored[version] = self._process.start("versions", name, t_s, digest=digest)
            case Retire(version):
                self._retire(t_s, version)
            case StartEvaluation(version):
                name = f"evaluation of {version_name(version)}"
                self._evaluation = self._process.start("evaluations", name, t_s, version=version)
            case FinishEvaluation() if self._evaluation is not None:
                self._process.end(self._evaluation, t_s)
                self._evaluation = None
            case SkipEvaluation(version, running_version):
                name = f"evaluation of version {version} skipped: that of {running_version} is running"
                self._process.mark(name, t_s)
            case Resumed(_, kept):
                for version in self._stored.keys() - {version for version, _ in kept}:
                    self._retire(t_s, version, end=CRASHED)
            case _:
                pass

    def close(self, t_s: float, reason: str) -> None:
        self._process.end_all(t_s, end=reason)

    def _retire(self, t_s: float, version: int, **args: object) -> None:
        if (stored := self._stored.pop(version, None)) is not None:
            self._process.end(stored, t_s, **args)


class RunProcess:
    """Counters: open groups by stage, and the staleness, reward and tokens of each step."""

    def __init__(self, emit: Emit, ids: IdCounter) -> None:
        self._process = TraceProcess(emit, ids, "run", rank=0)
        self._versions: dict[GroupId, int] = {}  # of open groups
        self._tokens: dict[GroupId, int] = {}
        self._rewards: dict[GroupId, float] = {}  # means of scored groups
        self._committed: set[GroupId] = set()
        self._trained_tokens = 0
        self._last: dict[tuple[str, str], float] = {}  # (counter, series) -> value emitted last

    def observe(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Admit(group, _, version):
                self._versions[group] = version
            case RequestFinished(_, request, _, num_tokens) if request.group in self._versions:
                group = request.group
                self._tokens[group] = self._tokens.get(group, 0) + num_tokens
            case GroupScored(group, rewards) if group in self._versions:
                self._rewards[group] = statistics.fmean(rewards)
            case Commit(group):
                self._committed.add(group)
            case Filter(group, reason) | Fail(group, reason):
                self._process.mark(f"group {group} {type(record).__name__.lower()}ed: {reason}", t_s)
                self._forget(group)
            case Train(step, groups) if self._versions.keys() >= {*groups}:
                self._count_step(t_s, step, groups)
            case Resumed(from_step):
                self._process.mark(f"RESUMED from step {from_step}", t_s)
            case _:
                return
        self._count_groups(t_s)

    def _count_step(self, t_s: float, step: int, groups: tuple[GroupId, ...]) -> None:
        """Emit the counters of a step. Repeated and redone steps are omitted, because their groups are
        already removed.
        """
        staleness = [step - self._versions[group] for group in groups]
        self._trained_tokens += sum(self._tokens.get(group, 0) for group in groups)
        self._process.count("staleness", "mean of the step", t_s, statistics.fmean(staleness))
        self._process.count("staleness", "maximum of the step", t_s, max(staleness))
        rewards = [self._rewards[group] for group in groups if group in self._rewards]
        if rewards:
            self._process.count("reward", "mean of the step", t_s, statistics.fmean(rewards))
        self._process.count("tokens", "trained", t_s, self._trained_tokens)
        for group in groups:
            self._forget(group)

    def _forget(self, group: GroupId) -> None:
        for table in (self._versions, self._tokens, self._rewards):
            table.pop(group, None)
        self._committed.discard(group)

    def _count_groups(self, t_s: float) -> None:
        """Emit the counters that have changed."""
        values = {
            ("groups", "not scored"): len(self._versions) - len(self._rewards),
            ("groups", "scored, not committed"): len(self._rewards) - len(self._committed),
            ("groups", "in the next batch"): len(self._committed),
            ("versions", "of open groups"): len({*self._versions.values()}),
        }
        for name, value in values.items():
            if self._last.get(name) != value:
                self._process.count(*name, t_s, value)
        self._last |= values
