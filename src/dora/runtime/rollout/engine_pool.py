"""The engines of a run: what they are sent, and the events about them. The supervisor restarts them.

An engine's number is never used twice. A restarted engine gets a new number and the slot of the engine it
replaces, which decides its device and counts its restarts. The orchestrator gets an event when an engine has
joined, and one when it is lost or removed, after the events about its migrations.
"""

from __future__ import annotations

import shutil
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
from dora.core.types import RequestId
from dora.curve import CurveAddress
from dora.engine.messages import MigrationReply
from dora.engine.request import Request
from dora.errors import DoraError, InputError, RunError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import Launcher, Worker
from dora.runtime.rollout.engine_worker import run_engine
from dora.runtime.rollout.migration import Migrations
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook

MAX_LOAD_FAILURES = 3  # in a row, of an engine, which is lost after that
DRAIN_RETRY_S = 10.0  # before the next drain request for an engine on a draining node, after a rejection
REMOVED = "removed"  # how a drained engine ends
NO_PLACE = "no place"  # begins the end of an engine that never started, see `Loss.has_place`


class EnginePool:
    """All engines of a run, by number. Turns their messages into events; drops messages to a lost engine."""

    def __init__(
        self,
        setup: RunSetup,
        folder: Path,
        supervisor: Supervisor,
        events: deque[Event],
        sample_book: SampleBook,
        notice: Callable[[str], None],
    ) -> None:
        """Start the first engines. `folder` has weights, KV pools and the state of migrations."""
        runtime = setup.config.runtime
        self._setup, self._folder, self._supervisor = setup, folder, supervisor
        self._events, self._sample_book, self._notice = events, sample_book, notice
        self._role = Role("engines", heartbeat_timeout_s=runtime.heartbeat_timeout_s)
        # Gets each message of an engine first.
        self.on_engine_message: Callable[[int, Any], Any] = lambda engine, message: message
        self.workers: dict[int, Worker] = {}
        self.ready: set[int] = set()  # have started
        self.joined: set[int] = set()  # are part of the orchestrator's state
        self.end_states: dict[int, str] = {}  # former engine -> REMOVED, "lost (reason)" or "no place (...)"
        self.kernels: dict[str, None] = {}  # distinct descriptions of what the engines compute with, in order
        self.digests: dict[int, str] = {}  # published version -> digest
        self.last_loss = ""  # reason and traceback
        self.migrations = Migrations(folder, runtime.migration_timeout_s, events, self.send)
        self._last_error: DoraError | None = None  # of the engine lost last
        self._kv_pools: dict[int, Path] = {}
        self._kv_addresses: dict[int, CurveAddress | str] = {}
        self._continuing: set[int] = set()  # engines that continue the outputs of lost ones
        self._num_started = 0
        self._slots: dict[int, Slot] = {}  # of all current and former engines
        self._engines: dict[Slot, int] = {}  # the last engine of each slot
        self._ever_joined: set[int] = set()
        self._replaced: dict[int, int] = {}  # engine -> the last engine of its slot that had joined
        self._unreported_pauses: Counter[int] = Counter()  # engine -> replies that give no EnginePaused
        self._unsent: dict[int, list[object]] = {}  # engine -> messages
        self._load_failures: Counter[int] = Counter()  # in a row
        self._pending_ends: dict[int, EngineLost | EngineRemoved] = {}  # until their migrations have ended
        self._is_open = False  # engines join as soon as they are ready
        for _ in range(setup.num_engines):
            self.start()

    # start and join

    def start(self) -> int:
        """Start an engine, which joins later. Returns its number."""
        return self._start(self._supervisor.add(self, self._role, number=self._num_started))

    def _start(self, slot: Slot) -> int:
        engine, lost = self._num_started, self._engines.get(slot)
        self._num_started += 1
        replaced = lost if lost is None or lost in self._ever_joined else self._replaced.get(lost)
        if replaced is not None:
            self._replaced[engine] = replaced
        self._slots[engine], self._engines[slot] = slot, engine
        spec = self._setup.engine_spec(self._folder, engine, slot.number)
        self.workers[engine] = self._supervisor.start(slot, f"engine {engine}", run_engine, spec)
        return engine

    def join_all(self) -> None:
        """Report the engines that are ready to the orchestrator; later ones join once they are ready."""
        self._is_open = True
        for engine in sorted(self.ready):
            self._join(engine)

    def _on_ready(self, engine: int, message: m.WorkerReady) -> None:
        self.ready.add(engine)
        self.kernels[message.note] = None
        if message.pool is not None:
            self._kv_pools[engine] = message.pool
        if message.kv_address is not None:
            self._kv_addresses[engine] = message.kv_address
        if message.continues_outputs:
            self._continuing.add(engine)
        if self._is_open:
            self._join(engine)
            self._notice(f"engine {engine} joined")

    def _join(self, engine: int) -> None:
        slot = self._slots[engine].number
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
    def num_restarting(self) -> int:
        """How many lost engines will be restarted."""
        return sum(slot.restart_at_s is not None for slot in self._engines)

    @property
    def active(self) -> set[int]:
        """The engines that have started and are not being removed."""
        return {engine for engine in self.ready if not self._slots[engine].is_draining}

    def check_not_empty(self) -> None:
        """Raises RunError if no engine is left and none will be restarted.

        Raises InputError if no engine could start because its input is wrong.
        """
        if not self.workers and not (self._is_open and self.num_restarting):
            if isinstance(self._last_error, InputError):
                raise self._last_error
            raise RunError(f"the last engine is lost: {self.last_loss}")

    # messages to engines

    def send(self, engine: int, message: object) -> bool:
        """Queue a message to an engine until `flush`; returns False if the engine is lost."""
        if engine not in self.workers:
            return False
        self._unsent.setdefault(engine, []).append(message)
        return True

    def flush(self) -> None:
        """Send the queued messages, one batch to each engine."""
        unsent, self._unsent = self._unsent, {}
        for engine, messages in unsent.items():
            if engine in self.workers:
                self.workers[engine].send_batch(messages)

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
        if engine in self.workers:
            self.flush()
            self._supervisor.drain(self._slots[engine])

    def migrate(self, action: Migrate, request: Request) -> None:
        """Start a migration; `request` is as it was submitted."""
        if self.workers.keys() >= {action.source, action.destination}:
            self.migrations.start(action, request, self._kv_source(action.source, action.destination))
        else:
            self.migrations.reject(action)

    def continues_outputs(self, engine: int) -> bool:
        """Whether requests on the engine continue outputs of lost engines."""
        return engine in self._continuing

    def is_migrating(self, request: RequestId) -> bool:
        """Whether a migration of the request is in progress."""
        return any(each.action.request == request for each in self.migrations.in_progress.values())

    def _kv_source(self, source: int, destination: int) -> Path | CurveAddress | str | None:
        """Where the destination reads the source's KV; None if it cannot."""
        if destination not in self._kv_pools or self._kv_kind(source) != self._kv_kind(destination):
            return None
        is_same_node = self.workers[source].process.node == self.workers[destination].process.node
        return self._kv_pools.get(source) if is_same_node else self._kv_addresses.get(source)

    def _kv_kind(self, engine: int) -> tuple[object, ...]:
        """What is equal for engines that can use each other's KV. They compare weights and layout."""
        kind = self._setup.config.kind_of_engine(self._slots[engine].number)
        return kind.backend, kind.options.get("kv_connector", "files")

    # messages from engines

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        """Turn an engine's message into events."""
        engine = self._engines[slot]
        message = self.on_engine_message(engine, message)
        match message:
            case m.WorkerReady():
                self._on_ready(engine, message)
            case m.WeightsLoaded(version, digest) if digest != self.digests[version]:
                reason = f"its weights of version {version} differ from the published ones"
                self._supervisor.report_lost(slot, reason)
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
            reason = f"{MAX_LOAD_FAILURES} weight loads in a row failed, the last one: {reason}"
            self._supervisor.report_lost(self._slots[engine], reason)

    # losses and restarts

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """An engine is lost, unless it was being removed."""
        engine = self._engines[slot]
        del self.workers[engine]
        self.ready.discard(engine)
        unfinished = self._sample_book.progress.pop(engine, {})
        if loss.is_drained:
            self._supervisor.remove(slot)
            self.end_states[engine] = REMOVED
            self._notice(f"engine {engine} drained and removed")
            self._pending_ends[engine] = EngineRemoved(engine)
        elif not loss.has_place:
            self._on_no_place(slot, engine, loss)
        else:
            reason = loss.reason.removeprefix(f"{loss.worker.name} sent ")
            self.end_states[engine] = f"lost ({reason})"
            self._last_error = loss.error
            traceback = "" if loss.worker.input_error else loss.worker.traceback
            self.last_loss = f"{reason}\n{traceback}".rstrip()
            short_reason = reason.removeprefix(f"{loss.worker.name} ").removeprefix("was ")
            self._notice(
                f"engine {engine} lost ({short_reason}): its requests continue on other engines"
                f"{self._describe_restart(slot, loss)}"
            )
            kept_tokens = self._sample_book.partial_outputs.lengths(unfinished)
            self._pending_ends[engine] = EngineLost(engine, reason, kept_tokens)
        self.migrations.on_engine_lost(engine)
        self._report_ends()

    def _on_no_place(self, slot: Slot, engine: int, loss: Loss) -> None:
        """An engine never started, and so is not lost. Only a replacement is started again."""
        self.end_states[engine] = loss.reason.removeprefix(f"{loss.worker.name} got ")
        self._last_error, self.last_loss = loss.error, loss.reason
        self._notice(f"{loss.reason}{self._describe_restart(slot, loss)}")
        if not slot.has_been_ready:
            self._supervisor.remove(slot)

    def _describe_restart(self, slot: Slot, loss: Loss) -> str:
        """The end of the log line. If no engine could ever start, none is restarted."""
        if not loss.has_place and not slot.has_been_ready:
            return "; add it again once a node has a place"
        if loss.restart_in_s is not None:
            return f"; restarting in {loss.restart_in_s:g} s"
        if not self.kernels:
            return ""
        return f"; not restarting it: runtime.max_restarts = {slot.backoff.max_restarts} is reached"

    def restart(self, slot: Slot) -> None:
        """Start an engine in place of a lost one, once the orchestrator knows of the loss."""
        if not self._is_open or self._pending_ends:
            slot.restart_at_s = 0.0
            return
        lost = self._engines[slot]
        self._notice(f"starting engine {self._start(slot)} in place of engine {lost}")

    def _report_ends(self) -> None:
        """Report ends of engines without migrations in progress, whose outcome may need their KV blocks."""
        for engine in [engine for engine in self._pending_ends if not self.migrations.is_involved(engine)]:
            event = self._pending_ends.pop(engine)
            if engine in self.joined:
                self._events.append(event)
            self.joined.discard(engine)
            self._kv_addresses.pop(engine, None)
            if engine in self._kv_pools:
                _remove(self._kv_pools.pop(engine))


def _remove(pool: Path) -> None:
    """Remove the file of an engine's KV, or the folder of a server's."""
    if pool.is_dir():
        shutil.rmtree(pool, ignore_errors=True)
    else:
        pool.unlink(missing_ok=True)


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
            node = self._pool.workers[engine].process.node
            if node in self._launcher.draining_nodes and now_s > self._next_request_s.get(engine, 0.0):
                if engine not in self._next_request_s:
                    self._notice(f"node {node[:8]} is draining: removing engine {engine}")
                self._next_request_s[engine] = now_s + DRAIN_RETRY_S
                self._events.append(DrainRequested(engine))
        if self._starting is not None and (end := self._pool.end_states.get(self._starting)):
            self._num_to_add += end.startswith(NO_PLACE)  # its node left before it started
            self._starting = None
        is_starting = self._starting in self._pool.workers and self._starting not in self._pool.joined
        if self._num_to_add and self._launcher.num_free_slots and not is_starting:
            self._num_to_add -= 1
            self._starting = self._pool.start()
            self._notice(f"starting engine {self._starting}: the cluster has a free slot")
