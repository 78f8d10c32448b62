"""Manage the engine processes of a run: start, join, drain, restart, detect crashes and timeouts.

An engine's number is never used twice. A restarted engine gets a new number and the slot of the engine it
replaces, which decides its device and counts its restarts. The orchestrator gets an event when an engine has
joined, and one when it is lost or removed, after the events about its migrations.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dora.core.actions import Migrate
from dora.core.events import (
    DrainRequested,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineRemoved,
    Event,
    LoadFailed,
)
from dora.curve import CurveAddress
from dora.engine.messages import MigrationReply
from dora.engine.request import Request
from dora.errors import InputError, RunError
from dora.runtime.process import messages as m
from dora.runtime.process.launcher import Launcher
from dora.runtime.process.worker_process import RestartPolicy, Worker, WorkerMessages, WorkerState
from dora.runtime.rollout.engine_worker import run_engine
from dora.runtime.rollout.migration import Migrations
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook

MAX_LOAD_FAILURES = 3  # in a row, of an engine, which is lost after that
DRAIN_RETRY_S = 10.0  # before the next drain request for an engine on a draining node, after a rejection
REMOVED = "removed"  # how a drained engine ends


class EnginePool:
    """All engines of a run, by number. Turns their messages into events; drops messages to a lost engine."""

    def __init__(
        self,
        setup: RunSetup,
        folder: Path,
        messages: WorkerMessages,
        events: deque[Event],
        sample_book: SampleBook,
        notice: Callable[[str], None],
    ) -> None:
        """Start the first engines. `folder` has weights, KV pools and the files of migrations."""
        runtime = setup.config.runtime
        self._setup, self._folder, self._messages = setup, folder, messages
        self._events, self._sample_book, self._notice = events, sample_book, notice
        self.workers: dict[int, Worker] = {}
        self.ready: set[int] = set()  # have started
        self.joined: set[int] = set()  # are part of the orchestrator's state
        self.end_states: dict[int, str] = {}  # former engine -> REMOVED or "lost (reason)"
        self.kernels: dict[str, None] = {}  # distinct descriptions of what the engines compute with, in order
        self.digests: dict[int, str] = {}  # published version -> digest
        self.last_loss = ""  # reason and traceback
        self.migrations = Migrations(folder, runtime.migration_timeout_s, events, self.send)
        self.restarts = RestartPolicy(runtime.max_restarts)
        self._input_error = ""  # of the engine lost last, if that is why it exited
        self._kv_pools: dict[int, Path] = {}
        self._kv_addresses: dict[int, CurveAddress] = {}
        self._start_times_s: dict[int, float] = {}  # of all current and former engines
        self._slots: dict[int, int] = {}  # engine -> the first engine of its slot
        self._ever_joined: set[int] = set()
        self._replaced: dict[int, int] = {}  # engine -> the last engine of its slot that had joined
        self._removing: set[int] = set()
        self._unreported_pauses: Counter[int] = Counter()  # engine -> replies that are no EnginePaused
        self._load_failures: Counter[int] = Counter()  # in a row
        self._pending_ends: dict[int, EngineLost | EngineRemoved] = {}  # until their migrations have ended
        self._is_open = False  # engines join as soon as they are ready
        self._was_any_ready = False
        for _ in range(setup.num_engines):
            self.start()

    # start and join

    def start(self, lost: int | None = None) -> int:
        """Start an engine, in the slot of a `lost` one if given; it joins later. Returns its number."""
        engine = len(self._start_times_s)
        self._start_times_s[engine] = time.monotonic()
        self._slots[engine] = slot = engine if lost is None else self._slots[lost]
        replaced = lost if lost is None or lost in self._ever_joined else self._replaced.get(lost)
        if replaced is not None:
            self._replaced[engine] = replaced
        spec = self._setup.engine_spec(self._folder, engine, slot)
        self.workers[engine] = Worker(f"engine {engine}", run_engine, spec, self._messages)
        return engine

    def join_all(self) -> None:
        """Report the engines that are ready to the orchestrator; later ones join once they are ready."""
        self._is_open = True
        for engine in sorted(self.ready):
            self._join(engine)

    def _on_ready(self, engine: int, message: m.WorkerReady) -> None:
        self.ready.add(engine)
        self._was_any_ready = True
        self.kernels[message.note] = None
        if message.pool is not None:
            self._kv_pools[engine] = message.pool
        if message.kv_address is not None:
            self._kv_addresses[engine] = message.kv_address
        if self._is_open:
            self._join(engine)
            self._notice(f"engine {engine} joined")

    def _join(self, engine: int) -> None:
        slot = self._slots[engine]
        kind, is_colocated = self._setup.config.kind_of_engine(slot), self._setup.is_colocated(slot)
        self.joined.add(engine)
        self._ever_joined.add(engine)
        if is_colocated:  # for the orchestrator it is paused from the start
            self.pause_unreported(engine)
        replaced = self._replaced.get(engine)
        self._events.append(
            EngineJoined(engine, kind.max_num_seqs, kind.version_slots, is_colocated, replaced)
        )

    # state

    @property
    def active(self) -> set[int]:
        """The engines that have started and are not being removed."""
        return self.ready - self._removing

    def engine_of(self, worker: Worker | None) -> int | None:
        """The number of an engine's worker; None for other workers and lost engines."""
        return next((engine for engine, known in self.workers.items() if known is worker), None)

    def worker_states(self) -> list[WorkerState]:
        """The state of each engine's process."""
        runtime = self._setup.config.runtime
        timeouts_s = {True: runtime.heartbeat_timeout_s, False: runtime.start_timeout_s}
        started = [(worker, engine in self.ready) for engine, worker in sorted(self.workers.items())]
        return [WorkerState(worker, is_ready, timeouts_s[is_ready]) for worker, is_ready in started]

    def check_not_empty(self) -> None:
        """Raises RunError if no engine is left and none will be restarted.

        Raises InputError if no engine could start because its input is wrong.
        """
        if not self.workers and not (self._is_open and self.restarts.due_s):
            if self._input_error and not self._was_any_ready:
                raise InputError(self._input_error)
            raise RunError(f"the last engine is lost: {self.last_loss}")

    # messages to engines

    def send(self, engine: int, message: object) -> bool:
        """Send a message to an engine; returns False if it is lost."""
        if engine not in self.workers:
            return False
        self.workers[engine].send(message)
        return True

    def on_published(self, version: int, digest: str) -> None:
        """Let engines with deferred loads prefetch a version that is now in the store."""
        self.digests[version] = digest
        if self._setup.config.weights.load == "deferred":
            for engine in self.ready:
                self.send(engine, m.PrefetchWeights(version))

    def pause_unreported(self, engine: int) -> None:
        """Pause an engine's decoding without an event for the orchestrator."""
        self._unreported_pauses[engine] += 1
        self.send(engine, m.PauseDecoding())

    def remove(self, engine: int) -> None:
        """Shut a drained engine down."""
        self._removing.add(engine)
        self.send(engine, m.Shutdown())

    def migrate(self, action: Migrate, request: Request) -> None:
        """Start a migration; `request` is as it was submitted."""
        if action.source in self.workers:
            self.migrations.start(action, request, self._kv_source(action.source, action.destination))
        else:
            self.migrations.reject(action)

    def _kv_source(self, source: int, destination: int) -> Path | CurveAddress | None:
        """Where the destination reads the source's KV; None if it cannot."""
        if destination not in self._kv_pools:
            return None
        is_same_node = self.workers[source].node == self.workers[destination].node
        return self._kv_pools.get(source) if is_same_node else self._kv_addresses.get(source)

    # messages from engines

    def on_message(self, engine: int, message: Any) -> None:
        """Turn an engine's message into events."""
        match message:
            case m.WorkerReady():
                self._on_ready(engine, message)
            case m.WorkerExited():
                self._end(engine, self.workers[engine].exit_reason)
            case m.WeightsLoaded(version, digest) if digest != self.digests[version]:
                self._end(engine, f"its weights of version {version} differ from the published ones")
            case m.LoadRejected(version, reason):
                self._on_load_rejected(engine, version, reason)
            case m.DecodingPaused() if self._unreported_pauses[engine]:
                self._unreported_pauses[engine] -= 1
            case m.DecodingPaused():
                self._events.append(EnginePaused(engine))
            case _ if isinstance(message, MigrationReply):
                self.migrations.on_reply(message)
                self._report_ends()
            case _:
                if isinstance(message, m.WeightsLoaded):
                    self._load_failures.pop(engine, None)
                for event in self._sample_book.events_from(engine, message):
                    self.migrations.report(event)

    def _on_load_rejected(self, engine: int, version: int, reason: str) -> None:
        self._load_failures[engine] += 1
        if self._load_failures[engine] < MAX_LOAD_FAILURES:
            self._events.append(LoadFailed(engine, version, reason))
        else:
            self._end(engine, f"{MAX_LOAD_FAILURES} weight loads in a row failed, the last one: {reason}")

    # deadlines, losses and restarts

    def check_deadlines(self, asleep_s: float) -> None:
        """Replace engines that have timed out; `asleep_s`, when the driver was suspended, does not count."""
        runtime = self._setup.config.runtime
        for engine, worker in list(self.workers.items()):
            worker.last_message_s += asleep_s
            if engine in self.ready and worker.has_timed_out(runtime.heartbeat_timeout_s):
                limit = f"runtime.heartbeat_timeout_s = {runtime.heartbeat_timeout_s:g} s"
                self._end(engine, f"no heartbeat for more than {limit}")
            elif self._is_open and engine not in self.ready and self._is_overdue(engine):
                limit = f"runtime.start_timeout_s = {runtime.start_timeout_s:g} s"
                self._end(engine, f"not ready within {limit}{worker.start_delay_reason}")
        if self._is_open and not self._pending_ends:
            for lost in self.restarts.pop_due(time.monotonic()):
                self._notice(f"starting engine {self.start(lost)} in place of engine {lost}")

    def kill(self) -> None:
        """Kill all engines."""
        for worker in self.workers.values():
            worker.kill()

    def _is_overdue(self, engine: int) -> bool:
        return time.monotonic() > self._start_times_s[engine] + self._setup.config.runtime.start_timeout_s

    def _end(self, engine: int, reason: str) -> None:
        """Handle the exit or timeout of an engine's process: the engine is lost, unless it was being
        removed.
        """
        worker = self.workers.pop(engine)
        worker.kill()
        self.ready.discard(engine)
        self._sample_book.progress.pop(engine, None)
        if engine in self._removing:
            self.end_states[engine] = REMOVED
            self._notice(f"engine {engine} drained and removed")
            self._pending_ends[engine] = EngineRemoved(engine)
        else:
            self.end_states[engine] = f"lost ({reason})"
            self._input_error = worker.input_error
            self.last_loss = reason if worker.input_error else f"{reason}\n{worker.traceback}".rstrip()
            short_reason = reason.removeprefix(f"{worker.name} ").removeprefix("was ")
            restart = self._schedule_restart(engine)
            self._notice(
                f"engine {engine} lost ({short_reason}): its requests restart on other engines{restart}"
            )
            self._pending_ends[engine] = EngineLost(engine, reason)
        self.migrations.on_engine_lost(engine)
        self._report_ends()

    def _schedule_restart(self, engine: int) -> str:
        """Returns the end of the log line. If no engine could ever start, none is restarted."""
        if not self._was_any_ready:
            return ""
        now_s = time.monotonic()
        uptime_s = now_s - self._start_times_s[engine]
        delay_s = self.restarts.on_lost(engine, self._slots[engine], uptime_s, now_s)
        if delay_s is None:
            return f"; not restarting it: runtime.max_restarts = {self.restarts.max_restarts} is reached"
        return f"; restarting in {delay_s:g} s"

    def _report_ends(self) -> None:
        """Report ends of engines without migrations in progress, whose outcome may need their KV blocks."""
        for engine in [engine for engine in self._pending_ends if not self.migrations.is_involved(engine)]:
            event = self._pending_ends.pop(engine)
            if engine in self.joined or not self._is_open:  # the evaluation before training uses all engines
                self._events.append(event)
            self.joined.discard(engine)
            self._kv_addresses.pop(engine, None)
            if engine in self._kv_pools:
                self._kv_pools.pop(engine).unlink(missing_ok=True)


class ElasticEngines:
    """Adapts the engine pool to the nodes of a Ray cluster.

    Engines on draining nodes are drained, so their requests migrate with their KV. Engines are added one by
    one while the cluster has a free slot, up to `ray.max_engines`.
    """

    def __init__(
        self,
        setup: RunSetup,
        launcher: Launcher,
        engine_pool: EnginePool,
        events: deque[Event],
        notice: Callable[[str], None],
    ) -> None:
        self._launcher, self._pool, self._events, self._notice = launcher, engine_pool, events, notice
        max_engines = setup.config.ray.max_engines
        self._num_to_add = 0 if max_engines is None else max_engines - setup.config.num_engines
        self._next_request_s: dict[int, float] = {}  # engine that must leave its node -> next drain request
        self._starting: int | None = None  # the engine added last

    def scale(self) -> None:
        """Request drains of engines on draining nodes, and start an engine if a slot is free."""
        now_s = time.monotonic()
        for engine in [engine for engine in self._next_request_s if engine not in self._pool.workers]:
            del self._next_request_s[engine]
            self._num_to_add += self._pool.end_states[engine] == REMOVED  # lost ones are restarted anyway
        for engine in sorted(self._pool.joined & self._pool.active):
            node = self._pool.workers[engine].node
            if node in self._launcher.draining_nodes and now_s > self._next_request_s.get(engine, 0.0):
                if engine not in self._next_request_s:
                    self._notice(f"node {node[:8]} is draining: removing engine {engine}")
                self._next_request_s[engine] = now_s + DRAIN_RETRY_S
                self._events.append(DrainRequested(engine))
        is_starting = self._starting in self._pool.workers and self._starting not in self._pool.joined
        if self._num_to_add and self._launcher.num_free_slots and not is_starting:
            self._num_to_add -= 1
            self._starting = self._pool.start()
            self._notice(f"starting engine {self._starting}: the cluster has a free slot")
