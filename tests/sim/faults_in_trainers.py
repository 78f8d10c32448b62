"""Deliberate faults in how training goes on without its trainer; and how each shows."""

from __future__ import annotations

import pytest
from tests.sim.breaking import Fault, after_hearing

from dora.core import replacing
from dora.core.actions import Action, Publish
from dora.core.events import Event, TrainerLost, TrainerReplaced
from dora.core.state import State


def a_redone_version_is_published(patch: pytest.MonkeyPatch) -> None:
    def publish(state: State, version: int) -> list[Action]:
        state.publishing = version
        return [Publish(version)]

    patch.setattr(replacing, "publish", publish)


def steps_are_not_redone(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, TrainerReplaced):
            state.redo.clear()
        return orders

    after_hearing(patch, forget)


def a_dead_trainer_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, TrainerLost):
            state.is_trainer_lost = False
        return orders

    after_hearing(patch, forget)


def the_step_of_a_dead_trainer_stays_under_way(patch: pytest.MonkeyPatch) -> None:
    def keep(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, TrainerLost) and state.newest in state.batches:
            state.training = state.newest
        return orders

    after_hearing(patch, keep)


FAULTS: list[tuple[Fault, str]] = [
    (a_redone_version_is_published, "C1: version"),
    (steps_are_not_redone, "is trained out of order"),
    (a_dead_trainer_is_not_noticed, "begins without a trainer"),
    (the_step_of_a_dead_trainer_stays_under_way, "deadlock"),
]
