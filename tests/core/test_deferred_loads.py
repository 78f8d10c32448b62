"""Deferred loads: engines load in turn, each once it has a free row, or at once if the bound requires it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits
from tests.core.midrun import add_engine, add_running, add_waiting, state_at

from dora.core import weight_sync
from dora.core.actions import Action, Drop, Generate, Load
from dora.core.events import EngineLost, Loaded, LoadFailed, TimerFired, Trained
from dora.core.state import State
from dora.core.types import GroupId


def state_with_engines(num_engines: int, *, rows: int = 2, **changes: Any) -> State:
    """Engines with two slots, each decoding one request of version 1; version 2 was just published."""
    settings = {"num_steps": 9, "batch_size": 20, "max_staleness": 4, "defers_loads": True}
    state = state_at(limits(**(settings | changes)), newest=2)
    for number in range(num_engines):
        add_engine(state, number, rows=rows, slots=2, loaded={1})
        add_running(state, number, 1, number)
    return state


def engines_that_load(actions: list[Action]) -> list[int]:
    """Engines that are ordered to load version 2."""
    return [action.engine for action in actions if isinstance(action, Load) and action.version == 2]


@pytest.mark.parametrize(("num_engines", "num_loading"), [(2, 1), (7, 1), (8, 2), (13, 3)])
def test_at_most_a_quarter_of_the_engines_load_at_a_time(num_engines: int, num_loading: int) -> None:
    state = state_with_engines(num_engines)
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    loaded = engines_that_load(run.emitted)
    assert loaded == [*range(num_loading)]
    while len(loaded) < num_engines:
        done = next(number for number in loaded if run.state.engines[number].loading == 2)
        loaded += engines_that_load(run.deliver(Loaded(done, 2, "v2")))
    assert loaded == [*range(num_engines)]


def test_all_engines_load_at_once_without_defers_loads() -> None:
    state = state_with_engines(3, defers_loads=False)
    assert engines_that_load(weight_sync.load_versions(state)) == [0, 1, 2]


def test_idle_engines_wait_for_their_turn_too() -> None:
    state = state_at(limits(num_steps=9, defers_loads=True), newest=2)
    for number in (0, 1):
        add_engine(state, number, rows=2, loaded={1})
    assert weight_sync.load_versions(state) == [Drop(0, 1), Load(0, 2)]


@pytest.mark.parametrize("kind", [LoadFailed, EngineLost])
def test_after_a_failed_load_the_next_engine_loads(kind: type) -> None:
    state = state_with_engines(3, rows=4)
    run = FakeWorkers(state.limits, state=state)
    run.deliver(TimerFired())
    assert engines_that_load(run.emitted) == [0]
    actions = run.deliver(LoadFailed(0, 2, "damaged") if kind is LoadFailed else EngineLost(0, "killed"))
    assert engines_that_load(actions) == [1]
    run.deliver_all()
    assert run.orchestrator.done


def test_an_engine_without_a_free_row_does_not_load_yet() -> None:
    state = state_with_engines(1, rows=1)
    run = FakeWorkers(state.limits, state=state)
    assert engines_that_load(run.deliver(TimerFired())) == []
    run.deliver_all(unless=lambda event: engines_that_load(run.emitted) != [])
    assert engines_that_load(run.emitted) == [0]


def test_if_the_bound_requires_it_an_engine_loads_without_a_free_row() -> None:
    """A group admitted at version 1 from now on would be too old."""
    state = state_with_engines(1, rows=1, max_staleness=1)
    weight_sync.update_demand(state)
    assert state.is_newest_needed
    assert weight_sync.load_versions(state) == [Load(0, 2)]


def test_a_pinned_version_without_an_engine_is_loaded_at_once() -> None:
    state = state_with_engines(2)
    add_engine(state, 2, rows=4, slots=2, loaded={1}, loading=2)
    add_waiting(state, 0, 7)
    assert Load(0, 0) in weight_sync.load_versions(state)


def test_engines_continue_on_their_version_while_they_wait_for_their_turn() -> None:
    """Both are full when version 1 is published; then a request finishes on each."""
    run = FakeWorkers(limits(num_steps=9, batch_size=2, max_staleness=3, defers_loads=True))
    for number in (0, 1):
        run.join(number, rows=2, slots=3)
    run.deliver_all(unless=is_work)
    for row in (0, 1):
        run.finish_group(GroupId(0, row))
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert [action.version for action in run.actions(Load)] == [0, 0]
    for number in (0, 1):
        run.finish_group(GroupId(0, run.dataset_rows(number)[0]))
    assert run.actions(Load)[2:] == [Load(0, 1)]
    assert (run.actions(Generate)[-1].engine, run.actions(Generate)[-1].version) == (1, 0)
    run.deliver_all()
    assert run.orchestrator.done
