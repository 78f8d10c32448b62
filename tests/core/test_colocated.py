"""An engine on the trainer's device: the two take turns, and no answer is lost."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Generate, Load, Migrate, Pause, Resume, Train
from dora.core.events import EngineLost, Migrated, Paused, Published, StepFailed, Trained
from dora.core.records import GroupId, RequestId
from dora.core.state import State


def alone(**changes: int) -> Stations:
    """One engine on the trainer's device, with a step's worth of requests and more."""
    run = Stations(limits(**({"num_steps": 4, "batch_size": 2, "max_staleness": 1} | changes)))
    run.join(0, rows=4, slots=2, is_colocated=True)
    run.settle(but=is_work)
    return run


def ready_to_train(run: Stations) -> None:
    run.finish(GroupId(0, 0))
    run.finish(GroupId(0, 1))


def test_it_joins_at_rest_and_decodes_once_the_trainer_needs_nothing() -> None:
    run = Stations(limits(max_staleness=1))
    run.join(0, rows=4, slots=2, is_colocated=True)
    assert run.state.engines[0].is_paused
    assert run.orders(Resume) == [], "the first version is being published"
    run.settle(but=is_work)
    assert run.orders(Resume) == [Resume(0)]
    assert run.orders(Generate)


def test_it_is_paused_before_a_step_and_the_step_waits_for_it() -> None:
    run = alone()
    ready_to_train(run)
    assert run.orders(Pause) == [Pause(0)]
    assert run.orders(Train) == []
    run.tell(Paused(0))
    assert run.orders(Train) == [Train(0, (GroupId(0, 0), GroupId(0, 1)))]


def test_it_goes_on_after_the_version_is_published_with_what_it_had() -> None:
    run = alone()
    ready_to_train(run)
    run.tell(Paused(0))
    kept = dict(run.state.engines[0].requests)
    assert kept
    run.tell(Trained(0))
    assert len(run.orders(Resume)) == 1, "the version is not out yet"
    run.tell(Published(1, "v1"))
    assert len(run.orders(Resume)) == 2
    assert kept.items() <= run.state.engines[0].requests.items()
    assert run.state.num_regenerated_tokens == 0


def test_it_gets_nothing_new_while_it_rests() -> None:
    run = alone()
    num_before = len(run.orders(Generate))
    ready_to_train(run)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert run.state.training == 0
    assert len(run.orders(Generate)) == num_before


def test_a_step_that_fails_is_repeated_without_waking_it() -> None:
    run = alone()
    ready_to_train(run)
    run.tell(Paused(0))
    assert run.tell(StepFailed(0, "no memory")) == run.orders(Train)[:1]
    assert len(run.orders(Resume)) == 1


def test_the_trainer_does_not_wait_for_an_engine_that_died() -> None:
    run = alone()
    run.join(1, rows=4, slots=1)
    ready_to_train(run)
    assert run.orders(Train) == []
    run.tell(EngineLost(0, "killed"))
    assert len(run.orders(Train)) == 1


def test_several_on_one_device_are_all_paused() -> None:
    run = Stations(limits(num_steps=4, max_staleness=1))
    for number in (0, 1):
        run.join(number, rows=2, slots=2, is_colocated=True)
    run.settle(but=is_work)
    ready_to_train(run)
    assert {order.engine for order in run.orders(Pause)} == {0, 1}
    run.tell(Paused(0))
    assert run.orders(Train) == []
    run.tell(Paused(1))
    assert len(run.orders(Train)) == 1


def test_one_that_joins_during_a_step_rests_until_it_is_over() -> None:
    run = alone()
    ready_to_train(run)
    run.tell(Paused(0))
    run.join(1, rows=2, slots=1, is_colocated=True)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert run.state.engines[1].is_paused
    assert run.orders(Pause) == [Pause(0)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_on_one_device_comes_to_its_end(max_staleness: int) -> None:
    run = alone(max_staleness=max_staleness)
    run.settle()
    assert run.core.done
    requests = [r for order in run.orders(Generate) for r in order.requests]
    assert len(requests) == len({*requests}) == 8


def lent(rows: int = 5) -> State:
    """Engine 0 is the trainer, lent while it waits for requests 1 and 2, which engine 1 decodes."""
    state = midway(limits(num_steps=20, batch_size=2, max_staleness=2), newest=0)
    engine(state, 0, rows=4, held={0}, is_colocated=True)
    engine(state, 1, rows, held={0})
    running(state, 0, 0, 3, 4, 5, num_tokens=30)
    running(state, 1, 0, 1, 2)
    return state


def test_a_lent_engine_is_reclaimed_by_moving_its_requests_out() -> None:
    run = Stations(lent().limits, state=lent())
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    assert run.orders(Pause) == [Pause(0)]
    moved = [Migrate(RequestId(0, row, 0), 0, 1, 0, "reclaim") for row in (3, 4, 5)]
    assert run.orders(Migrate) == moved
    run.settle(but=lambda fact: not isinstance(fact, Migrated | Paused))
    assert run.rows(1) == [3, 4, 5]
    assert run.state.engines[0].is_empty
    assert len(run.orders(Train)) == 1


def test_the_trainer_need_not_wait_until_all_have_moved() -> None:
    run = Stations(lent().limits, state=lent())
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    run.tell(Paused(0))
    assert len(run.orders(Train)) == 1
    assert run.rows(0) == [3, 4, 5]
    run.settle(but=is_work)
    assert run.rows(0) == []


def test_what_finds_no_row_elsewhere_rests_with_the_engine() -> None:
    run = Stations(lent().limits, state=lent(rows=2))
    run.finish(GroupId(0, 1))
    run.finish(GroupId(0, 2))
    run.settle(but=is_work)
    assert len(run.orders(Train)) == 1
    assert len(run.rows(0)) == 1
    run.tell(Trained(0))
    run.settle(but=is_work)
    assert run.orders(Resume) == [Resume(0)]
    assert run.state.num_regenerated_tokens == 0


def test_it_loads_the_newest_version_when_it_may_decode_again() -> None:
    run = alone()
    ready_to_train(run)
    run.settle(but=lambda fact: is_work(fact) and not isinstance(fact, Trained))
    assert run.orders(Load)[-1] == Load(0, 1)
