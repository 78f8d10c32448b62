"""Deliberate faults in adaptive staleness, and the message of each."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from tests.sim.fault_tools import (
    Function,
    Replacement,
    add_fault,
    before_handling,
    forget_in_snapshot,
    replacement,
    replaces,
)

from dora.core import admission, bound, weight_sync
from dora.core.events import Event, Resumed, Trained
from dora.core.staleness import AdaptiveStaleness
from dora.core.state import State
from dora.core.types import Limits


def update_with(**changes: Any) -> Replacement:
    """Change arguments of the rule's update."""

    def update(original: Function, rule: AdaptiveStaleness, limits: Limits, *arguments: Any) -> None:
        names = ("step", "oldest", "ess", "kl")
        original(rule, limits, **(dict(zip(names, arguments, strict=True)) | changes))

    return replacement(AdaptiveStaleness, "update", update)


add_fault("drift_is_ignored", "C3", update_with(ess=None))
add_fault("only_the_kl_counts", "C3", update_with(ess=1.0))
add_fault("only_the_ess_counts", "C3", update_with(kl=0.0))
add_fault("batches_of_a_wider_bound_count", "C3", update_with(oldest=0))
add_fault(
    "admission_uses_max_staleness",
    "C3",
    *(
        (module, "deadline_at", lambda state, version: state.limits.deadline(version))
        for module in (admission, bound, weight_sync)
    ),
)
forget_in_snapshot("adaptive_staleness", asdict(AdaptiveStaleness()), "a resumed orchestrator")


@before_handling("C3", Resumed)
def a_step_trained_again_counts_twice(state: State, event: Resumed) -> None:
    state.adaptive_staleness.num_steps_seen = 0


@replaces("C3", AdaptiveStaleness, "update")
def the_window_is_one_batch(
    original: Function, self: AdaptiveStaleness, limits: Limits, *arguments: Any
) -> None:
    rule = limits.adaptive_staleness and replace(limits.adaptive_staleness, window=1)
    original(self, replace(limits, adaptive_staleness=rule), *arguments)


@before_handling("C3", Trained)
def the_bound_goes_below_0(state: State, event: Trained) -> None:
    if state.limits.adaptive_staleness:
        state.adaptive_staleness.reduction = state.limits.max_staleness + 1


@before_handling("C3", Trained)
def the_bound_exceeds_max_staleness(state: State, event: Trained) -> None:
    if state.limits.adaptive_staleness:
        state.adaptive_staleness.reduction = -1


@before_handling("open groups are miscounted")
def open_groups_get_a_new_deadline(state: State, event: Event) -> None:
    """Applies the rule for admission to groups that are admitted."""
    for group in state.groups.values():
        group.deadline = min(group.deadline, bound.deadline_at(state, group.version))
