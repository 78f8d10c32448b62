"""Random legal events in random order: the invariants hold, and every run finishes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.fake_workers import FakeWorkers, finished

from dora.core import codec
from dora.core.actions import Abort
from dora.core.events import (
    DrainRequested,
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    ProgressReported,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    ScoringFailed,
    StepFailed,
    TimerFired,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.types import AdaptiveStalenessRule, Limits

EventT = TypeVar("EventT", bound=Event)

MAX_ENGINES = 5
MAX_EVENTS_TO_THE_END = 5_000
any_limits = st.builds(
    Limits,
    num_steps=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    group_size=st.integers(2, 3),
    max_staleness=st.integers(0, 3),
    filter_groups=st.booleans(),
    stall_report_s=st.sampled_from([0.0, 1.0]),
    batches_per_version=st.sampled_from([None, None, None, 1, 2]),
    slack=st.integers(0, 2),
    weight_sync_interval=st.sampled_from([1, 1, 2]),
    defers_loads=st.booleans(),
    is_static=st.sampled_from([False, False, True]),
    balance_running=st.booleans(),
    prioritize_stragglers=st.booleans(),
    rebalance_interval_s=st.sampled_from([0.1, 1.0]),
).flatmap(
    lambda limits: st.sampled_from(
        [
            limits,
            replace(limits, adaptive_staleness=AdaptiveStalenessRule(0.5, 0.1, 1))
            if limits.max_staleness
            else limits,
        ]
    )
)


class RandomEvents(RuleBasedStateMachine):
    """Workers that answer late, out of order or with failures; `FakeWorkers.deliver` checks every event."""

    @initialize(limits=any_limits, num_prompts=st.integers(1, 9))
    def start(self, limits: Limits, num_prompts: int) -> None:
        self.workers = FakeWorkers(limits, num_prompts)
        self.num_joined = 0
        self.from_step = 0  # of the last checkpoint that was resumed from

    @property
    def engines(self) -> list[int]:
        return sorted(self.workers.state.engines)

    def is_running(self) -> bool:
        return not self.workers.orchestrator.done

    def has_pending(self) -> bool:
        return self.is_running() and bool(self.workers.deliverable())

    def has_engines(self) -> bool:
        return self.is_running() and bool(self.engines)

    def may_join(self) -> bool:
        return self.is_running() and len(self.engines) < MAX_ENGINES

    def draw_event(self, data: st.DataObject, kind: type[EventT]) -> EventT | None:
        """A deliverable event of a kind, in place of which the test delivers another."""
        events = [event for event in self.workers.deliverable() if isinstance(event, kind)]
        return data.draw(st.sampled_from(events)) if events else None

    @precondition(may_join)
    @rule(rows=st.integers(1, 5), slots=st.integers(1, 3), is_colocated=st.sampled_from([False, False, True]))
    def an_engine_joins(self, rows: int, slots: int, is_colocated: bool) -> None:
        self.workers.deliver(EngineJoined(self.num_joined, rows, slots, is_colocated))
        self.num_joined += 1

    @precondition(has_engines)
    @rule(data=st.data())
    def an_engine_is_lost(self, data: st.DataObject) -> None:
        self.workers.deliver(EngineLost(data.draw(st.sampled_from(self.engines)), "killed"))

    @precondition(has_engines)
    @rule(data=st.data())
    def an_engine_is_drained(self, data: st.DataObject) -> None:
        self.workers.deliver(DrainRequested(data.draw(st.sampled_from(self.engines))))

    @rule(num_redone=st.integers(0, 2))
    def the_run_crashes(self, num_redone: int) -> None:
        """May happen after the end of the run, too."""
        num_trained = self.workers.state.num_trained // self.workers.state.limits.batch_size
        self.workers.crash(max(self.from_step, num_trained - num_redone))
        self.from_step = max(self.from_step, num_trained - num_redone)
        self.num_joined = 0

    @precondition(is_running)
    @rule()
    def the_trainer_is_lost(self) -> None:
        if not self.workers.state.is_trainer_lost:
            self.workers.lose_trainer()

    @precondition(is_running)
    @rule(num_redone=st.integers(0, 2))
    def the_trainer_is_replaced(self, num_redone: int) -> None:
        state = self.workers.state
        if state.is_trainer_lost:
            num_trained = state.num_trained // state.limits.batch_size
            self.from_step = max(self.from_step, num_trained - num_redone)
            self.workers.replace_trainer(self.from_step)

    @precondition(has_pending)
    @rule(data=st.data())
    def any_pending_event_arrives(self, data: st.DataObject) -> None:
        self.workers.deliver(data.draw(st.sampled_from(self.workers.deliverable())))

    @precondition(has_pending)
    @rule(num=st.integers(1, 10))
    def the_oldest_pending_events_arrive(self, num: int) -> None:
        for event in self.workers.deliverable()[:num]:
            if event in self.workers.deliverable() and self.is_running():
                self.workers.deliver(event)

    @precondition(has_pending)
    @rule(data=st.data(), num_finished=st.integers(0, 3))
    def a_request_fails(self, data: st.DataObject, num_finished: int) -> None:
        """Siblings may finish on an engine before `Abort` arrives there."""
        event = self.draw_event(data, RequestFinished)
        if event is None:
            return
        self.workers.pending.remove(event)
        actions = self.workers.deliver(RequestFailed(event.engine, event.request, "refused"))
        for action in [action for action in actions if isinstance(action, Abort)]:
            early, unfinished = action.requests[:num_finished], action.requests[num_finished:]
            self.workers.pending.remove(RequestsAborted(action.engine, action.requests, 0))
            self.workers.pending.append(RequestsAborted(action.engine, unfinished, 7))
            self.workers.pending += [finished(action.engine, request, event.version) for request in early]

    @precondition(has_pending)
    @rule(data=st.data(), is_flat=st.booleans())
    def a_group_is_filtered_or_fails(self, data: st.DataObject, is_flat: bool) -> None:
        if event := self.draw_event(data, GroupScored):
            flat = GroupScored(event.group, (1.0,) * len(event.rewards))
            self.workers.pending.remove(event)
            self.workers.deliver(flat if is_flat else ScoringFailed(event.group, "no answer"))

    @precondition(has_pending)
    @rule(data=st.data())
    def a_migration_fails(self, data: st.DataObject) -> None:
        if event := self.draw_event(data, Migrated):
            self.workers.deliver(
                MigrationFailed(event.request, event.source, event.destination, "lease over")
            )

    @precondition(has_pending)
    @rule(data=st.data())
    def a_load_fails(self, data: st.DataObject) -> None:
        if event := self.draw_event(data, Loaded):
            self.workers.deliver(LoadFailed(event.engine, event.version, "no memory"))

    @precondition(has_pending)
    @rule(data=st.data(), ess=st.sampled_from([0.4, 0.7, 0.9]), kl=st.sampled_from([0.0, 0.07, 0.2]))
    def a_step_measures_drift(self, data: st.DataObject, ess: float, kl: float) -> None:
        if event := self.draw_event(data, Trained):
            self.workers.pending.remove(event)
            self.workers.deliver(replace(event, ess=ess, kl=kl))

    @precondition(has_pending)
    @rule(data=st.data())
    def a_step_fails(self, data: st.DataObject) -> None:
        if event := self.draw_event(data, Trained):
            self.workers.deliver(StepFailed(event.step, "no memory"))

    @precondition(has_engines)
    @rule(
        data=st.data(),
        num_tokens=st.integers(1, 9),
        rate=st.sampled_from([0.0, 10.0, 30.0]),
        kv_usage=st.sampled_from([0.1, 0.95]),
    )
    def an_engine_reports_progress(
        self, data: st.DataObject, num_tokens: int, rate: float, kv_usage: float
    ) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        state = self.workers.state
        requests = state.engines[engine].requests
        lengths = tuple((request, state.requests[request].num_tokens + num_tokens) for request in requests)
        self.workers.deliver(ProgressReported(engine, lengths, rate, kv_usage))

    @precondition(is_running)
    @rule()
    def the_orchestrator_is_restored_from_a_snapshot(self) -> None:
        snapshot = json.dumps(codec.state_to_json(self.workers.state))
        restored = codec.state_from_json(json.loads(snapshot))
        self.workers.orchestrator = Orchestrator(restored.limits, restored)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.workers.now += seconds
        wakeup = self.workers.orchestrator.next_wakeup()
        if wakeup is not None and wakeup <= self.workers.now:
            self.workers.deliver(TimerFired())
            later = self.workers.orchestrator.next_wakeup()
            assert later is None or later > self.workers.now, "the timer would fire forever"

    def teardown(self) -> None:
        """Without further failures and with at least one engine, every run finishes."""
        if not hasattr(self, "workers"):
            return
        if self.is_running() and all(engine.is_draining for engine in self.workers.state.engines.values()):
            self.workers.deliver(EngineJoined(self.num_joined, 1, 1))
        self.the_trainer_is_replaced(0) if self.is_running() else None
        for _ in range(MAX_EVENTS_TO_THE_END):
            if self.workers.orchestrator.done:
                return self.workers.checker.finish()
            assert self.workers.deliverable(), f"deadlock: {self.workers.state}"
            self.workers.deliver(self.workers.deliverable()[0])
        raise AssertionError("the run does not finish")


RandomEvents.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRandomEvents = RandomEvents.TestCase
