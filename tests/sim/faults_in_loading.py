"""Deliberate faults in the order of loads and in skipped versions, and the message of each."""

from __future__ import annotations

from tests.sim.fault_tools import Function, add_fault, before_handling, replaces

from dora.core import weight_sync
from dora.core.events import Event
from dora.core.staleness import Divergence
from dora.core.state import State
from dora.core.types import Limits

add_fault("all_engines_load_at_once", "out of turn", (weight_sync, "_may_start_load", lambda state: True))
add_fault(
    "a_version_with_a_high_kl_is_skipped",
    "which is far from",
    (Divergence, "is_below_threshold", lambda self, limits, age: True),
)
add_fault(
    "engines_keep_a_version_that_expires",
    "C3",
    (weight_sync, "deadline_at", lambda state, version: state.limits.num_steps),
    (weight_sync, "cached_num_admissible", lambda state, version: 1),
)


@before_handling("out of turn")
def loading_engines_are_not_counted(state: State, event: Event) -> None:
    state.loading_engines.clear()


@before_handling("a resumed orchestrator")
def engines_that_wait_for_their_turn_are_forgotten(state: State, event: Event) -> None:
    state.load_queue.clear()


@replaces("which is far from", Divergence, "is_below_threshold")
def the_kl_of_younger_samples_counts_for_older_ones(
    original: Function, self: Divergence, limits: Limits, age: int
) -> bool:
    kls = [measured.kl for measured in self.by_staleness.values()]
    return bool(kls) and min(kls) < (limits.skip_below_kl or 0)
