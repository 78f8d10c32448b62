"""Deliberate faults in recovery from a lost trainer or a crash of the run, and the message of each."""

from __future__ import annotations

import pytest
from tests.sim.fault_tools import Fault, after_handling

from dora.core import recovery
from dora.core.actions import Action, Publish
from dora.core.events import Event, TrainerLost, TrainerReplaced
from dora.core.state import State


def a_version_is_published_again(patch: pytest.MonkeyPatch) -> None:
    def publish_again(state: State, version: int) -> list[Action]:
        state.publishing_version = version
        return [Publish(version)]

    patch.setattr(recovery, "publish_or_report_digest", publish_again)


def steps_are_not_trained_again(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, TrainerReplaced):
            state.redo_batches.clear()
        return actions

    after_handling(patch, forget)


def a_lost_trainer_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, TrainerLost):
            state.is_trainer_lost = False
        return actions

    after_handling(patch, forget)


def the_step_of_a_lost_trainer_stays_active(patch: pytest.MonkeyPatch) -> None:
    def keep(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, TrainerLost) and state.newest_published in state.batches:
            state.training_step = state.newest_published
        return actions

    after_handling(patch, keep)


def more_steps_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "replace", lambda limits, num_steps: limits)


FAULTS: list[tuple[Fault, str]] = [
    (a_version_is_published_again, "C1: version"),
    (steps_are_not_trained_again, "redoes a voided step with another number"),
    (a_lost_trainer_is_ignored, "starts without a trainer"),
    (the_step_of_a_lost_trainer_stays_active, "deadlock"),
    (more_steps_are_ignored, "C3: "),
]
