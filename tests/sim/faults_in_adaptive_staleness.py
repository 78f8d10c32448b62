"""Deliberate faults in adaptive staleness, and the message of each."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.sim.fault_tools import Fault, before_handling
from tests.sim.faults_in_groups import snapshot_without

from dora.core import admission, bound, weight_sync
from dora.core.events import Event, Resumed, Trained
from dora.core.staleness import AdaptiveStaleness
from dora.core.state import State
from dora.core.types import Limits


def change_arguments(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change arguments of the rule's update."""
    original = AdaptiveStaleness.update

    def update(
        self: AdaptiveStaleness, limits: Limits, step: int, oldest: int, ess: float | None, kl: float | None
    ) -> None:
        original(self, limits, **({"step": step, "oldest": oldest, "ess": ess, "kl": kl} | changes))

    patch.setattr(AdaptiveStaleness, "update", update)


def drift_is_ignored(patch: pytest.MonkeyPatch) -> None:
    change_arguments(patch, ess=None)


def only_the_kl_counts(patch: pytest.MonkeyPatch) -> None:
    change_arguments(patch, ess=1.0)


def only_the_ess_counts(patch: pytest.MonkeyPatch) -> None:
    change_arguments(patch, kl=0.0)


def batches_of_a_wider_bound_count(patch: pytest.MonkeyPatch) -> None:
    change_arguments(patch, oldest=0)


def a_step_trained_again_counts_twice(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event) -> None:
        if isinstance(event, Resumed):
            state.adaptive_staleness.num_steps_seen = 0

    before_handling(patch, forget)


def the_window_is_one_batch(patch: pytest.MonkeyPatch) -> None:
    original = AdaptiveStaleness.update

    def update(self: AdaptiveStaleness, limits: Limits, *arguments: Any) -> None:
        rule = limits.adaptive_staleness and replace(limits.adaptive_staleness, window=1)
        original(self, replace(limits, adaptive_staleness=rule), *arguments)

    patch.setattr(AdaptiveStaleness, "update", update)


def the_bound_goes_below_0(patch: pytest.MonkeyPatch) -> None:
    def lower(state: State, event: Event) -> None:
        if isinstance(event, Trained) and state.limits.adaptive_staleness:
            state.adaptive_staleness.reduction = state.limits.max_staleness + 1

    before_handling(patch, lower)


def the_bound_exceeds_max_staleness(patch: pytest.MonkeyPatch) -> None:
    def increase(state: State, event: Event) -> None:
        if isinstance(event, Trained) and state.limits.adaptive_staleness:
            state.adaptive_staleness.reduction = -1

    before_handling(patch, increase)


def open_groups_get_a_new_deadline(patch: pytest.MonkeyPatch) -> None:
    """Applies the rule for admission to groups that are admitted."""

    def shorten_deadlines(state: State, event: Event) -> None:
        for group in state.groups.values():
            group.deadline = min(group.deadline, bound.deadline_at(state, group.version))

    before_handling(patch, shorten_deadlines)


def admission_uses_max_staleness(patch: pytest.MonkeyPatch) -> None:
    for module in (admission, bound, weight_sync):
        patch.setattr(module, "deadline_at", lambda state, version: state.limits.deadline(version))


FAULTS: list[tuple[Fault, str]] = [
    (drift_is_ignored, "C3"),
    (only_the_kl_counts, "C3"),
    (only_the_ess_counts, "C3"),
    (batches_of_a_wider_bound_count, "C3"),
    (a_step_trained_again_counts_twice, "C3"),
    (the_window_is_one_batch, "C3"),
    (the_bound_goes_below_0, "C3"),
    (the_bound_exceeds_max_staleness, "C3"),
    (open_groups_get_a_new_deadline, "open groups are miscounted"),
    (admission_uses_max_staleness, "C3"),
    (snapshot_without("adaptive_staleness", asdict(AdaptiveStaleness())), "a resumed orchestrator"),
]
