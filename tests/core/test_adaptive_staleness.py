"""Adaptive version adaptive: how far the bound is lowered, and that every guarantee holds meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fake_workers import FakeWorkers, limits, one_engine
from tests.core.midrun import add_engine, add_prompts, add_running, state_at

from dora.core.actions import Admit
from dora.core.events import TimerFired, Trained
from dora.core.staleness import AdaptiveStaleness
from dora.core.types import AdaptiveStalenessRule

RULE = AdaptiveStalenessRule(min_ess=0.5, max_kl=0.1, window=2)
BOUNDS = limits(num_steps=40, max_staleness=4, adaptive_staleness=RULE)
STABLE, MODERATE, DRIFT = (0.9, 0.01), (0.7, 0.01), (0.4, 0.01)
SEVERE_DRIFT = (0.9, 0.21)  # too much KL for two batches


def effective_staleness(
    *batches: tuple[float | None, float | None], staleness: int, oldest: int | None = None
) -> int:
    """The effective staleness effective_staleness batches with this ESS and KL, each as old as is allowed."""
    adaptive = AdaptiveStaleness(reduction=BOUNDS.max_staleness - staleness)
    for step, measured in enumerate(batches):
        effective = BOUNDS.max_staleness - adaptive.reduction
        adaptive.update(BOUNDS, step, effective if oldest is None else oldest, *measured)
    return BOUNDS.max_staleness - adaptive.reduction


def test_drift_halves_the_effective_staleness() -> None:
    assert [effective_staleness(DRIFT, DRIFT, staleness=s) for s in range(5)] == [0, 0, 1, 1, 2]
    assert effective_staleness((0.9, 0.11), (0.9, 0.11), staleness=4) == 2


def test_one_batch_of_drift_changes_nothing() -> None:
    assert effective_staleness(DRIFT, staleness=4) == 4
    assert effective_staleness(DRIFT, STABLE, staleness=4) == 4


def test_severe_drift_acts_before_the_window_is_full() -> None:
    assert effective_staleness(SEVERE_DRIFT, staleness=4) == 2


def test_drift_in_younger_batches_halves_their_staleness() -> None:
    assert effective_staleness(DRIFT, DRIFT, staleness=4, oldest=1) == 0


def test_drift_of_on_policy_batches_is_ignored() -> None:
    assert effective_staleness(DRIFT, DRIFT, staleness=4, oldest=0) == 4
    assert effective_staleness(SEVERE_DRIFT, STABLE, staleness=0) == 0


def test_a_stable_window_raises_the_bound_by_one() -> None:
    assert effective_staleness(STABLE, staleness=1) == 1
    assert effective_staleness(STABLE, STABLE, staleness=1) == 2
    assert effective_staleness(*[STABLE] * 100, staleness=1) == 4


def test_between_the_thresholds_nothing_changes() -> None:
    assert effective_staleness(*[MODERATE] * 9, staleness=1) == 1
    assert effective_staleness(*[(0.9, 0.06)] * 9, staleness=1) == 1
    assert effective_staleness(MODERATE, MODERATE, STABLE, staleness=1) == 1


def test_a_batch_older_than_the_current_bound_is_ignored() -> None:
    assert effective_staleness(*[SEVERE_DRIFT] * 9, staleness=2, oldest=3) == 2
    assert effective_staleness(*[STABLE] * 9, staleness=2, oldest=3) == 2


def test_a_batch_without_a_measurement_is_ignored() -> None:
    assert effective_staleness((None, None), staleness=4) == 4
    assert effective_staleness(STABLE, (None, None), STABLE, staleness=1) == 2


@pytest.mark.parametrize("measured", [(math.nan, 0.0), (1.0, math.nan)])
def test_nan_counts_as_drift(measured: tuple[float, float]) -> None:
    assert effective_staleness(measured, staleness=4) == 2


def test_a_step_counts_once() -> None:
    adaptive = AdaptiveStaleness()
    adaptive.update(BOUNDS, 5, 4, *SEVERE_DRIFT)
    adaptive.update(BOUNDS, 5, 2, *SEVERE_DRIFT)
    assert adaptive == AdaptiveStaleness(reduction=2, num_steps_seen=6)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(), st.floats()), max_size=30), st.integers(1, 9))
def test_the_bound_stays_between_0_and_max_staleness(
    batches: list[tuple[int, float, float]], max_staleness: int
) -> None:
    bounds, adaptive = replace(BOUNDS, max_staleness=max_staleness), AdaptiveStaleness()
    for step, (oldest, ess, kl) in enumerate(batches):
        adaptive.update(bounds, step, oldest, ess, kl)
        assert 0 <= adaptive.reduction <= max_staleness


def test_a_fixed_bound_never_changes() -> None:
    adaptive = AdaptiveStaleness()
    adaptive.update(limits(max_staleness=4), 0, 4, *SEVERE_DRIFT)
    assert adaptive == AdaptiveStaleness()


@pytest.mark.parametrize(
    "rule", [{"min_ess": 0.0}, {"min_ess": 1.0}, {"max_kl": 0.0}, {"max_kl": math.nan}, {"window": 0}]
)
def test_an_impossible_rule_is_rejected(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window at least 1"):
        replace(RULE, **rule)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires max_staleness of at least 1"):
        limits(max_staleness=0, adaptive_staleness=RULE)


def test_groups_keep_the_deadline_they_were_admitted_with() -> None:
    """A group of version 1 may wait until step 5, while groups admitted at version 3 are due in step 3."""
    bounds = limits(num_steps=9, max_staleness=4, adaptive_staleness=RULE)
    state = state_at(bounds, newest=3)
    add_engine(state, 0, rows=4, slots=2, loaded={1, 3})
    add_running(state, 0, 1, 7)
    add_prompts(state, 8, 2)
    state.adaptive_staleness.reduction = 4
    run = FakeWorkers(bounds, state=state)
    run.checker.adaptive_staleness.bound = 0
    run.deliver(TimerFired())
    assert [(action.version, action.deadline) for action in run.actions(Admit)] == [(3, 3), (3, 3)]
    assert run.state.num_open == {5: 1, 3: 2}
    run.deliver_all()
    assert run.orchestrator.done


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slack": 4},
        {"weight_sync_interval": 3},
        {"batches_per_version": 3},
        {"is_static": True},
        {"batch_size": 1, "group_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [1, 3])
def test_a_run_under_constant_drift_finishes(changes: dict[str, int], slots: int) -> None:
    run = FakeWorkers(limits(**({"num_steps": 12, "max_staleness": 3, "adaptive_staleness": RULE} | changes)))
    run.join(0, rows=3, slots=slots)
    run.join(1, rows=2, slots=slots)
    for _ in range(12):
        train(run, SEVERE_DRIFT)
    run.deliver_all()
    assert run.orchestrator.done
    assert run.state.adaptive_staleness.reduction == 3
    last = [action for action in run.actions(Admit) if action.version >= 8]
    assert all(action.deadline == action.version for action in last)


def test_a_redone_step_is_not_counted_again() -> None:
    run = one_engine(limits(num_steps=9, max_staleness=4, adaptive_staleness=RULE), rows=8, slots=5)
    for _ in range(3):
        train(run, SEVERE_DRIFT)
    known = replace(run.state.adaptive_staleness)
    assert known.reduction > 0
    run.crash(from_step=0)
    run.join(0, rows=8, slots=5)
    for _ in range(3):
        train(run, STABLE)
    assert run.state.adaptive_staleness == known
    run.deliver_all()
    assert run.orchestrator.done


def train(run: FakeWorkers, measured: tuple[float, float]) -> None:
    """Continue until the next step is trained, with these measurements."""
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    for event in [event for event in run.pending if isinstance(event, Trained)]:
        run.pending.remove(event)
        run.deliver(Trained(event.step, *measured))
