"""Checks the guarantees C1, C2 and C3 and the rules of scheduling, by the events and actions of a run alone.

`dora.audit` derives the guarantees, as it does for real runs. The rules are checked here: the bound in
advance of each admission, slack, engines (`fleet_checker`), loads, inflight updates, adaptive staleness,
evaluations. Neither shares code with the rules of `dora.core`, so that a mistake there is not repeated. The
first finding raises `Violation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dora.audit.guarantees import GuaranteeAudit
from dora.core import actions, events
from dora.core.types import GroupId, Limits, RequestId
from dora.sim.fleet_checker import FleetChecker
from dora.sim.ground_truth import Violation, require

ENGINES_PER_LOAD = 4  # with deferred loads, one in so many engines may load at a time
ROWS_PER_EVALUATION = 8  # one in so many rows may evaluate beside the training


class Checker:
    """Checks every event and action of a run. All methods raise `Violation`."""

    def __init__(self, limits: Limits, num_prompts: int | None = None) -> None:
        """`num_prompts` is the number of dataset rows, None for a growing dataset."""
        self.limits = limits
        self.audit = GuaranteeAudit(limits, num_prompts)
        self.groups, self.steps = self.audit.groups, self.audit.steps
        self.fleet = FleetChecker(self.audit.versions, limits.num_queued)
        self.loads = LoadChecker(limits, self.fleet)
        self.adaptive_staleness = AdaptiveStalenessChecker(limits)
        self.evaluation = EvaluationChecker(limits)
        # Versions
        self.store: set[int] = set()  # versions in the weight store
        self.pins: Counter[int] = Counter()  # version -> unfinished requests
        self.num_live: Counter[int] = Counter()  # version -> groups admitted, not filtered or failed
        self.inflight_updates = InflightUpdateChecker(limits, self.fleet, self.pins)
        self._num_failures: Counter[RequestId] = Counter()  # of its environment
        self._group_to_retry: GroupId | None = None  # after the last event
        # The bound
        self.open_groups: set[GroupId] = set()  # groups admitted, and neither committed nor ended
        self.num_open: Counter[int] = Counter()  # deadline -> open groups
        self.next_step = 0  # that groups are committed to
        self.num_committed = 0  # groups of the next step
        self._redo_until = 0  # version to publish again after a crash, before anything is admitted

    def observe(self, event: events.Event) -> None:
        """Follow an event, before the orchestrator handles it."""
        self.fleet.before_event(event)
        self.evaluation.before_event()
        self._group_to_retry = None
        self.check(event)
        self.inflight_updates.after_event(self.store)

    def check(self, record: events.Event | actions.Action) -> None:
        """Audit an action before it is executed, and check what its type needs. Raises Violation.

        Events go through `observe`.
        """
        self.audit.observe(record)
        self._raise_findings()
        if (handler := _HANDLERS.get(type(record))) is not None:
            handler(self, record)

    def _raise_findings(self) -> None:
        if self.audit.findings:
            raise Violation(self.audit.findings[0])

    def finish(self) -> None:
        """At the end of a run, every step is trained and every admitted group has an outcome."""
        self.audit.close()
        self._raise_findings()

    def deadline(self, version: int) -> int:
        """The last step that may train a group that is admitted at `version` now."""
        return min(version + self.adaptive_staleness.bound, self.limits.num_steps - 1)

    # Events

    def _on_joined(self, event: events.EngineJoined) -> None:
        self.fleet.on_joined(event)
        self.evaluation.on_joined(sum(engine.num_rows for engine in self.fleet.engines.values()))

    def _on_finished(self, event: events.RequestFinished) -> None:
        request, is_aborted = event.request, event.request in self.fleet.aborting
        self.fleet.release(event.engine, request)
        if request.is_held_out:
            self._end_held_out(request, is_failed=False)
        elif not is_aborted:
            self.inflight_updates.end(request, event.version)

    def _on_failed(self, event: events.RequestFailed) -> None:
        request, is_aborting = event.request, event.request in self.fleet.aborting
        self.fleet.release(event.engine, request)
        if request.is_held_out:
            self._end_held_out(request, is_failed=True)
        elif event.cause == "environment" and not is_aborting:
            self._num_failures[request] += 1
            if self._num_failures[request] <= self.limits.max_retries:
                self.fleet.started.discard(request)  # it may be generated again
                is_migrating = any(request in engine.incoming for engine in self.fleet.engines.values())
                self._group_to_retry = None if is_migrating else request.group

    def _end_held_out(self, request: RequestId, *, is_failed: bool) -> None:
        self.evaluation.end(request, is_failed=is_failed)
        self.pins[-1 - request.epoch] -= 1

    def _on_aborted(self, event: events.RequestsAborted) -> None:
        for request in event.requests:
            require(request in self.fleet.aborting, f"{request} was aborted without an Abort")
            self.fleet.release(event.engine, request)

    def _on_scored(self, event: events.GroupScored | events.ScoringFailed) -> None:
        if event.group.is_held_out:
            self.evaluation.on_scored(event.group)

    def _on_loaded(self, event: events.Loaded) -> None:
        self.fleet.on_loaded(event)
        self.inflight_updates.on_loaded(event)

    def _on_published(self, event: events.Published) -> None:
        self.store.add(event.version)
        self.loads.on_published(event)
        self.evaluation.on_published(event.version)

    def _on_trained(self, event: events.Trained) -> None:
        oldest = event.step - min(self.groups.admitted[group] for group in self.steps.batches[event.step])
        self.adaptive_staleness.on_trained(event, oldest)
        self.loads.on_trained(event)

    def _on_resumed(self, event: events.Resumed) -> None:
        """Every process has crashed. Steps after the checkpoint are trained again, with the same groups."""
        self.fleet.on_run_crashed()
        self.loads.on_run_crashed()
        self._redo_until = max({self._redo_until, *self.store})
        self.store = {version for version, _ in event.kept_versions}
        if event.num_steps is not None:
            self.limits = replace(self.limits, num_steps=event.num_steps)
        self.evaluation.on_run_crashed(self.limits.num_steps)

    # Actions

    def _admit(self, action: actions.Admit) -> None:
        group, version, size = action.group, action.version, self.limits.group_size
        is_redone = self._redo_until in {0, *self.store} or max(self.store) > self._redo_until
        require(is_redone, f"{group} is admitted before version {self._redo_until} is published again")
        require(self.evaluation.version != 0, f"{group} is admitted during the evaluation before training")
        is_held = self.fleet.num_holders(version) > 0
        require(is_held, f"{group} is admitted at version {version}, which no engine holds")
        self.pins[version] += size
        self.inflight_updates.admit(_siblings(group, size), version, self.store)
        deadline = self.deadline(version)
        require(action.deadline == deadline, f"C3: {group} has deadline {action.deadline}, not {deadline}")
        self.open_groups.add(group)
        self.num_open[deadline] += 1
        self.num_live[version] += 1
        self._check_bound(f"admitting {group} at version {version}")
        self._check_slack(group)
        self._check_expiry(version)
        self._check_single_version(version)

    def _check_bound(self, cause: str) -> None:
        """C3 in advance: every open group can be committed by its deadline."""
        num_open = 0
        for deadline, count in sorted(self.num_open.items()):
            num_open += count
            num_places = self.limits.batch_size * (deadline - self.next_step + 1) - self.num_committed
            if count and num_open > max(0, num_places):
                raise Violation(f"C3: {cause}: {num_open} groups for {num_places} places by step {deadline}")

    def _check_slack(self, group: GroupId) -> None:
        """Open groups stay `slack` below the bound, but always fill one batch."""
        limits = self.limits
        most = (self.adaptive_staleness.bound + 1) * limits.batch_size - limits.slack
        num_open = self.num_open.total() + self.num_committed
        is_kept = not limits.slack or num_open <= max(limits.batch_size, most)
        require(is_kept, f"admitting {group} uses up the slack: {num_open} groups are open")

    def _check_expiry(self, version: int) -> None:
        """No group is admitted at an old version in its last step once an engine has or loads the newest."""
        newest = max(self.store)
        if version < newest and self.deadline(version) <= self.next_step:
            staying = (engine for engine in self.fleet.engines.values() if not engine.is_draining)
            is_near = any(newest in engine.held or engine.loading == newest for engine in staying)
            require(not is_near, f"a group is admitted at version {version}, which expires in this step")

    def _check_single_version(self, version: int) -> None:
        """With `batches_per_version`, one version is live at a time, with at most so many batches."""
        num_batches = self.limits.batches_per_version
        if num_batches is None:
            return
        evaluated = {self.evaluation.version: len(self.evaluation.running)}
        others = [v for v, count in self.pins.items() if count > evaluated.get(v, 0) and v != version]
        require(not others, f"a group is admitted at version {version}, and versions {others} are still live")
        most = (num_batches if version else self.limits.max_staleness + 1) * self.limits.batch_size
        require(self.num_live[version] <= most, f"version {version} has more than {most} groups")

    def _generate(self, action: actions.Generate) -> None:
        for request in action.requests:
            if request.is_held_out:
                self.pins[action.version] += request not in self.evaluation.running
                is_training = action.version > 0 and self.next_step < self.limits.num_steps
                self.evaluation.generate(request, is_training=is_training)
                continue
            if request in self.groups.finished or request.group not in self.open_groups:
                raise Violation(f"{request} is generated after its end")
            self.inflight_updates.generate(request, action.version)
        self.fleet.generate(action)

    def _score(self, action: actions.Score) -> None:
        if action.group.is_held_out:
            self.evaluation.score(action.group)

    def _end_untrained(self, action: actions.Filter | actions.Fail) -> None:
        group = action.group
        require(group != self._group_to_retry, f"{group} ends, although its request may be retried")
        self._end(group, type(action).__name__)
        version = self.groups.admitted[group]
        self.num_live[version] -= 1
        for request in _siblings(group, self.limits.group_size):
            if request not in self.groups.finished:
                self.inflight_updates.end(request, version)

    def _commit(self, action: actions.Commit) -> None:
        group, step = action.group, action.step
        require(step == self.next_step, f"{group} is committed to step {step}, not to step {self.next_step}")
        self._end(group, "Commit")
        self.num_committed += 1
        if self.num_committed == self.limits.batch_size:
            self.next_step, self.num_committed = self.next_step + 1, 0
        self._check_bound(f"committing {group}")

    def _end(self, group: GroupId, outcome: str) -> None:
        require(group in self.open_groups, f"C2: {group} ends with {outcome}, and it is not open")
        self.open_groups.remove(group)
        self.num_open[self.groups.deadlines[group]] -= 1

    def _train(self, action: actions.Train) -> None:
        self.fleet.check_device()
        uncommitted = self.open_groups.intersection(action.groups)
        require(not uncommitted, f"C2: {uncommitted} are trained without a commit")

    def _migrate(self, action: actions.Migrate) -> None:
        require(not self.limits.is_static, f"{action.request} migrates although is_static = true")
        self.fleet.migrate(action)

    def _decode_only(self, action: actions.DecodeOnly) -> None:
        is_allowed = self.limits.prioritize_stragglers or not action.requests
        require(is_allowed, f"engine {action.engine} gets DecodeOnly although prioritize_stragglers = false")
        self.fleet.decode_only(action)

    def _drop(self, action: actions.Drop) -> None:
        self.fleet.drop(action, self.pins[action.version] > 0)

    def _load(self, action: actions.Load) -> None:
        require(action.version in self.store, f"version {action.version} is loaded and is not in the store")
        self.loads.load(action)
        self.fleet.load(action, action.version == self.evaluation.version)

    def _skip_load(self, action: actions.SkipLoad) -> None:
        """An engine may skip a version while a group can still be admitted at the version it keeps."""
        kept = self.loads.skip(action)
        deadline = self.deadline(kept)
        require(deadline > self.next_step, f"engine {action.engine} keeps version {kept}, which expires")
        self.num_open[deadline] += 1
        self._check_bound(f"{action}")
        self.num_open[deadline] -= 1

    def _retire(self, action: actions.Retire) -> None:
        version, num_pins = action.version, self.pins[action.version]
        require(not num_pins, f"version {version} is retired under its {num_pins} requests")
        require(version != self.evaluation.version, f"version {version} is retired under its evaluation")
        loading = [engine.id for engine in self.fleet.engines.values() if engine.loading == version]
        require(not loading, f"version {version} is retired while engines {loading} load it")
        self.store.discard(version)

    def _resume_engine(self, action: actions.ResumeEngine) -> None:
        require(self.steps.training is None, f"engine {action.engine} is resumed during a step")
        self.fleet.resume(action.engine)

    def _stop(self, action: actions.Stop) -> None:
        require(self.limits.num_steps in self.store, "the run stops before its last version is published")
        self.evaluation.stop()


def _siblings(group: GroupId, group_size: int) -> Iterable[RequestId]:
    return (RequestId(*group, k) for k in range(group_size))


_HANDLERS: dict[type, Callable[[Checker, Any], None]] = {
    events.EngineJoined: Checker._on_joined,
    events.EngineLost: lambda checker, event: checker.fleet.on_lost(event),
    events.EngineRemoved: lambda checker, event: checker.fleet.on_removed(event),
    events.DrainRequested: lambda checker, event: checker.fleet.set_draining(event.engine, True),
    events.EnginePaused: lambda checker, event: checker.fleet.on_paused(event.engine),
    events.ProgressReported: lambda checker, event: checker.fleet.on_progress(event),
    events.RequestFinished: Checker._on_finished,
    events.RequestFailed: Checker._on_failed,
    events.RequestsAborted: Checker._on_aborted,
    events.Migrated: lambda checker, event: checker.fleet.on_migrated(event),
    events.MigrationFailed: lambda checker, event: checker.fleet.free_reserved_row(event),
    events.GroupScored: Checker._on_scored,
    events.ScoringFailed: Checker._on_scored,
    events.Trained: Checker._on_trained,
    events.Resumed: Checker._on_resumed,
    events.Published: Checker._on_published,
    events.Loaded: Checker._on_loaded,
    events.LoadFailed: lambda checker, event: checker.fleet.on_load_failed(event),
    actions.Admit: Checker._admit,
    actions.Generate: Checker._generate,
    actions.Abort: lambda checker, action: checker.fleet.abort(action),
    actions.Migrate: Checker._migrate,
    actions.DecodeOnly: Checker._decode_only,
    actions.PauseEngine: lambda checker, action: checker.fleet.pause(action.engine),
    actions.ResumeEngine: Checker._resume_engine,
    actions.RemoveEngine: lambda checker, action: checker.fleet.remove(action.engine),
    actions.RejectDrain: lambda checker, action: checker.fleet.set_draining(action.engine, False),
    actions.Score: Checker._score,
    actions.Filter: Checker._end_untrained,
    actions.Fail: Checker._end_untrained,
    actions.Commit: Checker._commit,
    actions.Train: Checker._train,
    actions.Drop: Checker._drop,
    actions.Load: Checker._load,
    actions.SkipLoad: Checker._skip_load,
    actions.Retire: Checker._retire,
    actions.StartEvaluation: lambda checker, action: checker.evaluation.start(action),
    actions.SkipEvaluation: lambda checker, action: checker.evaluation.skip(action),
    actions.FinishEvaluation: lambda checker, action: checker.evaluation.finish(action),
    actions.Stop: Checker._stop,
}


class LoadChecker:
    """Order of loads (`defers_loads`) and skipped versions (`skip_below_kl`)."""

    def __init__(self, limits: Limits, fleet: FleetChecker) -> None:
        self._limits, self._fleet = limits, fleet
        self._newest: int | None = None
        self._steps: dict[int, events.Trained] = {}  # the first time since the last crash of the run
        self.skipped: dict[int, int] = {}  # engine -> version that it skipped last

    def on_published(self, event: events.Published) -> None:
        self._newest = event.version

    def on_trained(self, event: events.Trained) -> None:
        self._steps.setdefault(event.step, event)

    def on_run_crashed(self) -> None:
        self._newest = None
        self._steps.clear()
        self.skipped.clear()

    def load(self, action: actions.Load) -> None:
        """Few engines load the newest version at a time; a version that requests wait for needs no turn."""
        engines = self._fleet.engines
        if self._limits.defers_loads and action.version == self._newest:
            others = [engine.id for engine in engines.values() if engine.loading is not None]
            is_turn = len(others) < max(1, len(engines) // ENGINES_PER_LOAD)
            require(is_turn, f"engine {action.engine} loads out of turn, while engines {others} load")

    def skip(self, action: actions.SkipLoad) -> int:
        """Check a `SkipLoad`; return the version that the engine keeps, which must be close to the newest."""
        engine, version = self._fleet.engines[action.engine], action.version
        require(version == self._newest, f"engine {engine.id} skips version {version}, not the newest")
        require(self.skipped.get(engine.id) != version, f"engine {engine.id} skips version {version} twice")
        self.skipped[engine.id] = version
        loading = set() if engine.loading is None else {engine.loading}
        kept = max(engine.held | loading, default=version)
        is_close = kept < version and self._is_close(version - kept)
        require(is_close, f"engine {engine.id} skips version {version}, which is far from its version {kept}")
        return kept

    def _is_close(self, age: int) -> bool:
        """Whether the KL at this age, or at the next higher age that was measured, is below the threshold."""
        last = max(self._steps, default=0)
        kl_at = {
            event.step - version: kl
            for event in self._steps.values()
            if event.step >= last - self._limits.max_staleness
            for version, kl in event.kls
        }
        measured = sorted(other for other in kl_at if other >= age)
        return bool(measured) and kl_at[measured[0]] < (self._limits.skip_below_kl or 0.0)


class AdaptiveStalenessChecker:
    """The effective staleness bound, recomputed from the ESS and KL of the training steps."""

    def __init__(self, limits: Limits) -> None:
        self.bound = limits.max_staleness
        self.next_step = 0  # the first step that is not measured yet
        self._max_bound = limits.max_staleness
        self._rule = limits.adaptive_staleness
        self._window: list[tuple[float, float, int]] = []  # (1 - ESS, KL, age of the oldest sample)

    def on_trained(self, event: events.Trained, oldest: int) -> None:
        """Update the bound after a step whose oldest sample has this age, in versions."""
        rule = self._rule
        if rule is None or event.ess is None or event.kl is None or event.step < self.next_step:
            return
        self.next_step = event.step + 1
        if oldest > self.bound:
            return
        self._window.append((1 - event.ess, event.kl, oldest))
        lost_ess, kl, ages = zip(*self._window, strict=True)
        drift = max(sum(lost_ess) / (1 - rule.min_ess), sum(kl) / rule.max_kl) / rule.window
        if drift > 1 and max(ages) > 0:
            self.bound = max(ages) // 2
        elif drift <= 0.5 and len(self._window) == rule.window:
            self.bound = min(self._max_bound, self.bound + 1)
        elif drift <= 1 and len(self._window) < rule.window:
            return
        self._window.clear()


class InflightUpdateChecker:
    """Versions of unfinished requests where these continue with newer weights (`breaks_c1`); unused
    elsewhere.

    When an engine loads a version, its running requests continue with it. Waiting requests start with the
    newest version that any engine holds.
    """

    def __init__(self, limits: Limits, fleet: FleetChecker, pins: Counter[int]) -> None:
        self._is_on, self._fleet, self._pins = limits.breaks_c1, fleet, pins
        self._versions: dict[RequestId, int] = {}  # of unfinished requests

    def admit(self, siblings: Iterable[RequestId], version: int, store: Iterable[int]) -> None:
        """Check that a group is admitted at the newest version that engines hold."""
        if self._is_on:
            newest = self._newest_held(store)
            require(version == newest, f"a group is admitted at version {version}, and engines hold {newest}")
            self._versions.update(dict.fromkeys(siblings, version))

    def end(self, request: RequestId, version: int) -> None:
        """Release the version of a request that has ended; `version` is its group's."""
        self._pins[self._versions.pop(request, version)] -= 1

    def on_loaded(self, event: events.Loaded) -> None:
        """Running requests of the engine continue with the version."""
        if self._is_on:
            engine = self._fleet.engines[event.engine]
            for request, old in engine.running.items():
                if old < event.version and request in self._versions:
                    engine.running[request] = event.version
                    self._change(request, event.version)

    def after_event(self, store: Iterable[int]) -> None:
        """Waiting requests start with the newest version that engines hold."""
        if not self._is_on:
            return
        newest = self._newest_held(store)
        for request, version in self._versions.items():
            if version < newest and request not in self._fleet.versions.owners:
                self._change(request, newest)

    def generate(self, request: RequestId, version: int) -> None:
        """Check the version that a request starts with."""
        expected = self._versions.get(request, version)
        if expected != version:
            raise Violation(f"{request} changes its version from {expected} to {version}")

    def _newest_held(self, store: Iterable[int]) -> int:
        held = {v for e in self._fleet.engines.values() if not e.is_draining for v in e.held}
        return max(held.intersection(store), default=-1)

    def _change(self, request: RequestId, version: int) -> None:
        self._pins[self._versions[request]] -= 1
        self._pins[version] += 1
        self._versions[request] = version


class EvaluationChecker:
    """Evaluations: one at a time, each prompt scored once, on few rows while training runs.

    A due version is evaluated or skipped at once, except that the last one waits for a running evaluation.
    """

    def __init__(self, limits: Limits) -> None:
        self._rule, self._num_steps = limits.evaluation, limits.num_steps
        self.version: int | None = None  # of the running evaluation
        self.running: set[RequestId] = set()  # generated and not ended
        self._last_due = -1  # version
        self._due: int | None = None  # published version that is neither evaluated nor skipped yet
        self._ended: set[RequestId] = set()
        self._failed: set[GroupId] = set()
        self._scoring: set[GroupId] = set()
        self._done: set[GroupId] = set()  # prompts that are scored or have failed
        self._newest = 0  # version published so far
        self._num_rows = 0  # of all engines, the most there were at a time
        self._num_kept = 0  # requests that were running when the run crashed

    # Events

    def before_event(self) -> None:
        """Check what the actions after the previous event should have done."""
        may_wait = self._due is None or (self._due == self._num_steps and self.version is not None)
        require(may_wait, f"version {self._due} was due, and its evaluation was not started")
        is_done = self._rule is not None and len(self._done) == self._rule.num_prompts
        require(self.version is None or not is_done, f"the evaluation of {self.version} does not finish")

    def on_joined(self, num_rows: int) -> None:
        self._num_rows = max(self._num_rows, num_rows)

    def on_published(self, version: int) -> None:
        rule, self._newest = self._rule, max(self._newest, version)
        is_end = version in (0, self._num_steps)
        if rule and version > self._last_due and (is_end or (rule.every and version % rule.every == 0)):
            self._last_due = self._due = version

    def on_run_crashed(self, num_steps: int) -> None:
        """A version that has waited for its evaluation is due again once it is published again.

        In a run that gets more steps, the requests of the evaluation after its old end keep their rows.
        """
        self._num_steps, self._num_kept = num_steps, len(self.running)
        if self._due is not None:
            self._last_due, self._due = self._due - 1, None

    def end(self, request: RequestId, *, is_failed: bool) -> None:
        self.running.remove(request)
        self._ended.add(request)
        if is_failed:
            self._failed.add(request.group)
        if self._is_complete(request.group) and request.group in self._failed:
            self._done.add(request.group)

    def on_scored(self, group: GroupId) -> None:
        self._scoring.remove(group)
        self._done.add(group)

    # Actions

    def start(self, action: actions.StartEvaluation) -> None:
        require(self.version is None, f"versions {self.version} and {action.version} are evaluated at once")
        self._take_due(action.version)
        self.version = action.version
        for known in (self._ended, self._failed, self._done):
            known.clear()

    def skip(self, action: actions.SkipEvaluation) -> None:
        is_running = self.version is not None and self.version == action.running_version
        require(is_running, f"the evaluation of version {action.version} is skipped, and none is running")
        require(action.version != self._num_steps, "the evaluation of the last version is skipped")
        self._take_due(action.version)

    def generate(self, request: RequestId, *, is_training: bool) -> None:
        """Check a held-out request."""
        rule = self._rule
        is_known = rule is not None and request.row < rule.num_prompts and request.sibling < rule.num_answers
        if not is_known or self.version is None or request.epoch != -1 - self.version:
            raise Violation(f"{request} is generated during the evaluation of version {self.version}")
        require(request not in self._ended, f"{request} is generated after its end")
        self.running.add(request)
        if self.version == self._newest and is_training:
            most = max(1, self._num_rows // ROWS_PER_EVALUATION, self._num_kept)
            num_running = len(self.running)
            require(num_running <= most, f"{num_running} of {self._num_rows} rows evaluate, more than {most}")

    def score(self, group: GroupId) -> None:
        is_due = self._is_complete(group) and group not in self._failed and group not in self._done
        require(is_due, f"held-out prompt {group} is scored twice, or before all its responses have finished")
        self._scoring.add(group)  # a second time after a crash of the run

    def finish(self, action: actions.FinishEvaluation) -> None:
        assert self._rule is not None
        is_done = self.version == action.version and len(self._done) == self._rule.num_prompts
        require(is_done, f"the evaluation of version {action.version} finishes before all prompts are scored")
        self.version = None

    def stop(self) -> None:
        require(self.version is None, "the run stops during an evaluation")
        is_complete = self._rule is None or self._last_due == self._num_steps
        require(is_complete, "the run stops before the evaluation of its last version")

    def _take_due(self, version: int) -> None:
        require(self._due == version, f"version {version} is not due for an evaluation")
        self._due = None

    def _is_complete(self, group: GroupId) -> bool:
        assert self._rule is not None
        return all(request in self._ended for request in _siblings(group, self._rule.num_answers))
