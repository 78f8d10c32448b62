"""Under policies that break C1 what is under way goes on with newer versions, and nobody is left behind."""

from __future__ import annotations

import pytest
from tests.core import midway as mid
from tests.core.stations import limits

from dora.core.actions import Admit, Drop, Generate, Load
from dora.core.events import EngineLost, Loaded, RequestFinished, Woken
from dora.core.orchestrator import Orchestrator
from dora.core.records import Chunk, ProtocolError, RequestId
from dora.core.state import State


def renewing(newest: int = 1, **changes: int) -> State:
    rules = {"max_staleness": 4, "num_steps": 12, "batch_size": 4, **changes}
    return mid.midway(limits(breaks_c1=True, is_static=True, **rules), newest)


def loaded(state: State, engine: int, version: int) -> list[object]:
    """The engine has taken a version that it was told to load; the orders that follow."""
    state.engines[engine].loading = version
    state.touch(state.engines[engine])
    return [*Orchestrator(state.limits, state).handle(Loaded(engine, version, f"v{version}"), now=1.0)]


def test_what_runs_goes_on_with_the_version_that_its_engine_takes() -> None:
    state = renewing()
    mid.engine(state, 0, rows=2, held={0}, slots=2)
    mid.running(state, 0, 0, 0, 1, num_tokens=5)
    loaded(state, 0, 1)
    on = state.engines[0]
    assert set(on.requests.values()) == {1}
    assert on.kv_tokens[1] == 10
    assert dict(state.unfinished) == {1: 2}
    assert {group.version for group in state.groups.values()} == {0}  # and so is the deadline


def test_what_waits_begins_with_the_newest_that_any_engine_holds_the_oldest_first() -> None:
    state = renewing(newest=2)
    mid.engine(state, 0, rows=3, held={1}, slots=2)
    mid.engine(state, 1, rows=3, held={1}, slots=2)
    mid.running(state, 1, 1, 0, 1, 2)
    mid.waiting(state, 0, 3)
    mid.waiting(state, 1, 4)
    orders = loaded(state, 0, 2)
    assert [order for order in orders if isinstance(order, Generate)] == [
        Generate(0, 2, (RequestId(0, 3, 0), RequestId(0, 4, 0)))
    ]


def test_a_lost_answer_begins_again_with_the_newest() -> None:
    state = renewing()
    mid.engine(state, 0, rows=2, held={0}, slots=2)
    mid.engine(state, 1, rows=2, held={1}, slots=2)
    mid.running(state, 0, 0, 0)
    orders = Orchestrator(state.limits, state).handle(EngineLost(0, "test"), now=1.0)
    assert Generate(1, 1, (RequestId(0, 0, 0),)) in orders


def test_an_engine_that_leaves_keeps_no_other_from_going_on() -> None:
    """Its requests stay on it, for nothing is moved: their version is needed nowhere else."""
    state = renewing(newest=2)
    mid.engine(state, 0, rows=2, held={0}, slots=2, is_leaving=True)
    mid.running(state, 0, 0, 0)
    mid.engine(state, 1, rows=2, held={0, 1}, slots=2)
    mid.running(state, 1, 1, 1, 2)
    orders = Orchestrator(state.limits, state).handle(Woken(), now=9.0)
    assert [order for order in orders if isinstance(order, Drop | Load)] == [Drop(1, 0), Load(1, 2)]


def test_nothing_is_loaded_for_requests_that_cannot_be_moved() -> None:
    state = renewing(newest=1)
    mid.engine(state, 0, rows=2, held={0}, slots=2, is_leaving=True)
    mid.running(state, 0, 0, 0)
    mid.engine(state, 1, rows=2, held={1}, slots=2)
    orders = Orchestrator(state.limits, state).handle(Woken(), now=9.0)
    assert not any(isinstance(order, Load) for order in orders)


def test_an_engine_with_free_rows_catches_up_with_what_others_begin_with() -> None:
    """Though the interval would let it wait: nothing is begun any more with what it has."""
    state = renewing(newest=3, load_interval=4)
    mid.engine(state, 0, rows=2, held={2}, slots=2)
    mid.engine(state, 1, rows=2, held={3}, slots=2)
    mid.prompts(state, 0, 8)
    orders = Orchestrator(state.limits, state).handle(Woken(), now=9.0)
    assert Load(0, 3) in orders
    assert {order.version for order in orders if isinstance(order, Admit)} == {3}


@pytest.mark.parametrize(
    ("versions", "finished_on"), [((1, 0), 1), ((0, 0), 1), ((0, 2), 1), ((0, 1), 0)], ids=str
)
def test_segments_that_go_back_are_refused(versions: tuple[int, ...], finished_on: int) -> None:
    state = renewing(newest=2)
    mid.engine(state, 0, rows=2, held={0, 1}, slots=2)
    mid.running(state, 0, 1, 0)
    chunks = tuple(Chunk(version, f"v{version}", 2) for version in versions)
    fact = RequestFinished(0, RequestId(0, 0, 0), finished_on, 4, chunks, "stop")
    with pytest.raises(ProtocolError):
        Orchestrator(state.limits, state).handle(fact, now=1.0)
