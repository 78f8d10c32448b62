"""Requests about the engines of a run, the same for `dora engines` and for the service.

A request is a function of a context, as `RequestQueue.submit` takes it: it returns None while it is in
progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from dora.core.state import State
from dora.errors import ServiceError


class EngineControl(Protocol):
    """What the driver can do with engines on request; the executor implements it."""

    def add_engines(self, count: int) -> list[int]:
        """Start engines; returns their numbers. Raises ServiceError without room for them."""

    def drain_engine(self, engine: int) -> None:
        """Ask the orchestrator to drain an engine that has joined."""

    @property
    def drain_rejections(self) -> Mapping[int, str]:
        """Why the orchestrator has refused the last request to drain an engine."""

    @property
    def engine_ends(self) -> Mapping[int, str | None]:
        """How each ended, in order: "removed", "lost (reason)" or "no place (...)"; None: it has not."""

    @property
    def joined_engines(self) -> Set[int]: ...


class EngineContext(Protocol):
    """What these requests read or change of a run."""

    @property
    def engines(self) -> EngineControl: ...

    @property
    def state(self) -> Callable[[], State]: ...

    @property
    def is_paused(self) -> bool: ...

    def check_training(self) -> None:
        """Raises ServiceError while the run starts, saves or ends."""


@dataclass(frozen=True)
class EngineStatus:
    """One engine; `end` is how it ended, see `EngineControl.engine_ends`."""

    engine: int
    state: Literal["starting", "running", "paused", "draining", "ended"]
    num_rows: int = 0
    num_rows_used: int = 0
    versions: tuple[int, ...] = ()
    loading: int | None = None
    is_colocated: bool = False  # shares the trainer's device
    end: str | None = None


EngineRequest = Callable[[EngineContext], EngineStatus | None]


def list_engines(context: EngineContext) -> list[EngineStatus]:
    """All current and former engines."""
    return [get_engine(context, engine) for engine in context.engines.engine_ends]


def get_engine(context: EngineContext, engine: int) -> EngineStatus:
    """One engine. Raises ServiceError if the run never had it."""
    ends, record = context.engines.engine_ends, context.state().engines.get(engine)
    if engine not in ends:
        raise ServiceError(404, f"the run has no engine {engine}; {_known_engines(context)}")
    if (end := ends[engine]) is not None:
        return EngineStatus(engine, "ended", end=end)
    if record is None:
        return EngineStatus(engine, "starting")
    is_paused = record.is_pausing or record.is_paused or context.is_paused
    return EngineStatus(
        engine,
        "draining" if record.is_draining else "paused" if is_paused else "running",
        num_rows=record.num_rows,
        num_rows_used=record.num_rows - record.free_rows,
        versions=tuple(sorted(record.loaded)),
        loading=record.loading,
        is_colocated=record.is_colocated,
    )


def _known_engines(context: EngineContext) -> str:
    joined = ", ".join(map(str, sorted(context.engines.joined_engines)))
    found = f"it has {joined}" if joined else "none has joined yet"
    return f"{found} (see dora engines list or GET /v1/engines)"


def add_engines(context: EngineContext, count: int) -> list[EngineStatus]:
    """Start engines, which join once they are ready. Raises ServiceError."""
    context.check_training()
    return [EngineStatus(engine, "starting") for engine in context.engines.add_engines(count)]


def add_engine() -> EngineRequest:
    """A request to start an engine; its result comes once the engine has joined or failed."""
    started: list[EngineStatus] = []

    def request(context: EngineContext) -> EngineStatus | None:
        if not started:
            started.extend(add_engines(context, 1))
        found = get_engine(context, started[0].engine)
        # While the run is paused, an engine joins before the orchestrator's state contains it.
        has_joined = found.engine in context.engines.joined_engines
        return found if has_joined or found.state == "ended" else None

    return request


def drain_engine(engine: int, *, waits_for_end: bool) -> EngineRequest:
    """A request to remove an engine once its requests have migrated or finished.

    Its result comes once the engine drains, or with `waits_for_end` once it has ended. The request raises
    ServiceError if the run has no such engine or cannot do without it.
    """
    is_requested = False

    def request(context: EngineContext) -> EngineStatus | None:
        nonlocal is_requested
        if not is_requested:
            found = get_engine(context, engine)  # an unknown engine is 404, whatever the run is doing
            context.check_training()
            if engine not in context.engines.joined_engines:
                if found.state == "starting":
                    raise ServiceError(409, f"engine {engine} is starting; wait until it has joined")
                known = _known_engines(context)
                raise ServiceError(404, f"the run has no engine {engine} to drain; {known}")
            context.engines.drain_engine(engine)
            is_requested = True
        if (reason := context.engines.drain_rejections.get(engine)) is not None:
            raise ServiceError(409, f"engine {engine} cannot be drained: {reason}; add another one first")
        found = get_engine(context, engine)
        return found if found.state in ("draining", "ended")[waits_for_end:] else None

    return request
