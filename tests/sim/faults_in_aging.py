"""Deliberate faults in adaptive version aging, and how each shows."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.sim.breaking import Fault, before_hearing
from tests.sim.faults_in_groups import snapshot_without

from dora.core import admission, bound, versions
from dora.core.aging import Aging
from dora.core.events import Event, Resumed, Trained
from dora.core.records import Limits
from dora.core.state import State


def told_otherwise(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The rule hears something else instead."""
    right = Aging.hear

    def hear(
        self: Aging, limits: Limits, step: int, oldest: int, ess: float | None, kl: float | None
    ) -> None:
        right(self, limits, **({"step": step, "oldest": oldest, "ess": ess, "kl": kl} | changes))

    patch.setattr(Aging, "hear", hear)


def drift_is_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, ess=None)


def only_the_kl_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, ess=1.0)


def only_the_ess_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, kl=0.0)


def batches_of_a_wider_bound_are_judged(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, oldest=0)


def a_redone_step_is_judged_again(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event) -> None:
        if isinstance(event, Resumed):
            state.aging.num_heard = 0

    before_hearing(patch, forget)


def every_batch_is_judged_alone(patch: pytest.MonkeyPatch) -> None:
    right = Aging.hear

    def hear(self: Aging, limits: Limits, *told: Any) -> None:
        hasty = limits.aging and replace(limits.aging, window=1)
        right(self, replace(limits, aging=hasty), *told)

    patch.setattr(Aging, "hear", hear)


def aging_goes_below_0(patch: pytest.MonkeyPatch) -> None:
    def lower(state: State, event: Event) -> None:
        if isinstance(event, Trained) and state.limits.aging:
            state.aging.lowered = state.limits.max_staleness + 1

    before_hearing(patch, lower)


def aging_allows_more_than_was_promised(patch: pytest.MonkeyPatch) -> None:
    def raised(state: State, event: Event) -> None:
        if isinstance(event, Trained) and state.limits.aging:
            state.aging.lowered = -1

    before_hearing(patch, raised)


def open_groups_get_the_new_deadline(patch: pytest.MonkeyPatch) -> None:
    """With the rule for what is admitted applied to what was."""

    def hurry(state: State, event: Event) -> None:
        for group in state.groups.values():
            group.deadline = min(group.deadline, bound.deadline_at(state, group.version))

    before_hearing(patch, hurry)


def admission_looks_at_the_widest_bound(patch: pytest.MonkeyPatch) -> None:
    for module in (admission, bound, versions):
        patch.setattr(module, "deadline_at", lambda state, version: state.limits.deadline(version))


FAULTS: list[tuple[Fault, str]] = [
    (drift_is_not_heard_of, "C3"),
    (only_the_kl_is_looked_at, "C3"),
    (only_the_ess_is_looked_at, "C3"),
    (batches_of_a_wider_bound_are_judged, "C3"),
    (a_redone_step_is_judged_again, "C3"),
    (every_batch_is_judged_alone, "C3"),
    (aging_goes_below_0, "C3"),
    (aging_allows_more_than_was_promised, "C3"),
    (open_groups_get_the_new_deadline, "open groups are miscounted"),
    (admission_looks_at_the_widest_bound, "C3"),
    (snapshot_without("aging", asdict(Aging())), "a resumed orchestrator"),
]
