"""Versions that engines leave out, for their own hardly differs: only while the bound allows it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, limits

from dora.core import placement, skipping, versions
from dora.core.actions import Action, Load, Retire, Skip
from dora.core.divergence import Divergence, Measured
from dora.core.events import RequestFinished, Trained
from dora.core.state import State

BOUNDS = limits(num_steps=9, batch_size=8, max_staleness=3, skip_below_kl=0.01)


def published(kl: float | None = 0.001, *, age: int = 1, **changes: Any) -> list[Action]:
    """Version 3 has come; engine 0 decodes version 2, and samples of an age were found so far away."""
    state = holding_two(**changes)
    if kl is not None:
        state.divergence.by_age[age] = Measured(2, kl)
    return skipping.skip(state)


def holding_two(**changes: Any) -> State:
    state = midway(replace(BOUNDS, **changes), newest=3)
    engine(state, 0, rows=4, slots=2, held={2})
    running(state, 0, 2, 1)
    return state


def test_a_version_that_is_near_is_left_out() -> None:
    assert published() == [Skip(0, 3)]


def test_a_version_that_is_far_is_not() -> None:
    assert published(0.01) == []
    assert published(math.nan) == []


def test_what_nobody_has_measured_is_not_left_out() -> None:
    assert published(None) == []


def test_older_samples_speak_for_younger_ones_and_not_the_other_way_round() -> None:
    assert published(age=2) == [Skip(0, 3)]
    assert published(age=0) == []


def test_of_what_was_measured_the_nearest_age_counts() -> None:
    state = holding_two()
    state.divergence.by_age |= {1: Measured(2, 0.5), 2: Measured(2, 0.001)}
    assert skipping.skip(state) == []


@pytest.mark.parametrize(
    "changes",
    [{"max_staleness": 1}, {"batch_size": 1, "max_staleness": 2}, {"skip_below_kl": None}],
    ids=["its deadline is upon us", "no place is left at its deadline", "it is not wanted"],
)
def test_nothing_is_left_out_where_the_bound_does_not_allow_it(changes: dict[str, Any]) -> None:
    state = holding_two(**changes)
    state.divergence.by_age[1] = Measured(2, 0.001)
    if changes.get("batch_size"):
        running(state, 0, 2, 5)
    assert skipping.skip(state) == []


def test_a_version_that_is_not_stored_any_more_cannot_be_stayed_with() -> None:
    state = holding_two()
    state.divergence.by_age[1] = Measured(2, 0.001)
    del state.store[2]
    assert skipping.skip(state) == []


def test_an_engine_that_leaves_a_version_out_does_not_load_it() -> None:
    state = holding_two()
    assert versions.load(state) == [Load(0, 3)]
    state = holding_two()
    state.engines[0].skipped = 3
    assert versions.load(state) == []


def test_an_engine_is_not_cleared_for_what_it_leaves_out() -> None:
    state = midway(BOUNDS, newest=3)
    for number in (0, 1):
        engine(state, number, rows=4, held={2}, skipped=3)
    assert not placement.repartition(state)
    assert [e.wanted for e in state.engines.values()] == [None, None]


def test_it_is_loaded_all_the_same_where_the_bound_asks() -> None:
    state = holding_two(max_staleness=1)
    state.engines[0].skipped = 3
    versions.listen(state)
    assert versions.load(state) == [Load(0, 3)]


def test_it_is_loaded_all_the_same_once_nothing_can_be_begun_with_the_old_one() -> None:
    """Engine 1 has version 3 alone; nobody needs version 2 any more, and engine 0 has nothing else."""
    state = midway(BOUNDS, newest=3)
    engine(state, 0, rows=4, slots=2, held={2}, skipped=3)
    engine(state, 1, rows=4, slots=2, held={3})
    assert versions.load(state) == []
    assert Retire(2) in versions.retire(state)
    assert versions.load(state) == [Load(0, 3)]


def test_measurements_older_than_the_bound_are_forgotten() -> None:
    found = Divergence()
    found.hear(BOUNDS, 3, ((2, 0.001), (1, 0.002)))
    found.hear(BOUNDS, 6, ((5, 0.003),))
    assert found.by_age == {1: Measured(6, 0.003), 2: Measured(3, 0.002)}
    found.hear(BOUNDS, 7, ())
    assert found.by_age == {1: Measured(6, 0.003)}


def test_a_run_that_never_leaves_a_version_out_remembers_nothing() -> None:
    found = Divergence()
    found.hear(limits(), 3, ((2, 0.001),))
    assert found == Divergence()


def slow_engines(kl: float) -> Stations:
    """A whole run in which answers end only when nothing else can happen; all old samples are as far away."""
    run = Stations(limits(num_steps=14, batch_size=4, max_staleness=5, skip_below_kl=0.01))
    run.join(0, rows=2, slots=2)
    run.join(1, rows=2, slots=2)
    while not run.core.done:
        possible = run.possible()
        fact = next((fact for fact in possible if not isinstance(fact, RequestFinished)), possible[0])
        if isinstance(fact, Trained):
            run.pending.remove(fact)
            fact = Trained(fact.step, kls=tuple((version, kl) for version in range(fact.step)))
        run.tell(fact)
    return run


def test_the_trainer_s_measurements_are_what_decides() -> None:
    far, near = slow_engines(0.02), slow_engines(0.001)
    assert far.orders(Skip) == []
    assert len(near.orders(Skip)) > 5
    assert len(near.orders(Load)) < len(far.orders(Load)) / 2
