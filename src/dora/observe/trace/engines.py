"""The engines' part of the drawing: requests and versions where they are, loads, moves, losses.

A request is a slice on each engine that it has been on. Its name begins with its version and a letter,
as in `v12m 0/311/2`: Perfetto gives names that differ in digits alone one colour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from string import ascii_lowercase

from dora.core.actions import Action, Drop, Generate, Load, Migrate, Pause, RefuseDrain, Resume, Rush, Skip
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Paused,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
)
from dora.core.records import RequestId
from dora.observe.trace.drawing import Emit, Ids, Process, Slice, arrow

FIRST_RANK = 100  # engines come below the processes of which there is one


def version_name(version: int) -> str:
    """`v12m`: versions that follow each other have different letters, and so different colours."""
    return f"v{version}{ascii_lowercase[version % len(ascii_lowercase)]}"


@dataclass
class _Engine:
    process: Process
    requests: dict[RequestId, Slice] = field(default_factory=dict)
    held: dict[int, Slice] = field(default_factory=dict)  # version -> slice
    loading: dict[int, Slice] = field(default_factory=dict)
    rush: Slice | None = None
    pause: Slice | None = None


class Engines:
    """Reads facts and orders in order, and draws what they mean for engines."""

    def __init__(self, emit: Emit, ids: Ids, breaks_c1: bool) -> None:
        """`breaks_c1`: what runs on an engine goes on with the version that it takes."""
        self._emit, self._ids, self._breaks_c1 = emit, ids, breaks_c1
        self._engines: dict[int, _Engine] = {}  # also those that are gone: a number may come back
        self._moves: dict[RequestId, tuple[float, Slice]] = {}  # under way: since when, and the slice
        self.num_moves = 0

    def read(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Generate(engine, version, requests):
                for request in requests:
                    self._place(t_s, engine, version, request)
            case RequestFinished(engine, request, _, num_tokens, chunks, reason):
                segments = [[chunk.version, chunk.num_tokens] for chunk in chunks]
                mixed = {"segments": segments} if len({version for version, _ in segments}) > 1 else {}
                self._leave(t_s, engine, request, tokens=num_tokens, end=reason, **mixed)
            case RequestFailed(engine, request, reason):
                self._leave(t_s, engine, request, end=f"refused: {reason}")
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._leave(t_s, engine, request, end="given up")
            case Migrate() | Migrated() | MigrationFailed():
                self._move(t_s, record)
            case Progressed(engine, _, row_tokens_per_s, kv_share):
                process = self._engine(engine).process
                process.count("tokens/s", "of a row", t_s, row_tokens_per_s)
                process.count("KV", "in use (%)", t_s, round(100 * kv_share, 2))
            case Load() | Loaded() | LoadFailed() | Drop() | Skip():
                self._hold(t_s, record)
            case _:
                self._stand(t_s, record)

    def close(self, t_s: float, why: str) -> None:
        """All that goes on ends here, for a reason."""
        for engine in self._engines:
            self._end(t_s, engine, why)

    def _engine(self, number: int) -> _Engine:
        if number not in self._engines:
            process = Process(self._emit, self._ids, f"engine {number}", FIRST_RANK + number)
            self._engines[number] = _Engine(process)
        return self._engines[number]

    def _place(self, t_s: float, number: int, version: int, request: RequestId) -> Slice:
        engine = self._engine(number)
        begun = engine.process.begin(
            "requests", f"{version_name(version)} {request}", t_s, request=str(request), version=version
        )
        engine.requests[request] = begun
        engine.process.count("requests", "running", t_s, len(engine.requests))
        return begun

    def _leave(self, t_s: float, number: int, request: RequestId, **args: object) -> None:
        engine = self._engine(number)
        begun = engine.requests.pop(request, None)
        if begun is None:
            return  # it was lost with the engine, or is told of twice
        engine.process.end(begun, t_s, **args)
        engine.process.count("requests", "running", t_s, len(engine.requests))

    def _move(self, t_s: float, record: Migrate | Migrated | MigrationFailed) -> None:
        engine, request = self._engine(record.source), record.request
        if isinstance(record, Migrate):
            name = f"to engine {record.destination}: {request}"
            begun = engine.process.begin("moves", name, t_s, request=str(request), reason=record.reason)
            self._moves[request] = (t_s, begun)
            return
        since_s, moving = self._moves.pop(request, (t_s, None))
        if isinstance(record, MigrationFailed):
            if moving is not None:
                engine.process.end(moving, t_s, end=f"failed: {record.reason}")
            return
        cost = {
            "tokens": record.num_tokens,
            "kv_bytes": record.num_bytes,
            "copy_ms": 1e3 * record.copy_s,
            "stop_ms": 1e3 * record.stop_s,
            "prefilled_tokens": record.num_prefilled,
        }
        if moving is not None:
            engine.process.end(moving, t_s, **cost)
        source = engine.requests.get(request)
        if source is not None:
            self._leave(t_s, record.source, request, end=f"moved to engine {record.destination}")
            target = self._place(t_s, record.destination, source.args["version"], request)
            arrow(self._emit, self._ids, "move", source, since_s, target)
            self.num_moves += 1

    def _hold(self, t_s: float, record: Load | Loaded | LoadFailed | Drop | Skip) -> None:
        engine, version = self._engine(record.engine), record.version
        process, loading = engine.process, engine.loading.pop(version, None)
        match record:
            case Load():
                engine.loading[version] = process.begin("loads", f"load {version_name(version)}", t_s)
            case Loaded():
                if loading is not None:
                    process.end(loading, t_s, digest=record.digest, stop_ms=1e3 * record.stop_s)
                engine.held[version] = process.begin("versions", version_name(version), t_s, version=version)
                if self._breaks_c1:
                    self._renew(t_s, record.engine, version)
            case LoadFailed():
                if loading is not None:
                    process.end(loading, t_s, end=f"failed: {record.reason}")
            case Drop():
                if (held := engine.held.pop(version, None)) is not None:
                    process.end(held, t_s)
            case Skip():
                process.mark(f"goes without v{version}", t_s)

    def _renew(self, t_s: float, number: int, version: int) -> None:
        for request, begun in [*self._engine(number).requests.items()]:
            if begun.args["version"] < version and not request.is_held_out:
                self._leave(t_s, number, request, end=f"goes on with version {version}")
                self._place(t_s, number, version, request)

    def _stand(self, t_s: float, record: Event | Action) -> None:
        """Coming, going, and standing still."""
        match record:
            case EngineJoined(engine, rows, slots, _, replaces):
                name = "joins" if replaces is None else f"joins in the place of engine {replaces}"
                self._engine(engine).process.mark(name, t_s, rows=rows, slots=slots)
            case EngineLost(engine, reason):
                self._engine(engine).process.mark(f"LOST: {reason}", t_s)
                self._end(t_s, engine, f"lost with its engine: {reason}")
            case EngineLeft(engine):
                self._end(t_s, engine, "its engine has left")
                self._engine(engine).process.mark("has left", t_s)
            case DrainAsked(engine):
                self._engine(engine).process.mark("is asked to leave", t_s)
            case RefuseDrain(engine, reason):
                self._engine(engine).process.mark(f"stays: {reason}", t_s)
            case Rush(engine, requests):
                self._rush(t_s, self._engine(engine), requests)
            case Pause(engine):
                self._pause(t_s, self._engine(engine), "gives way to the trainer")
            case Paused(engine):
                self._pause(t_s, self._engine(engine), "paused for the trainer")
            case Resume(engine):
                self._pause(t_s, self._engine(engine), None)
            case Resumed():
                self.close(t_s, "all processes had died; the run was resumed")
            case _:
                pass

    def _rush(self, t_s: float, engine: _Engine, requests: tuple[RequestId, ...]) -> None:
        if engine.rush is not None:
            engine.process.end(engine.rush, t_s)
        names = [str(request) for request in requests]
        name = f"only what the trainer waits for: {', '.join(names)}"
        engine.rush = engine.process.begin("pace", name, t_s, requests=names) if names else None

    def _pause(self, t_s: float, engine: _Engine, name: str | None) -> None:
        if engine.pause is not None:
            engine.process.end(engine.pause, t_s)
        engine.pause = None if name is None else engine.process.begin("pace", name, t_s)

    def _end(self, t_s: float, number: int, why: str) -> None:
        """Nothing goes on there any more."""
        engine = self._engines.get(number)
        if engine is None:
            return
        engine.process.end_all(t_s, end=why)
        engine.process.count("requests", "running", t_s, 0)
        self._moves = {r: move for r, move in self._moves.items() if move[1].process is not engine.process}
        self._engines[number] = _Engine(engine.process)
