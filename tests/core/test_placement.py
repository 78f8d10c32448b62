"""Which engine runs which request: at its version, on free rows, siblings together, each once."""

from __future__ import annotations

from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, finished, is_work, limits

from dora.core.actions import Abort, Fail, Generate, Load
from dora.core.deadlines import nearest_first
from dora.core.events import EngineLost, Progressed, RequestsAborted, Woken
from dora.core.placement import place
from dora.core.records import AgingRule, GroupId, RequestId
from dora.core.state import State


def request(row: int, sibling: int) -> RequestId:
    return RequestId(0, row, sibling)


def test_siblings_stay_together_where_rows_allow() -> None:
    state = midway(limits(group_size=3), newest=0)
    engine(state, 0, rows=4, held={0})
    engine(state, 1, rows=3, held={0})
    waiting(state, 0, 0, 1)
    siblings = [request(row, sibling) for row in (0, 1) for sibling in range(3)]
    assert place(state) == [Generate(0, 0, tuple(siblings[:3])), Generate(1, 0, tuple(siblings[3:]))]


def test_older_versions_are_placed_first() -> None:
    state = midway(limits(), newest=4)
    engine(state, 0, rows=1, slots=2, held={3, 4})
    waiting(state, 4, 4)
    waiting(state, 3, 3)
    assert place(state) == [Generate(0, 3, (request(3, 0),))]


def aged() -> State:
    """Version 3 was admitted at while the bound was wide, version 4 after it had been lowered."""
    bounds = limits(num_steps=20, max_staleness=4, aging=AgingRule(0.5, 0.1, 1))
    state = midway(bounds, newest=4)
    waiting(state, 3, 3)
    state.aging.lowered = 4
    waiting(state, 4, 4)
    return state


def test_with_an_adaptive_bound_the_nearest_deadline_is_placed_first() -> None:
    state = aged()
    assert [group.deadline for group in state.groups.values()] == [7, 4]
    engine(state, 0, rows=1, slots=2, held={3, 4})
    assert place(state) == [Generate(0, 4, (request(4, 0),))]


def test_with_an_adaptive_bound_the_nearest_deadline_is_loaded_first() -> None:
    state = aged()
    state.store[5], state.newest = "v5", 5
    engine(state, 0, rows=4, held=())
    run = Stations(state.limits, state=state)
    run.tell(Woken())
    assert run.orders(Load) == [Load(0, 4)]


def test_what_has_no_deadline_is_last_with_an_adaptive_bound() -> None:
    assert nearest_first(aged(), [5, 2, 3, 4]) == [4, 3, 2, 5]
    state = aged()
    state.limits = limits()
    assert nearest_first(state, [5, 2, 3, 4]) == [2, 3, 4, 5]


def test_a_request_waits_for_an_engine_that_holds_its_version() -> None:
    state = midway(limits(), newest=1)
    engine(state, 0, rows=4, held={1})
    engine(state, 1, rows=1, held={0})
    waiting(state, 0, 0, 1)
    assert place(state) == [Generate(1, 0, (request(0, 0),))]
    assert list(state.waiting[0]) == [request(1, 0)]


def test_what_waits_already_is_placed_also_where_a_slot_is_cleared_but_there_last() -> None:
    state = midway(limits(), newest=1)
    engine(state, 0, rows=9, held={0}, clearing=0, wanted=1)
    engine(state, 1, rows=1, held={0})
    waiting(state, 0, 0, 1)
    assert place(state) == [Generate(0, 0, (request(1, 0),)), Generate(1, 0, (request(0, 0),))]


def test_a_group_too_large_for_one_engine_is_spread() -> None:
    run = Stations(limits(batch_size=1, group_size=5))
    run.join(0, rows=2, slots=1)
    run.join(1, rows=3, slots=1)
    run.settle(but=is_work)
    assert sorted(len(order.requests) for order in run.orders(Generate)) == [2, 3]


def test_a_group_larger_than_all_rows_is_generated_one_after_the_other() -> None:
    run = Stations(limits(num_steps=2, group_size=5))
    run.join(0, rows=2, slots=1)
    run.settle()
    assert run.core.done


def test_one_failed_sibling_fails_its_group_and_aborts_the_others() -> None:
    run = Stations(limits(batch_size=1, group_size=3))
    run.join(0, rows=2, slots=1)
    run.join(1, rows=1, slots=1)
    run.settle(but=is_work)
    orders = run.refuse(request(0, 0))
    assert orders[:3] == [
        Abort(0, (request(0, 1),)),
        Abort(1, (request(0, 2),)),
        Fail(GroupId(0, 0), "refused"),
    ]
    assert GroupId(0, 0) not in run.state.groups


def test_a_waiting_sibling_of_a_failed_group_is_never_generated() -> None:
    run = Stations(limits(group_size=3))
    run.join(0, rows=2, slots=1)
    run.settle(but=is_work)
    run.refuse(request(0, 0))
    run.settle()
    assert request(0, 2) not in [r for order in run.orders(Generate) for r in order.requests]
    assert run.core.done


def test_the_rows_of_aborted_requests_are_free_only_once_the_abort_is_confirmed() -> None:
    run = Stations(limits(batch_size=1, group_size=3))
    run.join(0, rows=3, slots=1)
    run.settle(but=is_work)
    run.refuse(request(0, 0))
    on = run.state.engines[0]
    assert set(on.aborting) == {request(0, 1), request(0, 2)}
    assert list(on.requests) == [request(1, 0)]
    run.tell(RequestsAborted(0, (request(0, 1), request(0, 2)), 17))
    assert list(on.requests) == [request(1, 0), request(1, 1), request(1, 2)]
    assert run.state.num_aborted_tokens == 17


def test_a_request_that_finished_before_its_abort_came_frees_its_row_and_is_not_scored() -> None:
    run = Stations(limits(batch_size=1, group_size=2))
    run.join(0, rows=2, slots=1)
    run.settle(but=is_work)
    run.refuse(request(0, 0))
    orders = run.tell(finished(0, request(0, 1), 0))
    assert [order.requests for order in orders if isinstance(order, Generate)] == [(request(1, 1),)]
    assert run.tell(RequestsAborted(0, (), 0)) == []


def test_requests_of_a_lost_engine_are_generated_again_on_their_version_before_all_others() -> None:
    run = Stations(limits(group_size=3, max_staleness=1))
    run.join(0, rows=4, slots=1)
    run.join(1, rows=1, slots=1)
    run.settle(but=is_work)
    assert list(run.state.waiting[0]) == [request(1, 2)]
    lost = list(run.state.engines[0].requests)
    run.tell(Progressed(0, tuple((r, 10) for r in lost)))
    run.tell(EngineLost(0, "killed"))
    assert list(run.state.waiting[0]) == [*lost, request(1, 2)]
    assert run.state.num_regenerated_tokens == 10 * len(lost)
    num_before = len(run.orders(Generate))
    for fact in [fact for fact in run.pending if is_work(fact)]:
        run.tell(fact)
    assert run.orders(Generate)[num_before:] == [Generate(1, 0, (lost[0],))]
    run.settle()
    assert run.core.done


def test_new_requests_go_first_to_engines_that_decode_nothing_older() -> None:
    """The fewer rows an engine decodes, the faster are the tokens of what is nearer its deadline."""
    state = midway(limits(num_steps=20, max_staleness=2), newest=1)
    engine(state, 0, rows=9, slots=2, held={0, 1})
    engine(state, 1, rows=4, slots=2, held={0, 1})
    running(state, 0, 0, 5)
    waiting(state, 1, 6)
    assert place(state) == [Generate(1, 1, (request(6, 0),))]
