"""Deliberate faults in the order of loads and in skipped versions, and the message of each."""

from __future__ import annotations

import pytest
from tests.sim.fault_tools import Fault, before_handling

from dora.core import weight_sync
from dora.core.staleness import Divergence
from dora.core.types import Limits


def all_engines_load_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "_may_start_load", lambda state: True)


def loading_engines_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    before_handling(patch, lambda state, event: state.loading_engines.clear())


def engines_that_wait_for_their_turn_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    before_handling(patch, lambda state, event: state.load_queue.clear())


def a_version_with_a_high_kl_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "is_below_threshold", lambda self, limits, age: True)


def the_kl_of_younger_samples_counts_for_older_ones(patch: pytest.MonkeyPatch) -> None:
    def is_below_threshold(self: Divergence, limits: Limits, age: int) -> bool:
        return bool(self.by_staleness) and min(m.kl for m in self.by_staleness.values()) < (
            limits.skip_below_kl or 0
        )

    patch.setattr(Divergence, "is_below_threshold", is_below_threshold)


def engines_keep_a_version_that_expires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "deadline_at", lambda state, version: state.limits.num_steps)
    patch.setattr(weight_sync, "cached_num_admissible", lambda state, version: 1)


FAULTS: list[tuple[Fault, str]] = [
    (all_engines_load_at_once, "out of turn"),
    (loading_engines_are_not_counted, "out of turn"),
    (engines_that_wait_for_their_turn_are_forgotten, "a resumed orchestrator"),
    (a_version_with_a_high_kl_is_skipped, "which is far from"),
    (the_kl_of_younger_samples_counts_for_older_ones, "which is far from"),
    (engines_keep_a_version_that_expires, "C3"),
]
