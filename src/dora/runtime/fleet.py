"""The engine processes of a run: they start, join, fall silent, are lost, and leave.

An engine is a number that is never used twice; another one takes the place of one that is lost. The core
hears of one once it has joined, and of its end once every move it was part of is settled.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dora.core.actions import Migrate
from dora.core.events import EngineJoined, EngineLeft, EngineLost, Event, LoadFailed, Paused
from dora.engine.sequence import Request
from dora.errors import InputError, RunError
from dora.fleets import kind_of
from dora.runtime import messages as m
from dora.runtime.moving import Moves, Word
from dora.runtime.plan import Plan
from dora.runtime.process import Pulse, Told, Worker
from dora.runtime.restarts import Restarts
from dora.runtime.sealed import Address
from dora.runtime.telling import Teller
from dora.runtime.workers import run_engine

MAX_LOAD_FAILURES = 3  # in a row, before an engine is given up


class Fleet:
    """All engines, by number. What they say becomes facts; orders to one that is gone go nowhere."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        told: Told,
        facts: deque[Event],
        teller: Teller,
        notice: Callable[[str], None],
    ) -> None:
        """`folder` holds weights, KV pools and moves; workers speak into `told`."""
        self._plan, self._folder, self._told = plan, folder, told
        self._facts, self._teller, self._notice = facts, teller, notice
        self.workers: dict[int, Worker] = {}
        self.ready: set[int] = set()  # they have started
        self.joined: set[int] = set()  # the core knows them
        self.ends: dict[int, str] = {}  # how engines ended that are here no more
        self.kernels: dict[str, None] = {}  # how the engines compute, each way once
        self.digests: dict[int, str] = {}  # of the published versions
        self.last_loss = ""  # with its traceback
        self._refusal = ""  # what was wrong with what the last one lost was given
        timeout_s = plan.config.runtime.move_timeout_s
        self.moves = Moves(folder, timeout_s, facts, self.send, teller.length)
        self.restarts = Restarts(plan.config.runtime.max_restarts)
        self._pools: dict[int, Path] = {}
        self._doors: dict[int, Address] = {}
        self._started_s: dict[int, float] = {}
        self._places: dict[int, int] = {}  # engine -> the first engine that stood in its place
        self._met: set[int] = set()  # engines that the core was told of
        self._before: dict[int, int] = {}  # engine -> the last one of these that stood in its place
        self._dismissed: set[int] = set()
        self._resting: Counter[int] = Counter()  # engine -> pauses to come that the core did not order
        self._load_failures: Counter[int] = Counter()
        self._untold: dict[int, EngineLost | EngineLeft] = {}  # until their moves are settled
        self._is_open = self._was_ready = False
        for _ in range(plan.num_engines):
            self.start()

    @property
    def staying(self) -> set[int]:
        """The engines that have started and were not sent away."""
        return self.ready - self._dismissed

    def start(self, lost: int | None = None) -> int:
        """Start one more engine, which joins by itself once it is ready; its number.

        It may take the place of one that was `lost`.
        """
        engine = len(self._started_s)
        self._started_s[engine] = time.monotonic()
        self._places[engine] = place = engine if lost is None else self._places[lost]
        before = lost if lost is None or lost in self._met else self._before.get(lost)
        if before is not None:
            self._before[engine] = before
        spec = self._plan.engine_spec(self._folder, engine, place)
        self.workers[engine] = Worker(f"engine {engine}", run_engine, spec, self._told)
        return engine

    def open(self) -> None:
        """The core begins: tell it the engines that are ready, and from now on those that become so."""
        self._is_open = True
        for engine in sorted(self.ready):
            self._join(engine)

    def number_of(self, worker: Worker | None) -> int | None:
        """The engine a worker is; None once it is given up, when nothing it says is heard any more."""
        return next((engine for engine, known in self.workers.items() if known is worker), None)

    def send(self, engine: int, message: object) -> bool:
        """Say something to an engine; False where it is gone."""
        if engine not in self.workers:
            return False
        self.workers[engine].send(message)
        return True

    def move(self, order: Migrate, request: Request) -> None:
        """Have a request change its engine, as it was submitted."""
        if order.source not in self.workers:
            self.moves.refuse(order)
            return
        self.moves.begin(order, request, self._way(order.source, order.destination))

    def _way(self, source: int, destination: int) -> Path | Address | None:
        """Where the destination of a move reads the source's KV; None: it cannot."""
        if destination not in self._pools:
            return None
        is_near = self.workers[source].node == self.workers[destination].node
        return self._pools.get(source) if is_near else self._doors.get(source)

    def announce(self, version: int, digest: str) -> None:
        """A version has been published; engines that load it later bring it near meanwhile."""
        self.digests[version] = digest
        if self._plan.config.weights.load == "deferred":
            for engine in self.ready:
                self.send(engine, m.StageWeights(version))

    def rest(self, engine: int) -> None:
        """Have an engine decode nothing, of which the core is not told."""
        self._resting[engine] += 1
        self.send(engine, m.PauseRows())

    def dismiss(self, engine: int) -> None:
        """Have an engine end."""
        self._dismissed.add(engine)
        self.send(engine, m.Leave())

    def hear(self, engine: int, message: Any) -> None:
        """Turn a message into facts."""
        match message:
            case m.Gone():
                self._end(engine, self.workers[engine].how_it_ended)
            case m.Ready(note, pool, door):
                self.ready.add(engine)
                self._was_ready = True
                self.kernels[note] = None
                if pool is not None:
                    self._pools[engine] = pool
                if door is not None:
                    self._doors[engine] = door
                if self._is_open:
                    self._join(engine)
                    self._notice(f"engine {engine} has joined")
            case m.WeightsLoaded(version, digest) if digest != self.digests[version]:
                self._end(engine, f"its bytes of version {version} are not the published ones")
            case m.LoadRefused(version, reason):
                self._refuse_load(engine, version, reason)
            case m.RowsPaused() if self._resting[engine]:
                self._resting[engine] -= 1
            case m.RowsPaused():
                self._facts.append(Paused(engine))
            case m.Reserved() | m.Received() | m.NotReceived() | m.Sent() | m.Kept():
                self._settle(message)
            case _:
                if isinstance(message, m.WeightsLoaded):
                    self._load_failures.pop(engine, None)
                for fact in self._teller.told(engine, message):
                    self.moves.tell(fact)

    def check_silence(self, asleep_s: float) -> None:
        """Who gave no sign of life for too long is lost, less the time we slept ourselves."""
        runtime = self._plan.config.runtime
        for engine, worker in list(self.workers.items()):
            worker.last_heard_s += asleep_s
            if engine in self.ready and worker.is_silent(runtime.heartbeat_timeout_s):
                limit = f"runtime.heartbeat_timeout_s = {runtime.heartbeat_timeout_s:g}"
                self._end(engine, f"silent for more than {limit}")
            elif self._is_open and engine not in self.ready and time.monotonic() > self._late_s(engine):
                limit = f"runtime.start_timeout_s = {runtime.start_timeout_s:g} s"
                self._end(engine, f"not ready within {limit}{worker.why_late}")
        if self._is_open and not self._untold:
            self._fill_places()

    def pulses(self) -> list[Pulse]:
        """What is known of each engine's process."""
        runtime = self._plan.config.runtime
        limits_s = {True: runtime.heartbeat_timeout_s, False: runtime.start_timeout_s}
        started = [(worker, engine in self.ready) for engine, worker in sorted(self.workers.items())]
        return [Pulse(worker, is_ready, limits_s[is_ready]) for worker, is_ready in started]

    def check_any(self) -> None:
        """Raises RunError if no engine is left, and none is to be started again.

        InputError if none could start, for what the last one was given.
        """
        if not self.workers and not (self._is_open and self.restarts.due_s):
            if self._refusal and not self._was_ready:
                raise InputError(self._refusal)
            raise RunError(f"the last engine is lost: {self.last_loss}")

    def kill(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def _late_s(self, engine: int) -> float:
        return self._started_s[engine] + self._plan.config.runtime.start_timeout_s

    def _join(self, engine: int) -> None:
        kind = kind_of(self._plan.config, self._places[engine])
        self.joined.add(engine)
        self._met.add(engine)
        is_colocated = self._plan.is_colocated(self._places[engine])
        if is_colocated:
            self.rest(engine)
        self._facts.append(
            EngineJoined(engine, kind.max_rows, kind.version_slots, is_colocated, self._before.get(engine))
        )

    def _fill_places(self) -> None:
        """Start engines in the place of lost ones whose time has come; they join like any other."""
        for lost in self.restarts.take(time.monotonic()):
            engine = self.start(lost)
            self._notice(f"engine {engine} starts in the place of engine {lost}")

    def _plan_restart(self, engine: int) -> str:
        """What becomes of the place of a lost engine, in words; where none could ever start, none will."""
        if not self._was_ready:
            return ""
        now_s = time.monotonic()
        lived_s = now_s - self._started_s[engine]
        wait_s = self.restarts.lost(engine, self._places[engine], lived_s, now_s)
        if wait_s is None:
            return f"; its place stays empty (runtime.max_restarts = {self.restarts.most})"
        return f"; another one takes its place in {wait_s:g} s"

    def _refuse_load(self, engine: int, version: int, reason: str) -> None:
        self._load_failures[engine] += 1
        if self._load_failures[engine] < MAX_LOAD_FAILURES:
            self._facts.append(LoadFailed(engine, version, reason))
        else:
            self._end(engine, f"{MAX_LOAD_FAILURES} loads in a row failed, the last one: {reason}")

    def _end(self, engine: int, reason: str) -> None:
        """The engine is gone; if it was not dismissed, it is lost."""
        worker = self.workers.pop(engine)
        worker.kill()
        self.ready.discard(engine)
        self._teller.progress.pop(engine, None)
        if engine in self._dismissed:
            self.ends[engine] = "left"
            self._notice(f"engine {engine} has left")
            self._untold[engine] = EngineLeft(engine)
        else:
            self.ends[engine] = f"lost ({reason})"
            self._refusal = worker.refusal
            self.last_loss = reason if worker.refusal else f"{reason}\n{worker.crash}".rstrip()
            then = self._plan_restart(engine)
            self._notice(f"engine {engine} is lost ({reason}); its requests begin again elsewhere{then}")
            self._untold[engine] = EngineLost(engine, reason)
        self.moves.lost(engine)
        self._tell_ends()

    def _settle(self, word: Word) -> None:
        self.moves.heard(word)
        self._tell_ends()

    def _tell_ends(self) -> None:
        """An engine's end is told after what became of its moves, which may still need its blocks."""
        for engine in [engine for engine in self._untold if not self.moves.is_unsettled(engine)]:
            fact = self._untold.pop(engine)
            if engine in self.joined or not self._is_open:  # an evaluation hears of all engines
                self._facts.append(fact)
            self.joined.discard(engine)
            self._doors.pop(engine, None)
            if engine in self._pools:
                self._pools.pop(engine).unlink(missing_ok=True)
