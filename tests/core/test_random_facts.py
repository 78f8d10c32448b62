"""Whatever legal facts are told, in whatever order: the invariants hold and the run comes to its end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.stations import Stations, finished

from dora.core import snapshot
from dora.core.actions import Abort
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    StepFailed,
    Trained,
    Woken,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import AgingRule, Limits

Fact = TypeVar("Fact", bound=Event)

MAX_ENGINES = 5
MAX_FACTS_TO_THE_END = 5_000
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
    load_interval=st.sampled_from([1, 1, 2]),
    is_deferred=st.booleans(),
    is_static=st.sampled_from([False, False, True]),
    level_running=st.booleans(),
    rush=st.booleans(),
    rebalance_interval_s=st.sampled_from([0.1, 1.0]),
).flatmap(
    lambda limits: st.sampled_from(
        [limits, replace(limits, aging=AgingRule(0.5, 0.1, 1)) if limits.max_staleness else limits]
    )
)


class RandomFacts(RuleBasedStateMachine):
    """Stations that answer late, out of order and badly; `Stations.tell` checks after every fact."""

    @initialize(limits=any_limits, num_prompts=st.integers(1, 9))
    def begin(self, limits: Limits, num_prompts: int) -> None:
        self.stations = Stations(limits, num_prompts)
        self.num_joined = 0
        self.from_step = 0  # of the last checkpoint that was gone on from

    @property
    def engines(self) -> list[int]:
        return sorted(self.stations.state.engines)

    def is_going(self) -> bool:
        return not self.stations.core.done

    def has_answers(self) -> bool:
        return self.is_going() and bool(self.stations.possible())

    def has_engines(self) -> bool:
        return self.is_going() and bool(self.engines)

    def may_join(self) -> bool:
        return self.is_going() and len(self.engines) < MAX_ENGINES

    def draw(self, data: st.DataObject, kind: type[Fact]) -> Fact | None:
        """One of the possible facts of a kind; the test tells another in its place."""
        facts = [fact for fact in self.stations.possible() if isinstance(fact, kind)]
        return data.draw(st.sampled_from(facts)) if facts else None

    @precondition(may_join)
    @rule(rows=st.integers(1, 5), slots=st.integers(1, 3), is_colocated=st.sampled_from([False, False, True]))
    def an_engine_joins(self, rows: int, slots: int, is_colocated: bool) -> None:
        self.stations.tell(EngineJoined(self.num_joined, rows, slots, is_colocated))
        self.num_joined += 1

    @precondition(has_engines)
    @rule(data=st.data())
    def an_engine_is_lost(self, data: st.DataObject) -> None:
        self.stations.tell(EngineLost(data.draw(st.sampled_from(self.engines)), "killed"))

    @precondition(has_engines)
    @rule(data=st.data())
    def an_engine_is_asked_to_leave(self, data: st.DataObject) -> None:
        self.stations.tell(DrainAsked(data.draw(st.sampled_from(self.engines))))

    @rule(num_redone=st.integers(0, 2))
    def everything_dies(self, num_redone: int) -> None:
        """Also after the end."""
        num_trained = self.stations.state.num_trained // self.stations.state.limits.batch_size
        self.stations.die(max(self.from_step, num_trained - num_redone))
        self.from_step = max(self.from_step, num_trained - num_redone)
        self.num_joined = 0

    @precondition(is_going)
    @rule()
    def the_trainer_is_lost(self) -> None:
        if not self.stations.state.is_trainer_lost:
            self.stations.lose_trainer()

    @precondition(is_going)
    @rule(num_redone=st.integers(0, 2))
    def the_trainer_is_replaced(self, num_redone: int) -> None:
        state = self.stations.state
        if state.is_trainer_lost:
            num_trained = state.num_trained // state.limits.batch_size
            self.from_step = max(self.from_step, num_trained - num_redone)
            self.stations.replace_trainer(self.from_step)

    @precondition(has_answers)
    @rule(data=st.data())
    def any_answer_comes(self, data: st.DataObject) -> None:
        self.stations.tell(data.draw(st.sampled_from(self.stations.possible())))

    @precondition(has_answers)
    @rule(num=st.integers(1, 10))
    def the_oldest_answers_come(self, num: int) -> None:
        for fact in self.stations.possible()[:num]:
            if fact in self.stations.possible() and self.is_going():
                self.stations.tell(fact)

    @precondition(has_answers)
    @rule(data=st.data(), num_finished=st.integers(0, 3))
    def a_request_fails(self, data: st.DataObject, num_finished: int) -> None:
        """Siblings may finish on an engine before the order to abort them reaches it."""
        fact = self.draw(data, RequestFinished)
        if fact is None:
            return
        self.stations.pending.remove(fact)
        orders = self.stations.tell(RequestFailed(fact.engine, fact.request, "refused"))
        for order in [order for order in orders if isinstance(order, Abort)]:
            early, late = order.requests[:num_finished], order.requests[num_finished:]
            self.stations.pending.remove(RequestsAborted(order.engine, order.requests, 0))
            self.stations.pending.append(RequestsAborted(order.engine, late, 7))
            self.stations.pending += [finished(order.engine, request, fact.version) for request in early]

    @precondition(has_answers)
    @rule(data=st.data(), is_flat=st.booleans())
    def a_group_teaches_nothing(self, data: st.DataObject, is_flat: bool) -> None:
        if fact := self.draw(data, GroupScored):
            flat = GroupScored(fact.group, (1.0,) * len(fact.rewards))
            self.stations.pending.remove(fact)
            self.stations.tell(flat if is_flat else GroupUnscorable(fact.group, "no answer"))

    @precondition(has_answers)
    @rule(data=st.data())
    def a_move_fails(self, data: st.DataObject) -> None:
        if fact := self.draw(data, Migrated):
            self.stations.tell(MigrationFailed(fact.request, fact.source, fact.destination, "lease over"))

    @precondition(has_answers)
    @rule(data=st.data())
    def a_load_fails(self, data: st.DataObject) -> None:
        if fact := self.draw(data, Loaded):
            self.stations.tell(LoadFailed(fact.engine, fact.version, "no memory"))

    @precondition(has_answers)
    @rule(data=st.data(), ess=st.sampled_from([0.4, 0.7, 0.9]), kl=st.sampled_from([0.0, 0.07, 0.2]))
    def a_step_says_how_far_the_policy_has_gone(self, data: st.DataObject, ess: float, kl: float) -> None:
        if fact := self.draw(data, Trained):
            self.stations.pending.remove(fact)
            self.stations.tell(replace(fact, ess=ess, kl=kl))

    @precondition(has_answers)
    @rule(data=st.data())
    def a_step_fails(self, data: st.DataObject) -> None:
        if fact := self.draw(data, Trained):
            self.stations.tell(StepFailed(fact.step, "no memory"))

    @precondition(has_engines)
    @rule(
        data=st.data(),
        num_tokens=st.integers(1, 9),
        pace=st.sampled_from([0.0, 10.0, 30.0]),
        kv_share=st.sampled_from([0.1, 0.95]),
    )
    def an_engine_reports(self, data: st.DataObject, num_tokens: int, pace: float, kv_share: float) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        state = self.stations.state
        requests = state.engines[engine].requests
        lengths = tuple((request, state.requests[request].num_tokens + num_tokens) for request in requests)
        self.stations.tell(Progressed(engine, lengths, pace, kv_share))

    @precondition(is_going)
    @rule()
    def the_orchestrator_dies_and_comes_back(self) -> None:
        kept = json.dumps(snapshot.to_json(self.stations.state))
        restored = snapshot.from_json(json.loads(kept))
        self.stations.core = Orchestrator(restored.limits, restored)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.stations.now += seconds
        wakeup = self.stations.core.next_wakeup()
        if wakeup is not None and wakeup <= self.stations.now:
            self.stations.tell(Woken())
            later = self.stations.core.next_wakeup()
            assert later is None or later > self.stations.now, "it would be woken for ever"

    def teardown(self) -> None:
        """From here on all goes well: with one engine left, every run comes to its end."""
        if not hasattr(self, "stations"):
            return
        if self.is_going() and all(engine.is_leaving for engine in self.stations.state.engines.values()):
            self.stations.tell(EngineJoined(self.num_joined, 1, 1))
        self.the_trainer_is_replaced(0) if self.is_going() else None
        for _ in range(MAX_FACTS_TO_THE_END):
            if self.stations.core.done:
                return self.stations.ledger.close()
            assert self.stations.possible(), f"deadlock: {self.stations.state}"
            self.stations.tell(self.stations.possible()[0])
        raise AssertionError("the run does not end")


RandomFacts.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRandomFacts = RandomFacts.TestCase
