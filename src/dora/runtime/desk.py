"""Answers what a person asks of a run while it goes: list its engines, add one, drain one.

Nothing here waits: a request is taken up when it is seen, and answered when what it asked for
has come about, or cannot.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from dora.core.engines import Engine
from dora.core.events import DrainAsked
from dora.core.state import State
from dora.errors import ServiceError
from dora.runtime.control import Answer, Ask, Control
from dora.runtime.local import LocalHands

MAX_ENGINES = 64  # of a run, at once: each is a process


class Desk:
    """Stands between the control folder and the engines."""

    def __init__(self, control: Control, hands: LocalHands, state: Callable[[], State]) -> None:
        self._control, self._hands, self._state = control, hands, state
        self._adding: dict[str, int] = {}  # request -> the engine that starts
        self._draining: dict[str, int] = {}  # request -> the engine that is to leave

    def look(self) -> None:
        """Take up what was asked since the last look, and answer what is settled."""
        for name, asked in self._control.asked():
            answer = self._take_up(name, asked)
            if answer is not None:
                self._control.answer(name, answer)
        for name, engine in [*self._adding.items()]:
            self._close(name, self._adding, self._how_it_started(engine))
        for name, engine in [*self._draining.items()]:
            self._close(name, self._draining, self._how_it_drained(engine))
        self._hands.refusals.clear()

    def _take_up(self, name: str, asked: Ask) -> Answer | None:
        """The answer, if there is one already."""
        if asked.command == "list":
            return Answer(True, self._list())
        try:
            if asked.command == "add":
                (self._adding[name],) = add_engines(self._hands, 1)
            else:
                self._draining[name] = ask_to_leave(self._hands, asked.engine)
        except ServiceError as error:
            return Answer(False, str(error))
        return None

    def _close(self, name: str, pending: dict[str, int], answer: Answer | None) -> None:
        if answer is not None:
            del pending[name]
            self._control.answer(name, answer)

    def _how_it_started(self, engine: int) -> Answer | None:
        if engine in self._hands.fleet.joined:
            return Answer(True, f"engine {engine} has joined")
        end = self._hands.fleet.ends.get(engine)
        return Answer(False, f"engine {engine} did not start: it is {end}") if end else None

    def _how_it_drained(self, engine: int) -> Answer | None:
        refusal, end = self._hands.refusals.get(engine), self._hands.fleet.ends.get(engine)
        if refusal is not None:
            return Answer(False, f"engine {engine} stays: {refusal}")
        if end is None:
            return None
        return Answer(end == "left", f"engine {engine} {'has left' if end == 'left' else f'is {end}'}")

    def _list(self) -> str:
        engines = self._state().engines
        lines = [f"engine {engine.id}: {_described(engine)}" for _, engine in sorted(engines.items())]
        starting = sorted(self._hands.fleet.workers.keys() - self._hands.fleet.joined)
        return "\n".join([*lines, *(f"engine {engine}: starting" for engine in starting)])


def add_engines(hands: LocalHands, count: int) -> list[int]:
    """Start engines, which join once they are ready; their numbers. Raises ServiceError without room."""
    if len(hands.fleet.workers) + count > MAX_ENGINES:
        raise ServiceError(409, f"a run has at most {MAX_ENGINES} engines at once; drain others first")
    free, needed = shutil.disk_usage(hands.weights.folder).free, count * hands.plan.pool_bytes
    if free < needed:
        many = "one more engine: it needs" if count == 1 else f"{count} more engines: they need"
        sizes = f"{needed / 1e6:.0f} MB for KV, {free / 1e6:.0f} MB are free"
        raise ServiceError(409, f"no room for {many} {sizes}")
    return [hands.fleet.start() for _ in range(count)]


def ask_to_leave(hands: LocalHands, engine: int | None) -> int:
    """Have the orchestrator asked to let an engine go. Raises ServiceError for one that is not there."""
    joined = hands.fleet.joined
    if engine is None or engine not in joined:
        known = ", ".join(map(str, sorted(joined)))
        raise ServiceError(404, f"the run has no engine {engine} that could leave; it has {known}")
    hands.facts.append(DrainAsked(engine))  # to ask twice changes nothing
    return engine


def _described(engine: Engine) -> str:
    versions = " ".join(f"v{version}" for version in sorted(engine.held)) or "no version"
    words = f"{engine.rows - engine.free_rows} of {engine.rows} rows, {versions}"
    words += ", shares the trainer's device" if engine.is_colocated else ""
    return words + (", leaving" if engine.is_leaving else "")
