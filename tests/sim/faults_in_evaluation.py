"""Deliberate faults in evaluations, and the message of each."""

from __future__ import annotations

from typing import Any

from tests.sim.fault_tools import (
    Function,
    Replacement,
    add_fault,
    after_handling,
    forget_in_snapshot,
    replacement,
    replaces,
)

from dora.core import admission, batching, evaluation, weight_sync
from dora.core.actions import Action, Score, SkipEvaluation, StartEvaluation
from dora.core.events import Published, Resumed
from dora.core.state import EngineRecord, EvaluationRecord, State
from dora.core.types import EvaluationRule, GroupId, RequestId


def without_evaluation(owner: object, rule: str) -> Replacement:
    """Hide the running evaluation from a rule."""

    def broken(original: Function, state: State) -> Any:
        running, state.evaluation = state.evaluation, None
        actions = original(state)
        state.evaluation = running
        return actions

    return replacement(owner, rule, broken)


add_fault(
    "groups_are_admitted_during_the_evaluation_before_training",
    "is admitted during the evaluation before training",
    without_evaluation(admission, "admit"),
)
add_fault(
    "an_evaluated_version_is_retired", "is retired under", without_evaluation(weight_sync, "retire_versions")
)
add_fault(
    "the_run_does_not_wait_for_an_evaluation",
    "the run stops during an evaluation",
    without_evaluation(batching, "train"),
)
add_fault(
    "a_due_evaluation_is_forgotten",
    "its evaluation was not started",
    (evaluation, "start_if_due", lambda state: []),
)
add_fault(
    "an_evaluation_takes_all_rows",
    "rows evaluate",
    (evaluation, "_max_unfinished", lambda state, evaluation: state.num_rows),
)
add_fault(
    "no_engine_loads_an_older_version_to_evaluate_it",
    "deadlock",
    (weight_sync, "load_for_evaluation", lambda state, is_rebalance: []),
)
add_fault(
    "one_answer_too_few_is_started",
    "deadlock",
    (
        EvaluationRecord,
        "num_not_started",
        property(lambda run: max(0, run.num_requests - run.num_started - 1)),
    ),
)
forget_in_snapshot("evaluation", None, "ProtocolError")
forget_in_snapshot("last_evaluated", -1, "a resumed orchestrator")


@replaces("are evaluated at once", evaluation, "start_if_due")
def two_versions_are_evaluated_at_once(original: Function, state: State) -> list[Action]:
    started: list[Action] = original(state)
    if started and state.evaluation is not None:
        started[0] = StartEvaluation(state.last_evaluated)
    return started


@after_handling("is not due for an evaluation", Resumed)
def a_redone_version_is_evaluated_again(state: State, event: Resumed, actions: list[Action]) -> None:
    state.last_evaluated = -1


@replaces("was due, and its evaluation was not started", EvaluationRule, "is_due")
def the_last_version_is_not_evaluated(
    original: Function, rule: EvaluationRule, version: int, num_steps: int
) -> bool:
    return version < num_steps and version % max(1, rule.every) == 0


@replaces("was due, and its evaluation was not started", evaluation, "_finish_prompt")
def the_last_version_is_forgotten_while_another_is_evaluated(original: Function, *arguments: Any) -> Any:
    return original(*arguments)[:1]


@replaces("evaluation of the last version is skipped", evaluation, "start_if_due")
def the_last_version_is_skipped_while_another_is_evaluated(original: Function, state: State) -> Any:
    running, num_steps = state.evaluation, state.limits.num_steps
    if running is not None and state.newest_published == num_steps > state.last_evaluated:
        state.last_evaluated = num_steps
        return [SkipEvaluation(num_steps, running.version)]
    return original(state)


@replaces("deadlock", weight_sync, "_version_to_load")
def no_engine_loads_the_last_version_to_evaluate_it(
    original: Function, state: State, engine: EngineRecord
) -> Any:
    return None if state.is_training_done else original(state, engine)


@replaces("held-out requests of another version", EvaluationRule, "request_id")
def held_out_requests_are_those_of_another_version(
    original: Function, rule: EvaluationRule, version: int, index: int
) -> Any:
    return original(rule, version + (version > 0), index)


@replaces("is scored twice, or before", evaluation, "finish_request")
def a_prompt_is_scored_before_its_answers_have_finished(
    original: Function, state: State, request: RequestId, *, is_failed: bool = False
) -> list[Action]:
    original(state, request, is_failed=is_failed)
    return [Score(request.group)]


@replaces("is scored twice, or before", evaluation, "finish_request")
def a_failed_answer_counts_as_finished(
    original: Function, state: State, request: RequestId, *, is_failed: bool = False
) -> Any:
    return original(state, request)


@replaces("does not finish", evaluation, "finish_scoring")
def a_scored_prompt_is_not_counted(original: Function, state: State, group: GroupId) -> Any:
    run = state.evaluation
    actions = original(state, group)
    if run is not None and run.num_prompts_done == 1:
        run.num_prompts_done = 0
    return actions


@after_handling("deadlock", Resumed)
def prompts_being_scored_are_forgotten_in_a_resume(
    state: State, event: Resumed, actions: list[Action]
) -> list[Action]:
    return [action for action in actions if not (isinstance(action, Score) and action.group.is_held_out)]


@replaces("does not finish", evaluation, "_finish_prompt")
def the_evaluation_is_never_finished(original: Function, *arguments: Any) -> Any:
    return original(*arguments) and []


@after_handling("is not due for an evaluation", Published)
def every_version_is_evaluated(state: State, event: Published, actions: list[Action]) -> None:
    if state.evaluation is None and state.limits.evaluation:
        actions.append(StartEvaluation(event.version))
