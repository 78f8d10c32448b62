"""Failed steps and loads are ordered again, and nothing is lost."""

from __future__ import annotations

from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine
from tests.core.midrun import add_engine, add_running, add_waiting, state_at

from dora.core.actions import Commit, Drop, Generate, Load, Publish, Train
from dora.core.events import Loaded, LoadFailed, StepFailed, Trained


def test_a_failed_step_is_repeated_with_the_same_batch() -> None:
    run = one_engine(limits(), rows=4, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    first = run.actions(Train)
    assert len(first) == 1
    for _ in range(3):
        assert run.deliver(StepFailed(0, "no memory")) == first
    assert len(run.actions(Commit)) == 2, "no group is committed twice"
    run.deliver_all(unless=lambda event: event == Trained(1))
    assert run.actions(Publish) == [Publish(0), Publish(1)]
    run.deliver_all(unless=lambda event: not isinstance(event, Trained))
    assert run.state.num_trained == 4


def test_a_failed_load_is_ordered_again() -> None:
    run = one_engine(limits(), rows=4, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, Loaded))
    assert run.deliver(LoadFailed(0, 0, "no memory")) == [Load(0, 0)]
    run.deliver_all()
    assert run.orchestrator.done


def test_the_slot_of_a_failed_load_is_empty() -> None:
    """Version 0 is dropped for version 1; the engine holds none until the load succeeds."""
    state = state_at(limits(num_steps=9, max_staleness=2), newest=1)
    add_engine(state, 0, rows=4, loaded={0})
    run = FakeWorkers(state.limits, state=state)
    run.join(1, rows=1, slots=1)
    assert run.actions(Drop) == [Drop(0, 0)]
    run.deliver(LoadFailed(0, 1, "no memory"))
    assert run.state.engines[0].loaded == set()
    assert [action for action in run.actions(Load) if action.engine == 0] == [Load(0, 1), Load(0, 1)]


def test_requests_wait_for_a_failed_load_and_start_once() -> None:
    state = state_at(limits(num_steps=9, max_staleness=2), newest=1)
    add_engine(state, 0, rows=4, slots=2, loaded={1})
    add_running(state, 0, 1, 4)
    add_waiting(state, 0, 3)
    run = FakeWorkers(state.limits, state=state)
    run.join(1, rows=4, slots=1)
    load = next(action for action in run.actions(Load) if action.version == 0)
    for _ in range(2):
        actions = run.deliver(LoadFailed(load.engine, 0, "no memory"))
        load = next(o for o in actions if isinstance(o, Load) and o.version == 0)
    run.deliver_all(unless=is_work)
    placed = [(o.engine, r.row) for o in run.actions(Generate) for r in o.requests if r.row == 3]
    assert placed == [(load.engine, 3)]
