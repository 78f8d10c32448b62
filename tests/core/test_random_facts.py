"""Whatever legal facts are told, in whatever order: the invariants hold and the run comes to its end."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.stations import Stations, finished

from dora.core.actions import Abort
from dora.core.events import (
    EngineJoined,
    EngineLost,
    GroupScored,
    GroupUnscorable,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Woken,
)
from dora.core.records import Limits

MAX_FACTS_TO_THE_END = 5_000
any_limits = st.builds(
    Limits,
    num_steps=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    group_size=st.integers(2, 3),
    max_staleness=st.integers(0, 3),
    filter_groups=st.booleans(),
    stall_report_s=st.sampled_from([0.0, 1.0]),
)


class RandomFacts(RuleBasedStateMachine):
    """Stations that answer late, out of order and badly; `Stations.tell` checks after every fact."""

    @initialize(limits=any_limits, num_prompts=st.integers(1, 9))
    def begin(self, limits: Limits, num_prompts: int) -> None:
        self.stations = Stations(limits, num_prompts)

    @property
    def engines(self) -> list[int]:
        return sorted(self.stations.state.engines)

    def is_going(self) -> bool:
        return not self.stations.core.done

    def has_pending(self) -> bool:
        return self.is_going() and bool(self.stations.pending)

    def has_engines(self) -> bool:
        return self.is_going() and bool(self.engines)

    @precondition(is_going)
    @rule(engine=st.integers(0, 3), rows=st.integers(1, 5), slots=st.integers(1, 3))
    def an_engine_joins(self, engine: int, rows: int, slots: int) -> None:
        if engine not in self.engines:
            self.stations.tell(EngineJoined(engine, rows, slots))

    @precondition(has_engines)
    @rule(data=st.data())
    def an_engine_is_lost(self, data: st.DataObject) -> None:
        self.stations.tell(EngineLost(data.draw(st.sampled_from(self.engines)), "killed"))

    @precondition(has_pending)
    @rule(data=st.data())
    def any_answer_comes(self, data: st.DataObject) -> None:
        self.stations.tell(data.draw(st.sampled_from(self.stations.possible())))

    @precondition(has_pending)
    @rule(num=st.integers(1, 10))
    def the_oldest_answers_come(self, num: int) -> None:
        for fact in self.stations.pending[:num]:
            if fact in self.stations.pending and self.is_going():
                self.stations.tell(fact)

    @precondition(has_pending)
    @rule(data=st.data(), num_finished=st.integers(0, 3))
    def a_request_fails(self, data: st.DataObject, num_finished: int) -> None:
        """Siblings may finish on an engine before the order to abort them reaches it."""
        finishes = [f for f in self.stations.pending if isinstance(f, RequestFinished)]
        if not finishes:
            return
        fact = data.draw(st.sampled_from(finishes))
        self.stations.pending.remove(fact)
        orders = self.stations.tell(RequestFailed(fact.engine, fact.request, "refused"))
        for order in [order for order in orders if isinstance(order, Abort)]:
            early, late = order.requests[:num_finished], order.requests[num_finished:]
            self.stations.pending.remove(RequestsAborted(order.engine, order.requests, 0))
            self.stations.pending.append(RequestsAborted(order.engine, late, 7))
            self.stations.pending += [finished(order.engine, request, fact.version) for request in early]

    @precondition(has_pending)
    @rule(data=st.data(), is_flat=st.booleans())
    def a_group_teaches_nothing(self, data: st.DataObject, is_flat: bool) -> None:
        scores = [f for f in self.stations.pending if isinstance(f, GroupScored)]
        if not scores:
            return
        fact = data.draw(st.sampled_from(scores))
        self.stations.pending.remove(fact)
        flat = GroupScored(fact.group, (1.0,) * len(fact.rewards))
        self.stations.tell(flat if is_flat else GroupUnscorable(fact.group, "no answer"))

    @precondition(has_engines)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def an_engine_reports_its_progress(self, data: st.DataObject, num_tokens: int) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        requests = self.stations.state.engines[engine].requests
        self.stations.tell(Progressed(engine, tuple((request, num_tokens) for request in requests)))

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
        if self.is_going() and not self.engines:
            self.stations.tell(EngineJoined(9, 1, 1))
        for _ in range(MAX_FACTS_TO_THE_END):
            if self.stations.core.done:
                return self.stations.ledger.close()
            assert self.stations.pending, f"deadlock: {self.stations.state}"
            self.stations.tell(self.stations.pending[0])
        raise AssertionError("the run does not end")


RandomFacts.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRandomFacts = RandomFacts.TestCase
