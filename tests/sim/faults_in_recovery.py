"""Deliberate faults in recovery from a lost trainer or a crash of the run, and the message of each."""

from __future__ import annotations

from tests.sim.fault_tools import Function, add_fault, after_handling, replaces

from dora.core import recovery
from dora.core.actions import Action, Publish
from dora.core.events import TrainerLost, TrainerReplaced
from dora.core.state import State

add_fault("more_steps_are_ignored", "C3: ", (recovery, "replace", lambda limits, num_steps: limits))


@replaces("C1: version", recovery, "publish_or_report_digest")
def a_version_is_published_again(original: Function, state: State, version: int) -> list[Action]:
    state.publishing_version = version
    return [Publish(version)]


@after_handling("redoes a voided step with another number", TrainerReplaced)
def steps_are_not_trained_again(state: State, event: TrainerReplaced, actions: list[Action]) -> None:
    state.redo_batches.clear()


@after_handling("starts without a trainer", TrainerLost)
def a_lost_trainer_is_ignored(state: State, event: TrainerLost, actions: list[Action]) -> None:
    state.is_trainer_lost = False


@after_handling("deadlock", TrainerLost)
def the_step_of_a_lost_trainer_stays_active(state: State, event: TrainerLost, actions: list[Action]) -> None:
    if state.newest_published in state.batches:
        state.training_step = state.newest_published
