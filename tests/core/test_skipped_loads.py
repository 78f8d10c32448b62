"""Skipped loads: engines skip a version that hardly differs from theirs, if the bound allows it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.core.fake_workers import FakeWorkers, limits, one_engine
from tests.core.midrun import add_engine, add_running, state_at

from dora.core import placement, weight_sync
from dora.core.actions import Action, Load, Retire, SkipLoad
from dora.core.events import RequestFinished, Trained
from dora.core.staleness import Divergence, MeasuredKL
from dora.core.state import State

BOUNDS = limits(num_steps=9, batch_size=8, max_staleness=3, skip_below_kl=0.01)


def skip_decisions(kl: float | None = 0.001, *, age: int = 1, **changes: Any) -> list[Action]:
    """Version 3 is published; engine 0 decodes version 2; samples of `age` have this KL."""
    state = state_with_version_2(**changes)
    if kl is not None:
        state.divergence.by_staleness[age] = MeasuredKL(2, kl)
    return weight_sync.skip_similar_version(state)


def state_with_version_2(**changes: Any) -> State:
    state = state_at(replace(BOUNDS, **changes), newest=3)
    add_engine(state, 0, rows=4, slots=2, loaded={2})
    add_running(state, 0, 2, 1)
    return state


def test_a_similar_version_is_skipped() -> None:
    assert skip_decisions() == [SkipLoad(0, 3)]


def test_a_different_version_is_not_skipped() -> None:
    assert skip_decisions(0.01) == []
    assert skip_decisions(math.nan) == []


def test_a_version_without_a_measurement_is_not_skipped() -> None:
    assert skip_decisions(None) == []


def test_a_measurement_counts_for_smaller_ages_only() -> None:
    assert skip_decisions(age=2) == [SkipLoad(0, 3)]
    assert skip_decisions(age=0) == []


def test_the_measurement_of_the_nearest_age_counts() -> None:
    state = state_with_version_2()
    state.divergence.by_staleness |= {1: MeasuredKL(2, 0.5), 2: MeasuredKL(2, 0.001)}
    assert weight_sync.skip_similar_version(state) == []


@pytest.mark.parametrize(
    "changes",
    [{"max_staleness": 1}, {"batch_size": 1, "max_staleness": 2}, {"skip_below_kl": None}],
    ids=["the version expires", "no place is left before its deadline", "skip_below_kl is not set"],
)
def test_no_version_is_skipped_if_the_bound_requires_it(changes: dict[str, Any]) -> None:
    state = state_with_version_2(**changes)
    state.divergence.by_staleness[1] = MeasuredKL(2, 0.001)
    if changes.get("batch_size"):
        add_running(state, 0, 2, 5)
    assert weight_sync.skip_similar_version(state) == []


def test_no_version_is_skipped_in_favour_of_a_retired_one() -> None:
    state = state_with_version_2()
    state.divergence.by_staleness[1] = MeasuredKL(2, 0.001)
    del state.stored_versions[2]
    assert weight_sync.skip_similar_version(state) == []


def test_an_engine_does_not_load_a_skipped_version() -> None:
    state = state_with_version_2()
    assert weight_sync.load_versions(state) == [Load(0, 3)]
    state = state_with_version_2()
    state.engines[0].skipped_version = 3
    assert weight_sync.load_versions(state) == []


def test_an_engine_does_not_flip_to_a_skipped_version() -> None:
    state = state_at(BOUNDS, newest=3)
    for number in (0, 1):
        add_engine(state, number, rows=4, loaded={2}, skipped_version=3)
    assert not placement.repartition(state)
    assert [e.next_load for e in state.engines.values()] == [None, None]


def test_a_skipped_version_is_loaded_if_the_bound_requires_it() -> None:
    state = state_with_version_2(max_staleness=1)
    state.engines[0].skipped_version = 3
    weight_sync.update_demand(state)
    assert weight_sync.load_versions(state) == [Load(0, 3)]


def test_a_skipped_version_is_loaded_once_the_old_one_is_retired() -> None:
    """Engine 1 has version 3; version 2 is not needed any more, and engine 0 has no other."""
    state = state_at(BOUNDS, newest=3)
    add_engine(state, 0, rows=4, slots=2, loaded={2}, skipped_version=3)
    add_engine(state, 1, rows=4, slots=2, loaded={3})
    assert weight_sync.load_versions(state) == []
    assert Retire(2) in weight_sync.retire_versions(state)
    assert weight_sync.load_versions(state) == [Load(0, 3)]


def test_measurements_older_than_max_staleness_are_removed() -> None:
    divergence = Divergence()
    divergence.update(BOUNDS, 3, ((2, 0.001), (1, 0.002)))
    divergence.update(BOUNDS, 6, ((5, 0.003),))
    assert divergence.by_staleness == {1: MeasuredKL(6, 0.003), 2: MeasuredKL(3, 0.002)}
    divergence.update(BOUNDS, 7, ())
    assert divergence.by_staleness == {1: MeasuredKL(6, 0.003)}


def test_without_skip_below_kl_no_measurement_is_kept() -> None:
    divergence = Divergence()
    divergence.update(limits(), 3, ((2, 0.001),))
    assert divergence == Divergence()


def slow_engines(kl: float) -> FakeWorkers:
    """A run whose requests finish only if no other event is left; all old samples have this KL."""
    run = one_engine(limits(num_steps=14, batch_size=4, max_staleness=5, skip_below_kl=0.01), rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    while not run.orchestrator.done:
        possible = run.deliverable()
        event = next((event for event in possible if not isinstance(event, RequestFinished)), possible[0])
        if isinstance(event, Trained):
            run.pending.remove(event)
            event = Trained(event.step, kls=tuple((version, kl) for version in range(event.step)))
        run.deliver(event)
    return run


def test_the_measurements_of_the_trainer_decide() -> None:
    far, near = slow_engines(0.02), slow_engines(0.001)
    assert far.actions(SkipLoad) == []
    assert len(near.actions(SkipLoad)) > 5
    assert len(near.actions(Load)) < len(far.actions(Load)) / 2
