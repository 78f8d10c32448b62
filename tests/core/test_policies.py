"""Update policies and the knobs of admission, each seen in a whole run with a slow trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.core.midway import engine, midway, prompts, running
from tests.core.stations import Stations, limits

from dora.core.actions import Admit, Load, Train
from dora.core.admission import admit
from dora.core.bound import num_admissible
from dora.core.events import Event, RequestFinished, Trained
from dora.core.records import GroupId
from dora.core.state import State


class Paced:
    """A run of two engines in which facts of one kind are told only when nothing else can happen."""

    def __init__(self, last: type[Event], rows: int = 8, **changes: Any) -> None:
        self.run = Stations(limits(**({"num_steps": 8, "batch_size": 4} | changes)))
        self.run.join(0, rows, slots=2)
        self.run.join(1, rows, slots=2)
        self.num_ended_in_a_step = 0
        while not self.run.core.done:
            possible = self.run.possible()
            fact = next((fact for fact in possible if not isinstance(fact, last)), possible[0])
            self.num_ended_in_a_step += isinstance(fact, RequestFinished) and self.is_training
            self.run.tell(fact)

    @property
    def is_training(self) -> bool:
        return self.run.state.training is not None

    @property
    def staleness(self) -> list[set[int]]:
        """Of the groups of each step."""
        version_of = {order.group: order.version for order in self.run.orders(Admit)}
        return [{t.step - version_of[group] for group in t.groups} for t in self.run.orders(Train)]

    def loads(self, number: int) -> list[int]:
        return [order.version for order in self.run.orders(Load) if order.engine == number]


def slow_trainer(**changes: Any) -> Paced:
    return Paced(Trained, **changes)


def slow_engines(**changes: Any) -> Paced:
    return Paced(RequestFinished, rows=2, **changes)


def test_sync_takes_turns() -> None:
    slow = slow_trainer(max_staleness=0, batches_per_version=1)
    assert slow.staleness == [{0}] * 8
    assert slow.num_ended_in_a_step == 0


def test_one_step_generates_the_next_batch_while_it_trains_the_one_before() -> None:
    """One live version and S = 1: version 0 has the first two batches, and every other the next one."""
    slow = slow_trainer(max_staleness=1, batches_per_version=1)
    assert slow.staleness == [{0}] + [{1}] * 7
    assert slow.num_ended_in_a_step == 7 * 4


@pytest.mark.parametrize(("max_staleness", "num_batches"), [(1, 2), (2, 2), (2, 3), (5, 3)])
@pytest.mark.parametrize("paced", [slow_trainer, slow_engines])
def test_drain_gives_one_version_so_many_batches_and_then_the_next(
    paced: Callable[..., Paced], max_staleness: int, num_batches: int
) -> None:
    """The first has as many as the bound allows."""
    run = paced(max_staleness=max_staleness, batches_per_version=num_batches)
    admitted = [order.version for order in run.run.orders(Admit)]
    assert admitted == sorted(admitted), "no version is gone back to"
    assert Counter(admitted)[0] == (max_staleness + 1) * 4
    assert all(count <= num_batches * 4 for version, count in Counter(admitted).items() if version)
    assert max(max(staleness) for staleness in run.staleness) <= max_staleness


def test_one_version_lives_at_a_time_under_drain() -> None:
    """The next is admitted only when the last request of the one before has ended."""
    run = Stations(limits(num_steps=8, batch_size=2, max_staleness=2, batches_per_version=2))
    run.join(0, rows=8, slots=2)
    run.settle(but=lambda fact: isinstance(fact, RequestFinished))
    for row in range(5):
        run.finish(GroupId(0, row))
        run.settle(but=lambda fact: isinstance(fact, RequestFinished))
    assert run.state.newest == 2
    assert [order.version for order in run.orders(Admit)] == [0] * 6
    run.finish(GroupId(0, 5))
    run.settle(but=lambda fact: isinstance(fact, RequestFinished))
    assert {order.version for order in run.orders(Admit)[6:]} == {2}


def test_many_versions_live_at_a_time_under_dora() -> None:
    slow = slow_trainer(max_staleness=2)
    assert slow.num_ended_in_a_step > 0
    assert max(max(s) for s in slow.staleness) == 2


@pytest.mark.parametrize(("slack", "num_open"), [(0, 12), (3, 9), (8, 4), (99, 4)])
def test_slack_leaves_places_empty_but_never_in_the_next_batch(slack: int, num_open: int) -> None:
    run = Stations(limits(num_steps=9, batch_size=4, max_staleness=2, slack=slack))
    run.join(0, rows=100, slots=2)
    run.settle(but=lambda fact: isinstance(fact, RequestFinished))
    assert len(run.orders(Admit)) == num_open


@pytest.mark.parametrize("slack", [3, 99])
def test_a_run_with_slack_comes_to_its_end(slack: int) -> None:
    assert slow_trainer(max_staleness=2, slack=slack).run.core.done
    assert slow_engines(max_staleness=2, slack=slack).run.core.done


@pytest.mark.parametrize(("interval", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6])])
def test_engines_take_every_so_many_th_version(interval: int, expected: list[int]) -> None:
    slow = slow_engines(num_steps=14, max_staleness=5, load_interval=interval)
    assert [version for version in slow.loads(0) if version < 8] == expected


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_version_is_not_left_out_where_the_bound_asks_for_it(max_staleness: int) -> None:
    slow = slow_engines(max_staleness=max_staleness, load_interval=5)
    assert slow.loads(0)[:3] == [0, 1, 2]


def keeping(version: int, **changes: Any) -> State:
    """Engine 0 keeps an old version for its last request, with three rows free; 1 is full of version 2."""
    state = midway(limits(num_steps=20, batch_size=8, max_staleness=2, **changes), newest=2)
    engine(state, 0, rows=4, held={version})
    running(state, 0, version, 1)
    engine(state, 1, rows=2, held={2})
    running(state, 1, 2, 2, 3)
    prompts(state, first=4, count=8)
    return state


def admitted(state: State) -> list[int]:
    return [order.version for order in admit(state) if isinstance(order, Admit)]


def test_rows_beside_the_tail_of_an_old_version_are_filled_with_it() -> None:
    assert admitted(keeping(1)) == [1, 1, 1]


def test_a_version_about_to_expire_is_not_filled() -> None:
    state = keeping(0)
    assert state.limits.deadline(0) == state.next_step
    assert num_admissible(state, 0) > 0, "the bound alone would allow it"
    assert admitted(state) == []


def test_old_versions_are_not_filled_where_one_version_lives_or_nothing_moves() -> None:
    assert admitted(keeping(1, is_static=True)) == []
    assert admitted(keeping(1, batches_per_version=2)) == []


def test_an_engine_that_clears_its_version_is_not_filled() -> None:
    state = keeping(1)
    state.engines[0].clearing, state.engines[0].wanted = 1, 2
    state.touch(state.engines[0])
    assert admitted(state) == []


def test_the_newest_version_is_filled_first() -> None:
    state = keeping(1)
    state.engines[1].rows = 4
    state.touch(state.engines[1])
    assert admitted(state) == [2, 2, 1, 1, 1]


def test_an_engine_of_several_slots_is_filled_with_its_newest_version() -> None:
    state = keeping(1)
    engine(state, 2, rows=2, slots=3, held={0, 1, 2})
    running(state, 2, 0, 12)
    assert admitted(state)[0] == 2
