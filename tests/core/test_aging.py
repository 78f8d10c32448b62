"""Adaptive version aging: how far the bound is lowered, and that every guarantee holds meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.midway import engine, midway, prompts, running
from tests.core.stations import Stations, limits

from dora.core.actions import Admit
from dora.core.aging import Aging
from dora.core.events import Trained, Woken
from dora.core.records import AgingRule

RULE = AgingRule(min_ess=0.5, max_kl=0.1, window=2)
BOUNDS = limits(num_steps=40, max_staleness=4, aging=RULE)
CALM, MIDDLING, DRIFT = (0.9, 0.01), (0.7, 0.01), (0.4, 0.01)
CATASTROPHE = (0.9, 0.21)  # too much KL for two batches


def after(*batches: tuple[float | None, float | None], staleness: int, oldest: int | None = None) -> int:
    """The effective staleness after batches with this ESS and KL, each as old as is allowed."""
    aging = Aging(lowered=BOUNDS.max_staleness - staleness)
    for step, measured in enumerate(batches):
        effective = BOUNDS.max_staleness - aging.lowered
        aging.hear(BOUNDS, step, effective if oldest is None else oldest, *measured)
    return BOUNDS.max_staleness - aging.lowered


def test_drift_halves_the_age_that_is_allowed() -> None:
    assert [after(DRIFT, DRIFT, staleness=s) for s in range(5)] == [0, 0, 1, 1, 2]
    assert after((0.9, 0.11), (0.9, 0.11), staleness=4) == 2


def test_one_batch_of_drift_says_little() -> None:
    assert after(DRIFT, staleness=4) == 4
    assert after(DRIFT, CALM, staleness=4) == 4


def test_what_the_next_batches_cannot_make_up_for_is_not_waited_for() -> None:
    assert after(CATASTROPHE, staleness=4) == 2


def test_drift_in_younger_batches_halves_what_they_had() -> None:
    assert after(DRIFT, DRIFT, staleness=4, oldest=1) == 0


def test_drift_in_fresh_batches_is_not_of_age() -> None:
    assert after(DRIFT, DRIFT, staleness=4, oldest=0) == 4
    assert after(CATASTROPHE, CALM, staleness=0) == 0


def test_calm_batches_raise_the_bound_by_one() -> None:
    assert after(CALM, staleness=1) == 1
    assert after(CALM, CALM, staleness=1) == 2
    assert after(*[CALM] * 100, staleness=1) == 4


def test_between_the_limits_nothing_changes() -> None:
    assert after(*[MIDDLING] * 9, staleness=1) == 1
    assert after(*[(0.9, 0.06)] * 9, staleness=1) == 1
    assert after(MIDDLING, MIDDLING, CALM, staleness=1) == 1


def test_a_batch_that_was_admitted_under_a_wider_bound_says_nothing() -> None:
    assert after(*[CATASTROPHE] * 9, staleness=2, oldest=3) == 2
    assert after(*[CALM] * 9, staleness=2, oldest=3) == 2


def test_a_batch_without_a_measurement_says_nothing() -> None:
    assert after((None, None), staleness=4) == 4
    assert after(CALM, (None, None), CALM, staleness=1) == 2


@pytest.mark.parametrize("measured", [(math.nan, 0.0), (1.0, math.nan)])
def test_a_number_that_is_none_counts_as_drift(measured: tuple[float, float]) -> None:
    assert after(measured, staleness=4) == 2


def test_a_step_is_heard_once() -> None:
    aging = Aging()
    aging.hear(BOUNDS, 5, 4, *CATASTROPHE)
    aging.hear(BOUNDS, 5, 2, *CATASTROPHE)
    assert aging == Aging(lowered=2, num_heard=6)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(), st.floats()), max_size=30), st.integers(1, 9))
def test_the_bound_stays_within_what_the_run_promised(
    batches: list[tuple[int, float, float]], max_staleness: int
) -> None:
    bounds, aging = replace(BOUNDS, max_staleness=max_staleness), Aging()
    for step, (oldest, ess, kl) in enumerate(batches):
        aging.hear(bounds, step, oldest, ess, kl)
        assert 0 <= aging.lowered <= max_staleness


def test_a_fixed_bound_stays_what_it_is() -> None:
    aging = Aging()
    aging.hear(limits(max_staleness=4), 0, 4, *CATASTROPHE)
    assert aging == Aging()


@pytest.mark.parametrize(
    "rule", [{"min_ess": 0.0}, {"min_ess": 1.0}, {"max_kl": 0.0}, {"max_kl": math.nan}, {"window": 0}]
)
def test_a_rule_that_cannot_be_met_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window at least 1"):
        replace(RULE, **rule)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing for aging to lower"):
        limits(max_staleness=0, aging=RULE)


def test_groups_keep_the_deadline_they_were_admitted_with() -> None:
    """One of version 1 may wait until step 5, while what is admitted at version 3 is due in step 3."""
    bounds = limits(num_steps=9, max_staleness=4, aging=RULE)
    state = midway(bounds, newest=3)
    engine(state, 0, rows=4, slots=2, held={1, 3})
    running(state, 0, 1, 7)
    prompts(state, 8, 2)
    state.aging.lowered = 4
    run = Stations(bounds, state=state)
    run.ledger.ages.staleness = 0
    run.tell(Woken())
    assert [(order.version, order.deadline) for order in run.orders(Admit)] == [(3, 3), (3, 3)]
    assert run.state.open == {5: 1, 3: 2}
    run.settle()
    assert run.core.done


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slack": 4},
        {"load_interval": 3},
        {"batches_per_version": 3},
        {"is_static": True},
        {"batch_size": 1, "group_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [1, 3])
def test_a_run_in_which_only_fresh_samples_say_something_comes_to_its_end(
    changes: dict[str, int], slots: int
) -> None:
    run = Stations(limits(**({"num_steps": 12, "max_staleness": 3, "aging": RULE} | changes)))
    run.join(0, rows=3, slots=slots)
    run.join(1, rows=2, slots=slots)
    for _ in range(12):
        train(run, CATASTROPHE)
    run.settle()
    assert run.core.done
    assert run.state.aging.lowered == 3
    last = [order for order in run.orders(Admit) if order.version >= 8]
    assert all(order.deadline == order.version for order in last)


def test_a_redone_step_says_nothing_new() -> None:
    run = Stations(limits(num_steps=9, max_staleness=4, aging=RULE))
    run.join(0, rows=8, slots=5)
    for _ in range(3):
        train(run, CATASTROPHE)
    known = replace(run.state.aging)
    assert known.lowered > 0
    run.die(from_step=0)
    run.join(0, rows=8, slots=5)
    for _ in range(3):
        train(run, CALM)
    assert run.state.aging == known
    run.settle()
    assert run.core.done


def train(run: Stations, measured: tuple[float, float]) -> None:
    """All goes on until the next step is trained, and then its figures are told."""
    run.settle(but=lambda fact: isinstance(fact, Trained))
    for told in [fact for fact in run.pending if isinstance(fact, Trained)]:
        run.pending.remove(told)
        run.tell(Trained(told.step, *measured))
