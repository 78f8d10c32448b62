"""Weight sync: which engine holds which version, and how long the store keeps one."""

from __future__ import annotations

from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine
from tests.core.midrun import add_engine, add_running, add_waiting, state_at

from dora.core import weight_sync
from dora.core.actions import Admit, Drop, Load, Retire
from dora.core.events import EngineLost, Loaded, Trained
from dora.core.state import State
from dora.core.types import GroupId


def run_in_first_step(rows: int, slots: int, **changes: int) -> FakeWorkers:
    """One engine; the groups of the first batch are finished."""
    run = one_engine(limits(**changes), rows=rows, slots=slots)
    run.deliver_all(unless=is_work)
    run.finish_group(GroupId(0, 0))
    run.finish_group(GroupId(0, 1))
    return run


def test_engines_load_every_new_version_they_have_a_slot_for() -> None:
    run = one_engine(limits(), rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    run.deliver_all()
    for number in (0, 1):
        assert [action.version for action in run.actions(Load) if action.engine == number][:4] == [0, 1, 2, 3]


def test_the_newest_version_is_loaded_beside_one_that_is_decoded() -> None:
    run = run_in_first_step(rows=8, slots=2, max_staleness=1)
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    on = run.state.engines[0]
    assert on.loaded == {0, 1}
    assert set(on.requests.values()) == {0, 1}
    assert run.actions(Drop) == []


def test_an_engine_never_drops_a_version_it_decodes() -> None:
    run = run_in_first_step(rows=8, slots=1, max_staleness=1)
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert run.actions(Drop) == []
    run.finish_group(GroupId(0, 2))
    assert run.actions(Drop) == []
    run.finish_group(GroupId(0, 3))
    assert run.actions(Drop) == [Drop(0, 0)]
    assert run.actions(Load)[-1] == Load(0, 1)


def test_an_engine_that_evicts_its_version_gets_no_new_groups() -> None:
    run = run_in_first_step(rows=4, slots=1, max_staleness=2, num_steps=9)
    num_before = len(run.actions(Admit))
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert run.state.engines[0].next_load == 1
    run.finish_group(GroupId(0, 2))
    assert run.state.engines[0].free_rows > 0
    assert len(run.actions(Admit)) == num_before
    run.deliver_all(unless=lambda event: is_work(event) and run.state.engines[0].loaded == {1})
    assert run.actions(Admit)[num_before].version == 1


def state_with_pinned_version() -> State:
    """Engine 0 holds the only copy of version 0, which a waiting request needs; version 1 is the newest."""
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=1, loaded={0})
    add_waiting(state, 0, 0)
    return state


def test_an_engine_never_drops_the_last_copy_of_a_pinned_version() -> None:
    assert weight_sync.load_versions(state_with_pinned_version()) == []


def test_an_engine_drops_a_pinned_version_that_another_engine_holds() -> None:
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=1, loaded={0})
    add_engine(state, 1, rows=1, slots=2, loaded={0, 1})
    add_running(state, 1, 0, 0)
    assert weight_sync.load_versions(state) == [Drop(0, 0), Load(0, 1)]


def test_an_engine_drops_a_version_that_is_not_pinned() -> None:
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=1, loaded={0})
    assert weight_sync.load_versions(state) == [Drop(0, 0), Load(0, 1)]


def test_a_pinned_version_without_holder_is_loaded_before_the_newest() -> None:
    run = run_in_first_step(rows=4, slots=2, max_staleness=2, num_steps=9)
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert run.state.newest_published == 1
    run.deliver(EngineLost(0, "killed"))
    num_before = len(run.actions(Load))
    run.join(1, rows=4, slots=2)
    assert run.actions(Load)[num_before:] == [Load(1, 0)]
    run.deliver(Loaded(1, 0, "v0"))
    assert run.actions(Load)[num_before:] == [Load(1, 0), Load(1, 1)]
    assert set(run.state.engines[1].requests.values()) == {0}
    run.deliver_all()
    assert run.orchestrator.done


def test_orphaned_versions_are_loaded_oldest_first_on_engines_with_most_free_rows() -> None:
    state = state_at(limits(), newest=2)
    add_engine(state, 0, rows=2, loaded=())
    add_engine(state, 1, rows=9, loaded=())
    add_waiting(state, 1, 1)
    add_waiting(state, 0, 0)
    assert weight_sync.load_versions(state) == [Load(0, 1), Load(1, 0)]


def test_without_a_free_slot_the_engine_with_fewest_requests_evicts_a_version() -> None:
    state = state_at(limits(), newest=1)
    add_engine(state, 0, rows=4, loaded={1})
    add_engine(state, 1, rows=4, loaded={1})
    add_running(state, 0, 1, 1, 2)
    add_running(state, 1, 1, 3)
    add_waiting(state, 0, 0)
    assert weight_sync.load_versions(state) == []
    assert [(e.evicting, e.next_load) for e in state.engines.values()] == [(None, None), (1, 0)]


def test_the_store_keeps_pinned_versions_and_retires_others() -> None:
    run = run_in_first_step(rows=8, slots=3, max_staleness=1)
    run.finish_group(GroupId(0, 2))
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert run.actions(Retire) == []
    assert set(run.state.stored_versions) == {0, 1}
    run.finish_group(GroupId(0, 3))
    assert run.actions(Retire) == [Retire(0)]


def test_the_store_keeps_a_version_that_is_loading() -> None:
    run = one_engine(limits(num_steps=3), rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    run.deliver_all(unless=lambda event: isinstance(event, Loaded) and event.engine == 1)
    assert run.orchestrator.done
    assert sorted(run.state.stored_versions) == [0, 2, 3]
