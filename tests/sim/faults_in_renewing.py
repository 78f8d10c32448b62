"""Deliberate faults in how answers go on with newer versions; and how each shows."""

from __future__ import annotations

import pytest
from tests.sim.breaking import Fault

from dora.core import renewing
from dora.core.engines import Engine
from dora.core.state import State


def what_runs_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renewing, "renew", lambda state, engine, version: None)


def what_waits_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renewing, "catch_up", lambda state: None)


def held_out_answers_go_on_with_newer_versions(patch: pytest.MonkeyPatch) -> None:
    right = renewing.renew

    def renew(state: State, engine: Engine, version: int) -> None:
        right(state, engine, version)
        for request, old in engine.requests.items():
            if old < version:
                engine.running[old] -= 1
                engine.running[version] += 1
                engine.requests[request] = version

    patch.setattr(renewing, "renew", renew)


def what_goes_on_pins_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renewing, "_change", lambda state, request, version: None)


FAULTS: list[tuple[Fault, str]] = [
    (what_runs_is_left_behind, "drops version"),
    (what_waits_is_left_behind, "changes its version"),
    (held_out_answers_go_on_with_newer_versions, "by its own version"),
    (what_goes_on_pins_nothing, "which holds"),
]
