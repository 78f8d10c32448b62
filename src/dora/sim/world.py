"""A simulated world: the executor of a run in virtual time, with dataset, engines, rewards and trainer.

The event queue is a heap of (time, number, callback). The number breaks ties, so a seed gives the same run
every time. Executing an action schedules callbacks; a callback returns the event that it reports, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from dora.core import actions, events
from dora.core.types import Chunk, GroupId, RequestId
from dora.sim.event_queue import EventQueue
from dora.sim.ground_truth import GroundTruth, MigrationStage, SimEngine, SimMigration, SimRequest, Violation
from dora.sim.random_config import FaultDraw, PolicyDrift, RequestLengths, WorldConfig, draw_kls

KV_BYTES_PER_TOKEN = 1024
MAX_REDONE_STEPS = 3  # between two checkpoints of the trainer


class World(EventQueue[events.Event | None]):
    """Executes actions and returns events, like the executor of a real run."""

    def __init__(self, config: WorldConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.rng = Random(f"world {seed}")
        self.faults = FaultDraw(self.rng)
        self.drift = PolicyDrift(config.limits.adaptive_staleness, Random(f"drift {seed}"))
        self.truth = GroundTruth()
        self.urgent_events: deque[events.Event] = deque()  # returned before everything that is scheduled
        self.migrations = SimMigrations(self)
        self.rollout = SimRollout(self)
        self.digests: dict[int, str] = {}  # of the published versions
        self._dataset_index = 0
        self._num_joining = 0
        self._next_engine_id = 0
        self._trainer = SimTrainer(self, seed)
        self._handlers: dict[type, Callable[[Any], None]] = {
            actions.FetchPrompts: self._fetch_prompts,
            actions.Migrate: self.migrations.start,
            actions.Score: self._score,
            actions.Train: self._trainer.train,
            actions.Publish: self._trainer.publish,
            actions.ReportDigest: self._trainer.publish,
        }
        self._start_engines()

    def execute(self, action: actions.Action) -> None:
        """Start an action. Those that no worker executes (`Admit`, `Commit`, ...) do nothing."""
        self._handlers.get(type(action), self.rollout.execute)(action)

    def next_event(self, until: float | None) -> events.Event | None:
        """The next event, or None once `now` has reached `until`. Raises Deadlock if nothing is scheduled."""
        while not self.urgent_events:
            next_s = self.next_s
            if until is not None and (next_s is None or next_s > until):
                self.now = max(self.now, until)
                return None
            if next_s is None and not self.faults.is_healed:
                self.heal()
            if (event := self.run_next()) is not None:
                return event
        return self.urgent_events.popleft()

    def heal(self) -> None:
        """Stop all faults, and start an engine if there is none: from now on the run must make progress."""
        self.faults.is_healed = True
        if not self._working_engines() and not self._num_joining:
            self._schedule_join(0, 0.0)

    def restart(self, dataset_index: int, from_step: int) -> None:
        """Crash every process and start new ones, with these positions of dataset and trainer."""
        self.clear()
        self.urgent_events.clear()
        self.truth = GroundTruth()
        self._dataset_index, self._num_joining, self._next_engine_id = dataset_index, 0, 0
        self._trainer.restart(from_step)
        self._start_engines()

    def digest_of(self, version: int) -> str:
        """The digest of a version in the weight store."""
        return self.digests.get(version, digest_of(version))

    # Dataset and rewards

    def _report(self, delay_s: float, event: events.Event) -> None:
        self.schedule(delay_s, lambda: event)

    def _fetch_prompts(self, action: actions.FetchPrompts) -> None:
        first, size = self._dataset_index, self.config.num_prompts
        groups = tuple(GroupId(*divmod(first + k, size)) for k in range(action.count))
        self._report(0.001, events.PromptsFetched(first, groups))
        self._dataset_index += action.count

    def _score(self, action: actions.Score) -> None:
        delay_s = self.config.reward_s * self.rng.expovariate(1.0)
        if self.faults.fails(self.config.scoring_failure_rate):
            return self._report(delay_s, events.ScoringFailed(action.group, "simulated scoring failure"))
        is_equal = self.rng.random() < self.config.equal_reward_rate
        limits = self.config.limits
        size = limits.group_size
        if action.group.is_held_out and limits.evaluation is not None:
            size = limits.evaluation.num_answers
        rewards = tuple(1.0 if is_equal else float(k % 2) for k in range(size))
        self._report(delay_s, events.GroupScored(action.group, rewards))

    # Engines join, crash and drain

    def _start_engines(self) -> None:
        config = self.config
        for index in range(len(config.engines)):
            delays_s = config.join_delays_s
            self._schedule_join(index, delays_s[index] if delays_s else self.rng.uniform(0.0, 0.1))
        self._schedule_fault(config.engine_loss_interval_s, self._crash_engines)
        self._schedule_fault(config.faults.drain_interval_s, self._request_drain)

    def _schedule_join(self, index: int, delay_s: float, replaces: int | None = None) -> None:
        self._num_joining += 1
        self.schedule(delay_s, self._join, index, replaces)

    def _join(self, index: int, replaces: int | None) -> events.Event:
        """Start an engine with a new id. It names the engine that it replaces if that was reported lost."""
        config, engine_id = self.config, self._next_engine_id
        self._num_joining -= 1
        self._next_engine_id += 1
        rows, slots = config.engines[index]
        is_colocated = index >= len(config.engines) - config.num_colocated
        tokens_per_s = 1.0 / config.seconds_per_token[index]
        engine = SimEngine(
            engine_id,
            index,
            rows,
            config.limits.num_queued,
            slots,
            tokens_per_s,
            is_colocated,
            is_paused=is_colocated,
        )
        self.truth.engines[engine_id] = engine
        is_loss_unreported = replaces in self.truth.engines
        return events.EngineJoined(
            engine_id, rows, slots, is_colocated, None if is_loss_unreported else replaces
        )

    def _schedule_fault(self, interval_s: float | None, callback: Callable[[], events.Event | None]) -> None:
        if interval_s is not None and not self.faults.is_healed:
            self.schedule(self.rng.expovariate(1.0 / interval_s), callback)

    def _working_engines(self) -> list[SimEngine]:
        return [e for e in self.truth.engines.values() if not e.is_lost and not e.is_leaving]

    def _crash_engines(self) -> None:
        """Crash one engine, in one of ten cases two at once. A world without engines heals."""
        working = self._working_engines()
        if not working and not self._num_joining:
            self.heal()
        if self.faults.is_healed:
            return
        for engine in self.rng.sample(working, min(len(working), 1 + self.faults.fails(0.1))):
            self.crash_engine(engine)
        self._schedule_fault(self.config.engine_loss_interval_s, self._crash_engines)

    def crash_engine(self, engine: SimEngine) -> None:
        """Crash an engine. A request that has stopped to migrate survives in its snapshot."""
        engine.is_lost = True
        kept_tokens = []
        for request in engine.requests.values():
            if request.migration is None or request.migration.stage is not MigrationStage.STOPPED:
                del self.truth.owner[request.id]
                if num_tokens := int(request.num_tokens):
                    kept_tokens.append((request.id, num_tokens))
        engine.requests = {}
        delay_s = self.faults.delay_s(self.config.faults.loss_detection_s)
        self.schedule(delay_s, self._detect_loss, engine, tuple(kept_tokens))
        if self.rng.random() < self.config.faults.engine_restart_rate:
            self._schedule_join(engine.index, self.faults.delay_s(self.config.engine_restart_s), engine.id)

    def _detect_loss(self, engine: SimEngine, kept_tokens: tuple[tuple[RequestId, int], ...]) -> None:
        """Report the outcomes of its migrations first, then the loss of the engine and of some tokens."""
        self.urgent_events.extend(self.migrations.end_all(engine))
        self.urgent_events.append(events.EngineLost(engine.id, "simulated loss", kept_tokens))
        if kept_tokens:
            self.urgent_events.append(events.OutputsLost(tuple(request for request, _ in kept_tokens[::2])))
        del self.truth.engines[engine.id]

    def _request_drain(self) -> events.Event | None:
        self._schedule_fault(self.config.faults.drain_interval_s, self._request_drain)
        working = self._working_engines()
        if self.faults.is_healed or not working:
            return None
        engine = self.rng.choice(working)
        if self.rng.random() < self.config.faults.engine_restart_rate:
            self._schedule_join(engine.index, self.faults.delay_s(self.config.engine_restart_s))
        return events.DrainRequested(engine.id)


class SimRollout:
    """The engines of a world: each action, and the progress of running requests."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lengths = RequestLengths(world.config, world.rng)
        self._handlers: dict[type, Callable[[SimEngine, Any], None]] = {
            actions.Generate: self._generate,
            actions.Abort: self._abort,
            actions.DecodeOnly: self._decode_only,
            actions.PauseEngine: self._pause,
            actions.ResumeEngine: self._resume,
            actions.RemoveEngine: self._remove,
            actions.Load: self._load,
            actions.Drop: self._drop,
        }

    def execute(self, action: Any) -> None:
        """Start an action of an engine; a lost engine ignores it."""
        handler = self._handlers.get(type(action))
        if handler is not None:
            engine = self._world.truth.engines.get(action.engine)
            if engine is not None and not engine.is_lost:
                handler(engine, action)

    def update_rate(self, request: SimRequest) -> None:
        """Set the decode rate of a request, and schedule its end by it."""
        if request.is_over:
            return
        world, engine = self._world, request.engine
        request.advance(world.now)
        request.tokens_per_s = rate = engine.tokens_per_s_of(request)
        request.finish_id += 1
        if rate:
            left_s = (request.length - request.num_tokens) / rate
            delay_s = max(left_s, request.report_after_s - world.now)
            world.schedule(delay_s, self._finish, request, request.finish_id)
            if engine.is_colocated and world.truth.is_training:
                world.truth.check_device()

    def start_queued(self, engine: SimEngine) -> None:
        """Decode queued requests in the free rows."""
        if started := engine.take_queued():
            for request in [*engine.requests.values()] if engine.decode_only else started:
                self.update_rate(request)

    def start_reports(self, engine: SimEngine) -> None:
        """Start the progress reports of an engine with requests."""
        if not engine.is_reporting:
            engine.is_reporting = True
            self._world.schedule(self._world.config.report_interval_s, self._report_progress, engine)

    def _generate(self, engine: SimEngine, action: actions.Generate) -> None:
        world = self._world
        for request_id in action.requests:
            version = self._version_of(engine, request_id, action.version)
            request = SimRequest(request_id, version, self._lengths.of(request_id), engine, world.now)
            request.is_queued = True
            world.truth.assign(request, engine)
            engine.take_queued()
            if world.faults.fails(world.config.request_failure_rate):
                request.is_refused = True
                wasted_s = request.length / engine.tokens_per_s * world.rng.choice((0.0, 0.5, 1.0))
                world.schedule(world.faults.delay_s(0.001 + wasted_s), self._refuse, request)
            else:
                self.update_rate(request)
        self.start_reports(engine)

    def _version_of(self, engine: SimEngine, request: RequestId, version: int) -> int:
        """The version that decodes a request: with inflight updates the newest of the engine."""
        if not self._world.config.limits.breaks_c1 or request.is_held_out:
            return version
        return max(version, *engine.held)

    def _finish(self, request: SimRequest, finish_id: int) -> events.Event | None:
        if request.finish_id != finish_id or request.is_over:
            return None
        self._release(request)
        chunks = tuple(
            Chunk(version, self._world.digest_of(version), num) for version, num in request.chunks()
        )
        return events.RequestFinished(
            request.engine.id, request.id, request.version, request.length, chunks, "stop"
        )

    def _refuse(self, request: SimRequest) -> events.Event | None:
        if request.is_over:
            return None
        if self._world.now < request.report_after_s:
            self._world.schedule(request.report_after_s - self._world.now, self._refuse, request)
            return None
        self._release(request)
        cause = "environment" if request.length % 2 else "engine"
        return events.RequestFailed(request.engine.id, request.id, "failed in the simulation", cause)

    def _release(self, request: SimRequest, reason: str = "the request finished first") -> None:
        """Free the row; a running migration of the request has failed."""
        migration = request.migration
        self._world.truth.release(request)
        if migration is not None:
            self._world.migrations.fail(migration, reason, self._world.faults.delay_s(0.001))
        self.start_queued(request.engine)

    def _abort(self, engine: SimEngine, action: actions.Abort) -> None:
        world = self._world
        delay_s = world.faults.delay_s(max(0.005, 2 * world.config.kv_stop_s))  # often after a migration
        world.schedule(delay_s, self._aborted, engine, action.requests)

    def _aborted(self, engine: SimEngine, requests: tuple[RequestId, ...]) -> events.Event | None:
        """Requests that have finished or migrated meanwhile are not aborted."""
        if engine.is_lost:
            return None
        running = [found for request in requests if (found := engine.requests.get(request)) is not None]
        aborted = [request for request in running if request.report_after_s <= self._world.now]
        for request in aborted:
            request.advance(self._world.now)
            self._release(request, "the request was aborted")
        num_tokens = sum(int(request.num_tokens) for request in aborted)
        return events.RequestsAborted(engine.id, tuple(request.id for request in aborted), num_tokens)

    def _decode_only(self, engine: SimEngine, action: actions.DecodeOnly) -> None:
        engine.decode_only = frozenset(action.requests)
        self._update_rates(engine)

    def _pause(self, engine: SimEngine, action: actions.PauseEngine) -> None:
        engine.is_pausing = True
        delay_s = self._world.faults.delay_s(self._world.config.pause_s)
        self._world.schedule(delay_s, self._paused, engine)

    def _paused(self, engine: SimEngine) -> events.Event | None:
        if engine.is_lost:
            return None
        engine.is_pausing = False
        engine.is_paused = not engine.resumes_after_pause
        engine.resumes_after_pause = False
        self._update_rates(engine)
        return events.EnginePaused(engine.id)

    def _resume(self, engine: SimEngine, action: actions.ResumeEngine) -> None:
        if engine.is_pausing:
            engine.resumes_after_pause = True
            return
        engine.is_paused = False
        self._update_rates(engine)

    def _update_rates(self, engine: SimEngine) -> None:
        for request in engine.requests.values():
            self.update_rate(request)

    def _remove(self, engine: SimEngine, action: actions.RemoveEngine) -> None:
        self._world.truth.check_removal(engine)
        engine.is_leaving = True
        self._world.schedule(self._world.faults.delay_s(0.01), self._removed, engine)

    def _removed(self, engine: SimEngine) -> events.Event:
        engine.is_lost = True
        del self._world.truth.engines[engine.id]
        return events.EngineRemoved(engine.id)

    def _load(self, engine: SimEngine, action: actions.Load) -> None:
        world = self._world
        world.truth.check_load(engine)
        engine.loading = action.version
        load_s = world.faults.delay_s(world.config.load_s, world.config.faults.slow_load_rate)
        world.schedule(load_s, self._loaded, engine, action.version)

    def _loaded(self, engine: SimEngine, version: int) -> events.Event | None:
        if engine.is_lost:
            return None
        engine.loading = None
        if self._world.faults.fails(self._world.config.faults.load_failure_rate):
            return events.LoadFailed(engine.id, version, "simulated load failure")
        engine.held.add(version)
        for request in engine.requests.values():
            newest = self._version_of(engine, request.id, request.version)
            if newest > request.version:
                request.switch_version(newest, self._world.now)
                self.update_rate(request)
        return events.Loaded(engine.id, version, self._world.digest_of(version))

    def _drop(self, engine: SimEngine, action: actions.Drop) -> None:
        self._world.truth.check_drop(engine, action.version)
        engine.held.discard(action.version)

    def _report_progress(self, engine: SimEngine) -> events.Event | None:
        """Report the lengths of all requests, and a last time of those that have migrated."""
        if engine.is_lost or not engine.requests:
            engine.is_reporting = False
            return None
        world = self._world
        world.schedule(world.config.report_interval_s, self._report_progress, engine)
        for request in engine.requests.values():
            request.advance(world.now)
        known = [request for request in engine.requests.values() if request.report_after_s <= world.now]
        lengths = [(request.id, int(request.num_tokens)) for request in known]
        lengths += [(r, n) for r, n in engine.migrated_away.items() if r not in engine.requests]
        engine.migrated_away.clear()
        kv_capacity = engine.num_rows * world.config.kv_tokens_per_row
        num_tokens = sum(int(request.num_tokens) for request in known)
        kv_usage = min(1.0, num_tokens / kv_capacity) if kv_capacity else 0.0
        rate = max((request.tokens_per_s for request in known), default=0.0)
        return events.ProgressReported(engine.id, tuple(lengths), rate, kv_usage)


class SimMigrations:
    """Migrations: the KV is copied while the source decodes, the request stops, and the destination takes
    over.

    At any time at most one engine owns the request. The outcome is reported once, before the loss of either
    engine.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self, action: actions.Migrate) -> None:
        world, truth = self._world, self._world.truth
        source, destination = truth.engines.get(action.source), truth.engines.get(action.destination)
        if source is None or destination is None or source.is_lost or destination.is_lost:
            failed = events.MigrationFailed(
                action.request, action.source, action.destination, "one of its engines is lost"
            )
            world.urgent_events.appendleft(failed)  # before the loss, which may be the next event
            return
        request = source.requests.get(action.request)
        if request is None:
            raise Violation(f"{action.request} migrates from engine {source.id}, which does not run it")
        config, faults = world.config, world.faults
        copy_s = faults.delay_s(config.kv_copy_s, config.faults.slow_migration_rate)
        will_fail = faults.fails(config.faults.migration_failure_rate)
        stop_s = faults.delay_s(config.kv_stop_s)
        migration = SimMigration(request, source, destination, copy_s, stop_s, will_fail)
        truth.reserve(migration)
        request.migration = migration
        if will_fail and faults.fails(0.5):
            world.schedule(copy_s, self._refuse, migration)
        else:
            world.schedule(copy_s, self._stop, migration)

    def fail(self, migration: SimMigration, reason: str, report_delay_s: float = 0.0) -> None:
        """Leave the request with its source, where it continues or has ended."""
        self._end(migration, MigrationStage.FAILED, reason)
        self._world.rollout.update_rate(migration.request)
        self._world.rollout.start_queued(migration.destination)
        self._world.schedule(report_delay_s, self._report, migration)

    def end_all(self, engine: SimEngine) -> list[events.Event]:
        """The outcomes of all migrations of a lost engine; those in progress have failed."""
        outcomes = []
        for migration in list(engine.migrations.values()):
            if migration.stage in (MigrationStage.COPYING, MigrationStage.STOPPED):
                self._end(migration, MigrationStage.FAILED, f"engine {engine.id} is lost")
                if migration.source.is_lost:
                    self._world.truth.owner.pop(migration.request.id, None)
                else:
                    self._world.rollout.update_rate(migration.request)
                if not migration.destination.is_lost:
                    self._world.rollout.start_queued(migration.destination)
            outcome = self._report(migration)
            assert outcome is not None, "a reported migration is not in the list"
            outcomes.append(outcome)
        return outcomes

    def _refuse(self, migration: SimMigration) -> None:
        if migration.stage is MigrationStage.COPYING and not migration.destination.is_lost:
            self.fail(migration, "the destination refused it")

    def _stop(self, migration: SimMigration) -> None:
        """Stop the request to copy the rest of its KV."""
        is_copying = migration.stage is MigrationStage.COPYING
        if not is_copying or migration.source.is_lost or migration.destination.is_lost:
            return
        migration.stage = MigrationStage.STOPPED
        self._world.rollout.update_rate(migration.request)
        self._world.schedule(migration.stop_s, self._take_over, migration)

    def _take_over(self, migration: SimMigration) -> None:
        """Make the destination the owner, unless the lease of the source has expired."""
        if migration.stage is not MigrationStage.STOPPED or migration.destination.is_lost:
            return
        world, request = self._world, migration.request
        if migration.will_fail and not migration.source.is_lost:
            return self.fail(migration, "the lease expired", world.faults.delay_s(0.001))
        # Other events may happen before the migration is reported.
        report_delay_s = world.faults.delay_s(world.config.kv_stop_s + world.config.kv_copy_s)
        self._end(migration, MigrationStage.COMPLETED, "")
        world.truth.release(request)
        world.truth.assign(request, migration.destination)
        request.is_queued = False
        world.rollout.start_queued(migration.source)
        migration.num_tokens = int(request.num_tokens)
        migration.source.migrated_away[request.id] = migration.num_tokens
        request.report_after_s = world.now + report_delay_s
        world.schedule(report_delay_s, self._report, migration)
        world.rollout.start_reports(migration.destination)
        world.rollout.update_rate(request)

    def _end(self, migration: SimMigration, stage: MigrationStage, reason: str) -> None:
        migration.stage, migration.reason = stage, reason
        migration.request.migration = None
        del migration.destination.incoming[migration.request.id]

    def _report(self, migration: SimMigration) -> events.Event | None:
        """The outcome, once."""
        if migration.is_reported:
            return None
        migration.is_reported = True
        request, source, destination = migration.request.id, migration.source, migration.destination
        del source.migrations[request], destination.migrations[request]
        if migration.stage is MigrationStage.FAILED:
            return events.MigrationFailed(request, source.id, destination.id, migration.reason)
        num_tokens = migration.num_tokens
        num_bytes = num_tokens * KV_BYTES_PER_TOKEN
        copy_s, stop_s = migration.copy_s, migration.stop_s
        return events.Migrated(request, source.id, destination.id, num_tokens, num_bytes, copy_s, stop_s)


class SimTrainer:
    """The trainer: training steps, publications, and restarts from a checkpoint after a crash.

    `_attempt` counts the starts; callbacks of an earlier attempt are ignored.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._kl_rng = Random(f"versions {seed}")
        self._rng = Random(f"trainers {seed}")
        self._start_rng = Random(f"replacements {seed}")
        self._attempt = 0
        self._num_trained = 0  # steps of this attempt, its checkpoint included
        self._max_trained = 0  # steps of any attempt
        self._checkpoint = 0  # steps of the newest checkpoint
        self._digests: dict[int, str] = {}  # of each version, as last computed
        self._batches: list[tuple[GroupId, ...]] = []
        self._schedule_loss()

    def restart(self, from_step: int) -> None:
        """Start again from a checkpoint after every process has crashed."""
        self._attempt += 1
        self._num_trained = self._max_trained = self._checkpoint = from_step
        self._schedule_loss()

    def train(self, action: actions.Train) -> None:
        world, slow_rate = self._world, self._world.config.faults.slow_step_rate
        world.truth.is_training = True
        world.truth.check_device()
        if action.step == len(self._batches):
            self._batches.append(action.groups)
        step_s = world.faults.delay_s(world.config.step_s, slow_rate)
        world.schedule(step_s, self._trained, action.step, self._attempt)

    def publish(self, action: actions.Publish | actions.ReportDigest) -> None:
        self._world.schedule(0.001, self._published, action, self._attempt)

    def _trained(self, step: int, attempt: int) -> events.Event | None:
        world = self._world
        if attempt != self._attempt:
            return None
        world.truth.is_training = False
        if world.faults.fails(world.config.faults.step_failure_rate):
            return events.StepFailed(step, "simulated step failure")
        self._num_trained = step + 1
        self._max_trained = max(self._max_trained, self._num_trained)
        kls = draw_kls(self._kl_rng, step, world.config.limits.max_staleness)
        return events.Trained(step, *world.drift.draw(), kls)

    def _published(self, action: actions.Publish | actions.ReportDigest, attempt: int) -> events.Event | None:
        if attempt != self._attempt:
            return None
        version = action.version
        if isinstance(action, actions.Publish):
            self._world.digests[version] = self._digests.setdefault(version, digest_of(version))
            return events.Published(version, self._digests[version])
        if version > self._checkpoint:  # only the version of the checkpoint has the same bytes again
            self._digests[version] = f"{digest_of(version)} again"
        return events.DigestReported(version, self._digests[version])

    def _schedule_loss(self) -> None:
        interval_s = self._world.config.faults.trainer_loss_interval_s
        if interval_s is not None and not self._world.faults.is_healed:
            self._world.schedule(self._rng.expovariate(1.0 / interval_s), self._lose, self._attempt)

    def _lose(self, attempt: int) -> events.Event | None:
        world = self._world
        if attempt != self._attempt or world.faults.is_healed:
            return None
        self._attempt += 1
        world.truth.is_training = False
        self._schedule_replacement(self._rng)
        return events.TrainerLost("simulated loss")

    def _schedule_replacement(self, rng: Random) -> None:
        restart_s = rng.uniform(0.0, 2.0) * self._world.config.engine_restart_s
        self._world.schedule(restart_s, self._replace, self._attempt)

    def _replace(self, attempt: int) -> events.Event | None:
        """Start from a checkpoint that is no older than the previous one."""
        if attempt != self._attempt:
            return None
        failure_rate = self._world.config.faults.trainer_start_failure_rate
        if not self._world.faults.is_healed and self._start_rng.random() < failure_rate:
            self._schedule_replacement(self._start_rng)
            return events.TrainerLost("simulated loss of a replacement")
        first = min(self._num_trained, max(self._checkpoint, self._max_trained - MAX_REDONE_STEPS))
        from_step = self._checkpoint = self._rng.randint(first, self._num_trained)
        self._num_trained = from_step
        self._schedule_loss()
        return events.TrainerReplaced(from_step, tuple(self._batches[from_step : self._max_trained]))


def digest_of(version: int) -> str:
    """The digest of a version's weights in simulated runs."""
    return f"sim-{version:08x}"
