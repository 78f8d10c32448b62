"""Deliberate faults in how versions come to engines: out of turn, or not at all; and how each shows."""

from __future__ import annotations

import pytest
from tests.sim.breaking import Fault, before_hearing

from dora.core import skipping, versions
from dora.core.divergence import Divergence
from dora.core.records import Limits


def all_engines_load_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_is_turn", lambda state: True)


def what_loads_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    before_hearing(patch, lambda state, event: state.loaders.clear())


def whoever_waits_for_its_turn_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    before_hearing(patch, lambda state, event: state.line.clear())


def a_version_that_is_far_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Divergence, "is_small", lambda self, limits, age: True)


def younger_samples_speak_for_older_ones(patch: pytest.MonkeyPatch) -> None:
    def is_small(self: Divergence, limits: Limits, age: int) -> bool:
        return bool(self.by_age) and min(m.kl for m in self.by_age.values()) < (limits.skip_below_kl or 0)

    patch.setattr(Divergence, "is_small", is_small)


def engines_stay_with_what_expires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(skipping, "deadline_at", lambda state, version: state.limits.num_steps)
    patch.setattr(skipping, "admissible", lambda state, version: 1)


FAULTS: list[tuple[Fault, str]] = [
    (all_engines_load_at_once, "out of turn"),
    (what_loads_is_not_counted, "out of turn"),
    (whoever_waits_for_its_turn_is_forgotten, "a resumed orchestrator"),
    (a_version_that_is_far_is_left_out, "which is far from"),
    (younger_samples_speak_for_older_ones, "which is far from"),
    (engines_stay_with_what_expires, "C3"),
]
