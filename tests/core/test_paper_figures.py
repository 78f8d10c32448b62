"""Figures 5 and 6 of LongCat-Flash-Thinking, reproduced by the orchestrator."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_prompts, add_running, request, state_at

from dora.core.actions import Abort, Admit, Commit, Drop, Fail, Filter, Generate, Load, Migrate, Train
from dora.core.events import Loaded, Migrated, PromptsFetched, RequestFinished, TimerFired
from dora.core.placement import apportion
from dora.core.state import State
from dora.core.types import GroupId

A, B, C, D = range(4)


def figure_6(balance_running: bool) -> State:
    """Before: A(v0){2}, B(v1){6}, C(v0){4}, D(v1){7, 8}; 1, 3 and 5 are done. 4 has less KV than 2."""
    bounds = limits(num_steps=20, batch_size=4, max_staleness=2, balance_running=balance_running)
    state = state_at(bounds, newest=1)
    for engine, version in ((A, 0), (B, 1), (C, 0), (D, 1)):
        add_engine(state, engine, rows=2, loaded={version})
    for engine, version, row, num_tokens in (
        (A, 0, 2, 90),
        (C, 0, 4, 40),
        (B, 1, 6, 30),
        (D, 1, 7, 30),
        (D, 1, 8, 20),
    ):
        add_running(state, engine, version, row, num_tokens=num_tokens)
    state.load_candidates.clear()  # the actions that follow were ordered before
    return state


def test_figure_6_ends_with_two_requests_on_each_of_four_engines() -> None:
    state = figure_6(balance_running=False)
    add_prompts(state, first=9, count=4)
    run = FakeWorkers(state.limits, state=state)
    run.now = state.limits.rebalance_interval_s

    actions = run.deliver(TimerFired())
    assert [o for o in actions if isinstance(o, Migrate)] == [Migrate(request(4), C, A, 0, "flip")]
    assert Generate(B, 1, (request(9),)) in actions, "the supplement is of the newest version"
    assert not run.actions(Drop), "not before request 4 has left"

    actions = run.deliver(Migrated(request(4), C, A, 40, 4000, 0.01, 0.01))
    assert actions[:2] == [Drop(C, 0), Load(C, 1)]
    run.deliver(Loaded(C, 1, "v1"))
    assert [run.dataset_rows(engine) for engine in (A, B, C, D)] == [[2, 4], [6, 9], [10, 11], [7, 8]]
    assert [sorted(run.state.engines[engine].loaded) for engine in (A, B, C, D)] == [[0], [1], [1], [1]]
    assert [action.version for action in run.actions(Admit)] == [1, 1, 1]
    assert len(run.actions(Migrate)) == 1


def test_figure_6_with_balance_running_also_migrates_request_8() -> None:
    """As drawn, prompts come last: first requests migrate, then free rows are filled."""
    state = figure_6(balance_running=True)
    state.next_index, state.num_fetching = 9, 4
    run = FakeWorkers(state.limits, state=state)
    run.now = state.limits.rebalance_interval_s

    assert run.deliver(TimerFired()) == [Migrate(request(4), C, A, 0, "flip")]
    assert run.deliver(Migrated(request(4), C, A, 40, 4000, 0.01, 0.01))[:2] == [Drop(C, 0), Load(C, 1)]
    assert run.deliver(Loaded(C, 1, "v1"))[:1] == [Migrate(request(8), D, C, 1, "level")]
    run.deliver(Migrated(request(8), D, C, 20, 2000, 0.01, 0.01))
    run.deliver(PromptsFetched(9, tuple(GroupId(0, row) for row in range(9, 13))))
    assert [run.dataset_rows(engine) for engine in (A, B, C, D)] == [[2, 4], [6, 9], [8, 10], [7, 11]]


def test_figure_6_gives_one_engine_to_version_0_and_three_to_version_1() -> None:
    """Version 1 is supplemented by three requests to the target of 8: R = {0: 2, 1: 3 + 3}."""
    assert apportion({0: 2, 1: 3 + 3}, 4, [0, 1]) == {0: 1, 1: 3}


def figure_5(engines: list[tuple[int, tuple[int, ...]]]) -> State:
    """Step n = 2 starts; `engines` are (version, requests), without free rows."""
    state = state_at(
        limits(num_steps=20, batch_size=6, max_staleness=2, prioritize_stragglers=False), newest=2
    )
    for number, (version, rows) in enumerate(engines):
        add_engine(state, number, rows=len(rows), loaded={version})
    for number, (version, rows) in enumerate(engines):
        add_running(state, number, version, *rows)
    add_prompts(state, first=9, count=12)
    state.load_candidates.clear()
    return state


FEW = [(0, (1, 2, 8)), (1, (3, 4)), (2, (5, 6, 7))]
MANY = [(0, (1,)), (0, (2,)), (1, (3,)), (1, (4,)), (2, (5,)), (2, (6,)), (2, (7,)), (0, (8,))]


@pytest.mark.parametrize(
    ("engines", "filled"),
    [(FEW, {1, 2}), (MANY, {2})],
    ids=["an engine for each version", "an engine for each row"],
)
def test_figure_5_completes_its_batch_without_discarding(
    engines: list[tuple[int, tuple[int, ...]]], filled: set[int]
) -> None:
    """In FEW, engine 1 keeps version 1 for request 4, so the row of 3 is filled with version 1, as drawn."""
    state = figure_5(engines)
    run = FakeWorkers(state.limits, state=state)
    for row in (5, 8, 3, 1, 6, 2):
        assert run.actions(Train) == [], f"the batch is closed before {row} finishes"
        run.finish_group(GroupId(0, row))
        run.deliver_all(unless=lambda event: not isinstance(event, Loaded | Migrated))
    assert run.actions(Train) == [Train(2, tuple(GroupId(0, row) for row in (5, 8, 3, 1, 6, 2)))]
    assert [action.group.row for action in run.actions(Commit)] == [5, 8, 3, 1, 6, 2]
    versions = {action.version for action in run.actions(Admit)}
    assert versions == filled, "version 0 is about to expire, and nothing is admitted at it"
    assert not [action for action in run.emitted if isinstance(action, Abort | Fail | Filter)]
    assert {4, 7} <= {r.row for r in run.state.requests}, "requests outside the batch continue"


def test_the_unfinished_requests_of_figure_5_are_trained_later() -> None:
    """The figure's own requests 4 and 7 finish after the batch, and none is generated twice."""
    state = figure_5(FEW)
    run = FakeWorkers(state.limits, state=state)
    for row in (5, 8, 3, 1, 6, 2):
        run.finish_group(GroupId(0, row))
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished) and event.request.row in (4, 7))
    for row in (4, 7):
        run.finish_group(GroupId(0, row))
    run.deliver_all()
    assert run.orchestrator.done
    trained = [group for action in run.actions(Train) for group in action.groups]
    assert {GroupId(0, 4), GroupId(0, 7)} <= {*trained}
    generated = [r for action in run.actions(Generate) for r in action.requests]
    assert len(generated) == len({*generated})
