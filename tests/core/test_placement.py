"""Placement: each request runs once, on its version, on a free row, near its siblings."""

from __future__ import annotations

from tests.core.fake_workers import FakeWorkers, finished, is_work, limits, one_engine
from tests.core.midrun import add_engine, add_running, add_waiting, request, state_at

from dora.core.actions import Abort, Fail, Generate, Load
from dora.core.bound import sort_by_deadline
from dora.core.events import EngineLost, ProgressReported, RequestsAborted, TimerFired
from dora.core.placement import place_waiting
from dora.core.state import State
from dora.core.types import AdaptiveStalenessRule, GroupId


def test_siblings_stay_together_where_rows_allow() -> None:
    state = state_at(limits(group_size=3), newest=0)
    add_engine(state, 0, rows=4, loaded={0})
    add_engine(state, 1, rows=3, loaded={0})
    add_waiting(state, 0, 0, 1)
    siblings = [request(row, sibling) for row in (0, 1) for sibling in range(3)]
    assert place_waiting(state) == [Generate(0, 0, tuple(siblings[:3])), Generate(1, 0, tuple(siblings[3:]))]


def test_an_engine_queues_requests_once_no_row_is_free() -> None:
    state = state_at(limits(num_queued=1), newest=0)
    add_engine(state, 0, rows=1, loaded={0}, num_queued=1)
    add_engine(state, 1, rows=1, loaded={0}, num_queued=1)
    add_waiting(state, 0, 0, 1, 2, 3, 4)
    placed = {
        action.engine: action.requests for action in place_waiting(state) if isinstance(action, Generate)
    }
    assert placed == {0: (request(0, 0), request(2, 0)), 1: (request(1, 0), request(3, 0))}
    assert state.num_waiting(0) == 1


def test_older_versions_are_placed_first() -> None:
    state = state_at(limits(), newest=4)
    add_engine(state, 0, rows=1, slots=2, loaded={3, 4})
    add_waiting(state, 4, 4)
    add_waiting(state, 3, 3)
    assert place_waiting(state) == [Generate(0, 3, (request(3, 0),))]


def state_with_reduced_staleness() -> State:
    """Groups of version 3 were admitted under max_staleness, those of version 4 after it was reduced."""
    bounds = limits(num_steps=20, max_staleness=4, adaptive_staleness=AdaptiveStalenessRule(0.5, 0.1, 1))
    state = state_at(bounds, newest=4)
    add_waiting(state, 3, 3)
    state.adaptive_staleness.reduction = 4
    add_waiting(state, 4, 4)
    return state


def test_with_an_adaptive_bound_the_nearest_deadline_is_placed_first() -> None:
    state = state_with_reduced_staleness()
    assert [group.deadline for group in state.groups.values()] == [7, 4]
    add_engine(state, 0, rows=1, slots=2, loaded={3, 4})
    assert place_waiting(state) == [Generate(0, 4, (request(4, 0),))]


def test_with_an_adaptive_bound_the_nearest_deadline_is_loaded_first() -> None:
    state = state_with_reduced_staleness()
    state.stored_versions[5], state.newest_published = "v5", 5
    add_engine(state, 0, rows=4, loaded=())
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    assert run.actions(Load) == [Load(0, 4)]


def test_versions_without_groups_come_last_with_an_adaptive_bound() -> None:
    assert sort_by_deadline(state_with_reduced_staleness(), [5, 2, 3, 4]) == [4, 3, 2, 5]
    state = state_with_reduced_staleness()
    state.limits = limits()
    assert sort_by_deadline(state, [5, 2, 3, 4]) == [2, 3, 4, 5]


def test_a_request_waits_for_an_engine_that_holds_its_version() -> None:
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=4, loaded={1})
    add_engine(state, 1, rows=1, loaded={0})
    add_waiting(state, 0, 0, 1)
    assert place_waiting(state) == [Generate(1, 0, (request(0, 0),))]
    assert list(state.waiting[0]) == [request(1, 0)]


def test_waiting_requests_are_placed_last_on_engines_that_evict_their_version() -> None:
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=9, loaded={0}, evicting=0, next_load=1)
    add_engine(state, 1, rows=1, loaded={0})
    add_waiting(state, 0, 0, 1)
    assert place_waiting(state) == [Generate(0, 0, (request(1, 0),)), Generate(1, 0, (request(0, 0),))]


def test_a_group_too_large_for_one_engine_is_split() -> None:
    run = one_engine(limits(batch_size=1, group_size=5), rows=2, slots=1)
    run.join(1, rows=3, slots=1)
    run.deliver_all(unless=is_work)
    assert sorted(len(action.requests) for action in run.actions(Generate)) == [2, 3]


def test_a_group_larger_than_all_rows_is_generated_one_after_the_other() -> None:
    run = one_engine(limits(num_steps=2, group_size=5), rows=2, slots=1)
    run.deliver_all()
    assert run.orchestrator.done


def test_one_failed_sibling_fails_its_group_and_aborts_the_others() -> None:
    run = one_engine(limits(batch_size=1, group_size=3), rows=2, slots=1)
    run.join(1, rows=1, slots=1)
    run.deliver_all(unless=is_work)
    actions = run.fail_request(request(0, 0))
    assert actions[:3] == [
        Abort(0, (request(0, 1),)),
        Abort(1, (request(0, 2),)),
        Fail(GroupId(0, 0), "refused"),
    ]
    assert GroupId(0, 0) not in run.state.groups


def test_a_waiting_sibling_of_a_failed_group_is_never_generated() -> None:
    run = one_engine(limits(group_size=3), rows=2, slots=1)
    run.deliver_all(unless=is_work)
    run.fail_request(request(0, 0))
    run.deliver_all()
    assert request(0, 2) not in [r for action in run.actions(Generate) for r in action.requests]
    assert run.orchestrator.done


def test_the_rows_of_aborted_requests_are_free_only_once_the_abort_is_confirmed() -> None:
    run = one_engine(limits(batch_size=1, group_size=3), rows=3, slots=1)
    run.deliver_all(unless=is_work)
    run.fail_request(request(0, 0))
    on = run.state.engines[0]
    assert set(on.aborting) == {request(0, 1), request(0, 2)}
    assert list(on.requests) == [request(1, 0)]
    run.deliver(RequestsAborted(0, (request(0, 1), request(0, 2)), 17))
    assert list(on.requests) == [request(1, 0), request(1, 1), request(1, 2)]
    assert run.state.num_aborted_tokens == 17


def test_a_request_that_finishes_before_its_abort_frees_its_row_and_is_not_scored() -> None:
    run = one_engine(limits(batch_size=1, group_size=2), rows=2, slots=1)
    run.deliver_all(unless=is_work)
    run.fail_request(request(0, 0))
    actions = run.deliver(finished(0, request(0, 1), 0))
    assert [action.requests for action in actions if isinstance(action, Generate)] == [(request(1, 1),)]
    assert run.deliver(RequestsAborted(0, (), 0)) == []


def test_requests_of_a_lost_engine_restart_on_their_version_before_all_others() -> None:
    run = one_engine(limits(group_size=3, max_staleness=1), rows=4, slots=1)
    run.join(1, rows=1, slots=1)
    run.deliver_all(unless=is_work)
    assert list(run.state.waiting[0]) == [request(1, 2)]
    lost = list(run.state.engines[0].requests)
    run.deliver(ProgressReported(0, tuple((r, 10) for r in lost)))
    run.deliver(EngineLost(0, "killed"))
    assert list(run.state.waiting[0]) == [*lost, request(1, 2)]
    assert run.state.num_regenerated_tokens == 10 * len(lost)
    num_before = len(run.actions(Generate))
    for event in [event for event in run.pending if is_work(event)]:
        run.deliver(event)
    assert run.actions(Generate)[num_before:] == [Generate(1, 0, (lost[0],))]
    run.deliver_all()
    assert run.orchestrator.done


def test_new_requests_go_first_to_engines_that_decode_nothing_older() -> None:
    """The fewer rows an engine decodes, the faster are its requests near their deadline."""
    state = state_at(limits(num_steps=20, max_staleness=2), newest=1)
    add_engine(state, 0, rows=9, slots=2, loaded={0, 1})
    add_engine(state, 1, rows=4, slots=2, loaded={0, 1})
    add_running(state, 0, 0, 5)
    add_waiting(state, 1, 6)
    assert place_waiting(state) == [Generate(1, 1, (request(6, 0),))]
