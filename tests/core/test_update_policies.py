"""Update policies and admission settings, each in a whole run with a slow trainer or slow engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.core.fake_workers import FakeWorkers, limits, one_engine
from tests.core.midrun import add_engine, add_prompts, add_running, state_at

from dora.core.actions import Admit, Load, Train
from dora.core.admission import admit
from dora.core.bound import num_admissible
from dora.core.events import Event, RequestFinished, Trained
from dora.core.state import State
from dora.core.types import GroupId


class PacedRun:
    """A run of two engines in which events of one kind arrive only if no other is left."""

    def __init__(self, last: type[Event], rows: int = 8, **changes: Any) -> None:
        self.run = FakeWorkers(limits(**({"num_steps": 8, "batch_size": 4} | changes)))
        self.run.join(0, rows, slots=2)
        self.run.join(1, rows, slots=2)
        self.num_finished_in_a_step = 0
        while not self.run.orchestrator.done:
            events = self.run.deliverable()
            event = next((event for event in events if not isinstance(event, last)), events[0])
            self.num_finished_in_a_step += isinstance(event, RequestFinished) and self.is_training
            self.run.deliver(event)

    @property
    def is_training(self) -> bool:
        return self.run.state.training_step is not None

    @property
    def staleness(self) -> list[set[int]]:
        """Staleness of the groups of each step."""
        version_of = {action.group: action.version for action in self.run.actions(Admit)}
        return [{t.step - version_of[group] for group in t.groups} for t in self.run.actions(Train)]

    def loads(self, number: int) -> list[int]:
        return [action.version for action in self.run.actions(Load) if action.engine == number]


def slow_trainer(**changes: Any) -> PacedRun:
    return PacedRun(Trained, **changes)


def slow_engines(**changes: Any) -> PacedRun:
    return PacedRun(RequestFinished, rows=2, **changes)


def test_sync_alternates_rollout_and_training() -> None:
    slow = slow_trainer(max_staleness=0, batches_per_version=1)
    assert slow.staleness == [{0}] * 8
    assert slow.num_finished_in_a_step == 0


def test_one_step_off_policy_overlaps_rollout_with_training() -> None:
    """One live version and S = 1: version 0 gets two batches, every other version one."""
    slow = slow_trainer(max_staleness=1, batches_per_version=1)
    assert slow.staleness == [{0}] + [{1}] * 7
    assert slow.num_finished_in_a_step == 7 * 4


@pytest.mark.parametrize(("max_staleness", "num_batches"), [(1, 2), (2, 2), (2, 3), (5, 3)])
@pytest.mark.parametrize("paced", [slow_trainer, slow_engines])
def test_drain_admits_batches_per_version_batches_at_each_version(
    paced: Callable[..., PacedRun], max_staleness: int, num_batches: int
) -> None:
    """Version 0 gets as many as the bound allows."""
    run = paced(max_staleness=max_staleness, batches_per_version=num_batches)
    admitted = [action.version for action in run.run.actions(Admit)]
    assert admitted == sorted(admitted), "versions only increase"
    assert Counter(admitted)[0] == (max_staleness + 1) * 4
    assert all(count <= num_batches * 4 for version, count in Counter(admitted).items() if version)
    assert max(max(staleness) for staleness in run.staleness) <= max_staleness


def test_one_version_is_live_at_a_time_under_drain() -> None:
    """The next version is admitted only after the last request of the one before has finished."""
    run = one_engine(limits(num_steps=8, max_staleness=2, batches_per_version=2), rows=8, slots=2)
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished))
    for row in range(5):
        run.finish_group(GroupId(0, row))
        run.deliver_all(unless=lambda event: isinstance(event, RequestFinished))
    assert run.state.newest_published == 2
    assert [action.version for action in run.actions(Admit)] == [0] * 6
    run.finish_group(GroupId(0, 5))
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished))
    assert {action.version for action in run.actions(Admit)[6:]} == {2}


def test_many_versions_are_live_under_dora() -> None:
    slow = slow_trainer(max_staleness=2)
    assert slow.num_finished_in_a_step > 0
    assert max(max(s) for s in slow.staleness) == 2


@pytest.mark.parametrize(("slack", "num_open"), [(0, 12), (3, 9), (8, 4), (99, 4)])
def test_slack_leaves_places_empty_but_never_in_the_next_batch(slack: int, num_open: int) -> None:
    run = one_engine(limits(num_steps=9, batch_size=4, max_staleness=2, slack=slack), rows=100, slots=2)
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished))
    assert len(run.actions(Admit)) == num_open


@pytest.mark.parametrize("slack", [3, 99])
def test_a_run_with_slack_finishes(slack: int) -> None:
    assert slow_trainer(max_staleness=2, slack=slack).run.orchestrator.done
    assert slow_engines(max_staleness=2, slack=slack).run.orchestrator.done


@pytest.mark.parametrize(("interval", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6])])
def test_engines_load_every_n_th_version(interval: int, expected: list[int]) -> None:
    slow = slow_engines(num_steps=14, max_staleness=5, weight_sync_interval=interval)
    assert [version for version in slow.loads(0) if version < 8] == expected


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_no_version_is_left_out_if_the_bound_requires_it(max_staleness: int) -> None:
    slow = slow_engines(max_staleness=max_staleness, weight_sync_interval=5)
    assert slow.loads(0)[:3] == [0, 1, 2]


def state_with_old_version(version: int, **changes: Any) -> State:
    """Engine 0 keeps an old version for one request, with three free rows; engine 1 is full of version 2."""
    state = state_at(limits(num_steps=20, batch_size=8, max_staleness=2, **changes), newest=2)
    add_engine(state, 0, rows=4, loaded={version})
    add_running(state, 0, version, 1)
    add_engine(state, 1, rows=2, loaded={2})
    add_running(state, 1, 2, 2, 3)
    add_prompts(state, first=4, count=8)
    return state


def admitted(state: State) -> list[int]:
    return [action.version for action in admit(state) if isinstance(action, Admit)]


def test_free_rows_beside_an_old_version_are_filled_with_it() -> None:
    assert admitted(state_with_old_version(1)) == [1, 1, 1]


def test_a_version_about_to_expire_is_not_filled() -> None:
    state = state_with_old_version(0)
    assert state.limits.deadline(0) == state.next_step
    assert num_admissible(state, 0) > 0, "the bound alone would allow it"
    assert admitted(state) == []


def test_old_versions_are_not_filled_with_one_live_version_or_a_static_run() -> None:
    assert admitted(state_with_old_version(1, is_static=True)) == []
    assert admitted(state_with_old_version(1, batches_per_version=2)) == []


def test_an_evicted_version_is_not_filled() -> None:
    state = state_with_old_version(1)
    state.engines[0].evicting, state.engines[0].next_load = 1, 2
    state.mark_dirty(state.engines[0])
    assert admitted(state) == []


def test_the_newest_version_is_filled_first() -> None:
    state = state_with_old_version(1)
    state.engines[1].num_rows = 4
    state.mark_dirty(state.engines[1])
    assert admitted(state) == [2, 2, 1, 1, 1]


def test_an_engine_of_several_slots_is_filled_with_its_newest_version() -> None:
    state = state_with_old_version(1)
    add_engine(state, 2, rows=2, slots=3, loaded={0, 1, 2})
    add_running(state, 2, 0, 12)
    assert admitted(state)[0] == 2
