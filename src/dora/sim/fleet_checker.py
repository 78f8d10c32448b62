"""The part of the checker that follows engines, by events and actions alone.

It checks that rows and slots are never exceeded, that no response is generated again unless its engine was
lost, and that engines on the trainer's device are idle during a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dora.audit.versions import VersionAudit
from dora.core import actions, events
from dora.core.types import RequestId
from dora.sim.ground_truth import GroundTruth, Violation, require


@dataclass(slots=True)
class CheckedEngine:
    """The state of one engine, derived from events and actions alone."""

    id: int
    num_rows: int
    num_queued: int  # requests that it may have beyond its rows
    num_slots: int
    is_colocated: bool
    held: set[int]  # the audit's
    loading: int | None = None
    running: dict[RequestId, int] = field(default_factory=dict)  # -> version
    incoming: dict[RequestId, int] = field(default_factory=dict)  # by migrations -> version
    is_paused: bool = False
    is_pausing: bool = False
    num_own_loads: int = 0
    dropped_at: dict[int, int] = field(default_factory=dict)  # version -> others' changes at its last drop
    is_draining: bool = False
    is_removed: bool = False

    @property
    def num_used_rows(self) -> int:
        return len(self.running) + len(self.incoming)

    @property
    def needed_versions(self) -> set[int]:
        """Of running and incoming requests."""
        return {*self.running.values(), *self.incoming.values()}

    @property
    def has_places(self) -> bool:
        return self.num_used_rows < self.num_rows + self.num_queued


class FleetChecker:
    """Rows, slots and states of all engines.

    The audit follows each record first; it checks which engine owns a request and holds a version.
    """

    def __init__(self, versions: VersionAudit, num_queued: int) -> None:
        """`num_queued` as in `Limits`."""
        self.versions, self._num_queued = versions, num_queued
        self.engines: dict[int, CheckedEngine] = {}
        self.aborting: set[RequestId] = set()
        self.started: set[RequestId] = set()  # and not lost with their engine since
        self._num_tokens: dict[RequestId, int] = {}  # as last reported
        self._num_changes = 0  # events, except progress reports and timers
        self._aborted_too_late: set[RequestId] = set()  # migrated; their new engine must abort them

    def num_holders(self, version: int) -> int:
        """Engines that hold the version."""
        return sum(version in engine.held for engine in self.engines.values())

    # Events

    def before_event(self, event: events.Event) -> None:
        """Check that the actions after the previous event were complete."""
        if type(event) not in (events.ProgressReported, events.TimerFired):
            self._num_changes += 1
        if self._aborted_too_late:
            raise Violation(
                f"{[*self._aborted_too_late]} migrated during their abort and are not aborted again"
            )

    def on_joined(self, event: events.EngineJoined) -> None:
        is_paused = event.is_colocated  # until the trainer leaves the device to it
        self.engines[event.engine] = CheckedEngine(
            event.engine,
            event.max_num_seqs,
            self._num_queued,
            event.version_slots,
            event.is_colocated,
            self.versions.held[event.engine],
            is_paused=is_paused,
        )

    def on_lost(self, event: events.EngineLost) -> None:
        engine = self.engines.pop(event.engine)
        self.started -= engine.running.keys()
        self.aborting -= engine.running.keys()
        for request in engine.running:
            self._num_tokens.pop(request, None)

    def on_removed(self, event: events.EngineRemoved) -> None:
        engine = self.engines.pop(event.engine)
        require(engine.is_removed, f"engine {engine.id} left without RemoveEngine")

    def on_run_crashed(self) -> None:
        """Every process has crashed."""
        self.engines.clear()
        self._num_tokens.clear()
        for ids in (self.aborting, self.started, self._aborted_too_late):
            ids.clear()

    def on_loaded(self, event: events.Loaded) -> None:
        engine = self.engines[event.engine]
        is_expected = engine.loading == event.version
        require(is_expected, f"engine {engine.id} loaded version {event.version} instead of {engine.loading}")
        engine.loading = None
        engine.num_own_loads += 1

    def on_load_failed(self, event: events.LoadFailed) -> None:
        self.engines[event.engine].loading = None

    def set_draining(self, engine: int, is_draining: bool) -> None:
        self.engines[engine].is_draining = is_draining

    def on_paused(self, engine_id: int) -> None:
        engine = self.engines[engine_id]
        engine.is_pausing, engine.is_paused = False, True

    def on_progress(self, event: events.ProgressReported) -> None:
        running = self.engines[event.engine].running
        self._num_tokens.update((request, num) for request, num in event.lengths if request in running)

    def release(self, engine_id: int, request: RequestId) -> None:
        """Free the row of a request that has finished, failed or was aborted."""
        del self.engines[engine_id].running[request]
        self.aborting.discard(request)
        self._num_tokens.pop(request, None)

    def on_migrated(self, event: events.Migrated) -> None:
        request, num_tokens = event.request, self._num_tokens.get(event.request, 0)
        is_whole = event.num_tokens >= num_tokens
        require(is_whole, f"{request} migrated with {event.num_tokens} of its {num_tokens} tokens")
        self.free_reserved_row(event)
        source, destination = self.engines[event.source], self.engines[event.destination]
        destination.running[request] = source.running.pop(request)
        if request in self.aborting:
            self._aborted_too_late.add(request)

    def free_reserved_row(self, event: events.Migrated | events.MigrationFailed) -> None:
        """The migration has ended."""
        del self.engines[event.destination].incoming[event.request]

    # Actions

    def generate(self, action: actions.Generate) -> None:
        engine = self._receiving(action.engine)
        for request in action.requests:
            if request in self.started:
                raise Violation(f"{request} is generated again, and its engine was not lost")
            self.started.add(request)
            engine.running[request] = action.version
        self._check_rows(engine, engine.num_queued)

    def migrate(self, action: actions.Migrate) -> None:
        request, destination = action.request, self._receiving(action.destination)
        require(action.source != destination.id, f"{request} migrates to engine {destination.id}, its owner")
        require(request not in self.aborting, f"{request} migrates during its abort")
        destination.incoming[request] = action.version
        self._check_rows(destination)

    def abort(self, action: actions.Abort) -> None:
        for request in action.requests:
            is_owner = self.versions.owners.get(request) == action.engine
            require(is_owner, f"engine {action.engine} aborts {request}, which it does not run")
            self.aborting.add(request)
            self._aborted_too_late.discard(request)

    def decode_only(self, action: actions.DecodeOnly) -> None:
        unknown = {*action.requests} - self._active(action.engine).running.keys()
        require(not unknown, f"engine {action.engine} decodes only {unknown}, which it does not run")

    def drop(self, action: actions.Drop, is_pinned: bool) -> None:
        """Check a `Drop`; of a pinned version one engine must keep a copy."""
        engine, version = self._active(action.engine), action.version
        is_unused = version not in engine.needed_versions
        require(is_unused, f"engine {engine.id} drops version {version} under its requests")
        has_copy = self.num_holders(version) > 0
        require(has_copy or not is_pinned, f"engine {engine.id} drops the last copy of version {version}")
        engine.dropped_at[version] = self._num_changes - engine.num_own_loads

    def load(self, action: actions.Load, is_evaluated: bool) -> None:
        """Check a `Load`. Only a version under evaluation may be loaded again if no event has changed the
        fleet since its drop.
        """
        engine, version = self._active(action.engine), action.version
        require(engine.loading is None, f"engine {engine.id} loads two versions at once")
        require(version not in engine.held, f"engine {engine.id} loads version {version}, which it holds")
        require(len(engine.held) < engine.num_slots, f"engine {engine.id} uses more than its slots")
        has_changed = engine.dropped_at.get(version) != self._num_changes - engine.num_own_loads
        is_useful = is_evaluated or has_changed
        require(is_useful, f"engine {engine.id} drops and loads version {version} without a reason")
        engine.loading = version

    def pause(self, engine_id: int) -> None:
        engine = self._active(engine_id)
        require(engine.is_colocated, f"engine {engine_id} is paused, and it does not share a device")
        engine.is_pausing = True

    def resume(self, engine_id: int) -> None:
        self._active(engine_id).is_paused = False

    def remove(self, engine_id: int) -> None:
        engine = self._active(engine_id)
        require(engine.is_draining, f"engine {engine_id} is removed without a request to drain it")
        require(not engine.num_used_rows, f"engine {engine_id} is removed with its requests")
        has_others = any(not other.is_draining for other in self.engines.values())
        require(has_others, f"engine {engine_id}, the last engine, is removed")
        engine.is_removed = True

    def check_device(self) -> None:
        """No engine on the trainer's device decodes when a step starts."""
        for engine in self.engines.values():
            is_idle = engine.is_paused or not engine.running
            require(is_idle or not engine.is_colocated, f"engine {engine.id} decodes during a step")

    # Checks of the whole fleet

    def check_idle(self, pins: Counter[int]) -> None:
        """No request waits while an engine with its version has a free row; no drained engine is kept.

        `pins`: version -> unfinished requests. Costs a pass over all requests.
        """
        waiting = +pins
        for engine in self.engines.values():
            waiting.subtract(v for request, v in engine.running.items() if request not in self.aborting)
        for engine in self.engines.values():
            if engine.is_draining:
                self._check_drained(engine)
            elif not (engine.is_paused or engine.is_pausing) and engine.has_places:
                placeable = [version for version in engine.held if waiting[version] > 0]
                message = f"requests of versions {placeable} wait, and engine {engine.id} has free rows"
                require(not placeable, message)

    def _check_drained(self, engine: CheckedEngine) -> None:
        is_source = any(source == engine.id for source, _ in self.versions.migrations.values())
        is_busy = is_source or engine.num_used_rows > 0 or engine.loading is not None
        require(is_busy or engine.is_removed, f"engine {engine.id} is drained and empty, and is not removed")

    def compare(self, truth: GroundTruth) -> None:
        """Events and ground truth agree, except for migrations whose outcome is not reported yet."""
        for engine_id, engine in truth.engines.items():
            expected = self.engines[engine_id].running
            if not engine.is_lost:
                unknown = [r for r in engine.requests if r not in expected and r not in engine.migrations]
                require(not unknown, f"engine {engine_id} runs {unknown} without a Generate or Migrate")
            for request in expected:
                is_there = engine.is_lost or request in engine.requests or request in engine.migrations
                require(is_there, f"engine {engine_id} should run {request} and does not")

    def _active(self, engine_id: int) -> CheckedEngine:
        engine = self.engines.get(engine_id)
        if engine is None or engine.is_removed:
            raise Violation(f"engine {engine_id} gets an action after it was lost or removed")
        return engine

    def _receiving(self, engine_id: int) -> CheckedEngine:
        engine = self._active(engine_id)
        require(not engine.is_draining, f"engine {engine_id} gets requests while it drains")
        return engine

    def _check_rows(self, engine: CheckedEngine, num_queued: int = 0) -> None:
        num_used = engine.num_used_rows
        has_rows = num_used <= engine.num_rows + num_queued
        require(has_rows, f"engine {engine.id} has {num_used} requests, more than its rows")
