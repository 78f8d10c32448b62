"""Figures 5 and 6 of LongCat-Flash-Thinking, played by the orchestrator: design, section 6."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, prompts, running
from tests.core.stations import Stations, limits

from dora.core.actions import Abort, Admit, Commit, Drop, Fail, Filter, Generate, Load, Migrate, Train
from dora.core.events import Loaded, Migrated, PromptsFetched, RequestFinished, Woken
from dora.core.placement import shares
from dora.core.records import GroupId, RequestId
from dora.core.state import State

A, B, C, D = range(4)


def request(row: int) -> RequestId:
    return RequestId(0, row, 0)


def figure_6(level_running: bool) -> State:
    """Before: A(v0){2}, B(v1){6}, C(v0){4}, D(v1){7, 8}; 1, 3 and 5 are done. 4 has less KV than 2."""
    bounds = limits(num_steps=20, batch_size=4, max_staleness=2, level_running=level_running)
    state = midway(bounds, newest=1)
    for letter, version in ((A, 0), (B, 1), (C, 0), (D, 1)):
        engine(state, letter, rows=2, held={version})
    for letter, version, row, num_tokens in (
        (A, 0, 2, 90),
        (C, 0, 4, 40),
        (B, 1, 6, 30),
        (D, 1, 7, 30),
        (D, 1, 8, 20),
    ):
        running(state, letter, version, row, num_tokens=num_tokens)
    state.touched.clear()  # what follows from this was ordered before
    return state


def test_figure_6_ends_with_two_requests_on_each_of_four_engines() -> None:
    state = figure_6(level_running=False)
    prompts(state, first=9, count=4)
    run = Stations(state.limits, state=state)
    run.now = state.limits.rebalance_interval_s

    orders = run.tell(Woken())
    assert [o for o in orders if isinstance(o, Migrate)] == [Migrate(request(4), C, A, 0, "flip")]
    assert Generate(B, 1, (request(9),)) in orders, "what is supplemented is of the newest version"
    assert not run.orders(Drop), "not before request 4 has left"

    orders = run.tell(Migrated(request(4), C, A, 40, 4000, 0.01, 0.01))
    assert orders[:2] == [Drop(C, 0), Load(C, 1)]
    run.tell(Loaded(C, 1, "v1"))
    assert [run.rows(letter) for letter in (A, B, C, D)] == [[2, 4], [6, 9], [10, 11], [7, 8]]
    assert [sorted(run.state.engines[letter].held) for letter in (A, B, C, D)] == [[0], [1], [1], [1]]
    assert [order.version for order in run.orders(Admit)] == [1, 1, 1]
    assert len(run.orders(Migrate)) == 1


def test_figure_6_also_moves_8_where_running_requests_are_levelled() -> None:
    """As drawn, the prompts come last: first all is moved, then every engine gets what it lacks."""
    state = figure_6(level_running=True)
    state.next_index, state.num_fetching = 9, 4
    run = Stations(state.limits, state=state)
    run.now = state.limits.rebalance_interval_s

    assert run.tell(Woken()) == [Migrate(request(4), C, A, 0, "flip")]
    assert run.tell(Migrated(request(4), C, A, 40, 4000, 0.01, 0.01))[:2] == [Drop(C, 0), Load(C, 1)]
    assert run.tell(Loaded(C, 1, "v1"))[:1] == [Migrate(request(8), D, C, 1, "level")]
    run.tell(Migrated(request(8), D, C, 20, 2000, 0.01, 0.01))
    run.tell(PromptsFetched(9, tuple(GroupId(0, row) for row in range(9, 13))))
    assert [run.rows(letter) for letter in (A, B, C, D)] == [[2, 4], [6, 9], [8, 10], [7, 11]]


def test_figure_6_shares_out_one_engine_to_version_0_and_three_to_version_1() -> None:
    """Three requests are supplemented at version 1, to the target of 8: R = {0: 2, 1: 3 + 3}."""
    assert shares({0: 2, 1: 3 + 3}, 4, [0, 1]) == {0: 1, 1: 3}


def figure_5(engines: list[tuple[int, tuple[int, ...]]]) -> State:
    """Step n = 2 starts; (version, requests) of each engine, which has no row free."""
    state = midway(limits(num_steps=20, batch_size=6, max_staleness=2, rush=False), newest=2)
    for number, (version, rows) in enumerate(engines):
        engine(state, number, rows=len(rows), held={version})
    for number, (version, rows) in enumerate(engines):
        running(state, number, version, *rows)
    prompts(state, first=9, count=12)
    state.touched.clear()
    return state


FEW = [(0, (1, 2, 8)), (1, (3, 4)), (2, (5, 6, 7))]
MANY = [(0, (1,)), (0, (2,)), (1, (3,)), (1, (4,)), (2, (5,)), (2, (6,)), (2, (7,)), (0, (8,))]


@pytest.mark.parametrize(
    ("engines", "filled"),
    [(FEW, {1, 2}), (MANY, {2})],
    ids=["an engine for each version", "an engine for each row"],
)
def test_figure_5_closes_its_batch_without_a_discard(
    engines: list[tuple[int, tuple[int, ...]]], filled: set[int]
) -> None:
    """Engine 1 of the few keeps version 1 for request 4, so what 3 leaves is filled with 1, as drawn."""
    state = figure_5(engines)
    run = Stations(state.limits, state=state)
    for row in (5, 8, 3, 1, 6, 2):
        assert run.orders(Train) == [], f"the batch is closed before {row} finishes"
        run.finish(GroupId(0, row))
        run.settle(but=lambda fact: not isinstance(fact, Loaded | Migrated))
    assert run.orders(Train) == [Train(2, tuple(GroupId(0, row) for row in (5, 8, 3, 1, 6, 2)))]
    assert [order.group.row for order in run.orders(Commit)] == [5, 8, 3, 1, 6, 2]
    versions = {order.version for order in run.orders(Admit)}
    assert versions == filled, "version 0 is about to expire, and nothing is admitted at it"
    assert not [order for order in run.given if isinstance(order, Abort | Fail | Filter)]
    assert {4, 7} <= {r.row for r in run.state.requests}, "what is not in the batch goes on"


def test_what_figure_5_leaves_unfinished_is_trained_later() -> None:
    """The figure's own requests 4 and 7 finish after the batch, and none is generated twice."""
    state = figure_5(FEW)
    run = Stations(state.limits, state=state)
    for row in (5, 8, 3, 1, 6, 2):
        run.finish(GroupId(0, row))
    run.settle(but=lambda fact: isinstance(fact, RequestFinished) and fact.request.row in (4, 7))
    for row in (4, 7):
        run.finish(GroupId(0, row))
    run.settle()
    assert run.core.done
    trained = [group for order in run.orders(Train) for group in order.groups]
    assert {GroupId(0, 4), GroupId(0, 7)} <= {*trained}
    generated = [r for order in run.orders(Generate) for r in order.requests]
    assert len(generated) == len({*generated})
