"""Deliberate faults in evaluations, and the message of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim.fault_tools import Fault, after_handling
from tests.sim.faults_in_groups import snapshot_without

from dora.core import admission, batching, evaluation, event_handlers, weight_sync
from dora.core.actions import Action, Score, SkipEvaluation, StartEvaluation
from dora.core.events import Event, Published, Resumed
from dora.core.state import EvaluationRecord, State
from dora.core.types import EvaluationRule, RequestId


def hide_evaluation(patch: pytest.MonkeyPatch, module: object, rule: str) -> None:
    """Hide the running evaluation from a rule."""
    original = getattr(module, rule)

    def without_evaluation(state: State) -> list[Action]:
        running, state.evaluation = state.evaluation, None
        actions: list[Action] = original(state)
        state.evaluation = running
        return actions

    patch.setattr(module, rule, without_evaluation)


def two_versions_are_evaluated_at_once(patch: pytest.MonkeyPatch) -> None:
    original = evaluation.start_if_due

    def start_if_due(state: State) -> list[Action]:
        started, running = original(state), state.evaluation
        if started and running is not None:
            started[0] = StartEvaluation(state.last_evaluated)
        return started

    patch.setattr(evaluation, "start_if_due", start_if_due)


def a_due_evaluation_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluation, "start_if_due", lambda state: [])


def a_redone_version_is_evaluated_again(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, Resumed):
            state.last_evaluated = -1
        return actions

    after_handling(patch, forget)


def groups_are_admitted_during_the_evaluation_before_training(patch: pytest.MonkeyPatch) -> None:
    hide_evaluation(patch, admission, "admit")


def the_last_version_is_not_evaluated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        EvaluationRule,
        "is_due",
        lambda rule, version, num_steps: version < num_steps and version % max(1, rule.every) == 0,
    )


def the_last_version_is_forgotten_while_another_is_evaluated(patch: pytest.MonkeyPatch) -> None:
    original = evaluation._finish_prompt
    patch.setattr(evaluation, "_finish_prompt", lambda *arguments: original(*arguments)[:1])


def the_last_version_is_skipped_while_another_is_evaluated(patch: pytest.MonkeyPatch) -> None:
    original = evaluation.start_if_due

    def start_if_due(state: State) -> list[Action]:
        running, num_steps = state.evaluation, state.limits.num_steps
        if running is not None and state.newest_published == num_steps > state.last_evaluated:
            state.last_evaluated = num_steps
            return [SkipEvaluation(num_steps, running.version)]
        return original(state)

    patch.setattr(evaluation, "start_if_due", start_if_due)


def no_engine_loads_the_last_version_to_evaluate_it(patch: pytest.MonkeyPatch) -> None:
    original = weight_sync._version_to_load
    patch.setattr(
        weight_sync,
        "_version_to_load",
        lambda state, engine: None if state.is_training_done else original(state, engine),
    )


def an_evaluated_version_is_retired(patch: pytest.MonkeyPatch) -> None:
    hide_evaluation(patch, weight_sync, "retire_versions")


def the_run_does_not_wait_for_an_evaluation(patch: pytest.MonkeyPatch) -> None:
    hide_evaluation(patch, batching, "train")


def an_evaluation_takes_all_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluation, "_max_unfinished", lambda state, evaluation: state.num_rows)


def held_out_requests_are_those_of_another_version(patch: pytest.MonkeyPatch) -> None:
    original = EvaluationRule.request_id
    wrong: Callable[[EvaluationRule, int, int], RequestId]
    wrong = lambda rule, version, index: original(rule, version + (version > 0), index)  # noqa: E731
    patch.setattr(EvaluationRule, "request_id", wrong)


def one_answer_too_few_is_started(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        EvaluationRecord,
        "num_not_started",
        property(lambda run: max(0, run.num_requests - run.num_started - 1)),
    )


def no_engine_loads_an_older_version_to_evaluate_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "load_for_evaluation", lambda state, is_rebalance: [])


def a_prompt_is_scored_before_its_answers_have_finished(patch: pytest.MonkeyPatch) -> None:
    original = evaluation.finish_request

    def finish_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
        original(state, request, is_failed=is_failed)
        return [Score(request.group)]

    patch.setattr(evaluation, "finish_request", finish_request)


def a_failed_answer_counts_as_finished(patch: pytest.MonkeyPatch) -> None:
    original = evaluation.finish_request

    def finish_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
        return original(state, request)

    patch.setattr(evaluation, "finish_request", finish_request)


def a_scored_prompt_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = evaluation.finish_scoring

    def finish_scoring(state: State, group: object) -> list[Action]:
        run = state.evaluation
        actions = original(state, group)  # type: ignore[arg-type]
        if run is not None and run.num_prompts_done == 1:
            run.num_prompts_done = 0
        return actions

    patch.setattr(evaluation, "finish_scoring", finish_scoring)


def prompts_being_scored_are_forgotten_in_a_resume(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        is_resumed = isinstance(event, Resumed)
        return [o for o in actions if not (is_resumed and isinstance(o, Score) and o.group.is_held_out)]

    after_handling(patch, forget)


def the_evaluation_is_never_finished(patch: pytest.MonkeyPatch) -> None:
    original = evaluation._finish_prompt
    patch.setattr(evaluation, "_finish_prompt", lambda *arguments: original(*arguments) and [])


def every_version_is_evaluated(patch: pytest.MonkeyPatch) -> None:
    original = event_handlers.handle

    def handle(state: State, event: Event) -> list[Action]:
        actions = original(state, event)
        if isinstance(event, Published) and state.evaluation is None and state.limits.evaluation:
            actions.append(StartEvaluation(event.version))
        return actions

    patch.setattr(event_handlers, "handle", handle)


FAULTS: list[tuple[Fault, str]] = [
    (two_versions_are_evaluated_at_once, "are evaluated at once"),
    (a_due_evaluation_is_forgotten, "its evaluation was not started"),
    (a_redone_version_is_evaluated_again, "is not due for an evaluation"),
    (
        groups_are_admitted_during_the_evaluation_before_training,
        "is admitted during the evaluation before training",
    ),
    (the_last_version_is_not_evaluated, "was due, and its evaluation was not started"),
    (the_last_version_is_forgotten_while_another_is_evaluated, "was due, and its evaluation was not started"),
    (the_last_version_is_skipped_while_another_is_evaluated, "evaluation of the last version is skipped"),
    (no_engine_loads_the_last_version_to_evaluate_it, "deadlock"),
    (every_version_is_evaluated, "is not due for an evaluation"),
    (an_evaluated_version_is_retired, "is retired under"),
    (the_run_does_not_wait_for_an_evaluation, "the run stops during an evaluation"),
    (an_evaluation_takes_all_rows, "rows evaluate"),
    (held_out_requests_are_those_of_another_version, "held-out requests of another version"),
    (one_answer_too_few_is_started, "deadlock"),
    (no_engine_loads_an_older_version_to_evaluate_it, "deadlock"),
    (a_prompt_is_scored_before_its_answers_have_finished, "is scored twice, or before"),
    (a_failed_answer_counts_as_finished, "is scored twice, or before"),
    (a_scored_prompt_is_not_counted, "does not finish"),
    (prompts_being_scored_are_forgotten_in_a_resume, "deadlock"),
    (the_evaluation_is_never_finished, "does not finish"),
    (snapshot_without("evaluation", None), "ProtocolError"),
    (snapshot_without("last_evaluated", -1), "a resumed orchestrator"),
]
