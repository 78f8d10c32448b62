"""Deliberate faults in evaluations beside the training, and how each shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim.breaking import Fault, after_hearing
from tests.sim.faults_in_groups import snapshot_without

from dora.core import batching, evaluating, hearing, versions
from dora.core.actions import Action, BeginEvaluation, Score
from dora.core.events import Event, Published, Resumed
from dora.core.held_out import Evaluation
from dora.core.records import EvaluationRule, RequestId
from dora.core.state import State


def as_if_none_were_under_way(patch: pytest.MonkeyPatch, module: object, rule: str) -> None:
    """A rule that gives orders does not see the evaluation."""
    right = getattr(module, rule)

    def blind(state: State) -> list[Action]:
        under_way, state.evaluation = state.evaluation, None
        orders: list[Action] = right(state)
        state.evaluation = under_way
        return orders

    patch.setattr(module, rule, blind)


def two_versions_are_evaluated_at_once(patch: pytest.MonkeyPatch) -> None:
    right = evaluating.open_evaluation

    def open_evaluation(state: State, version: int) -> list[Action]:
        return [BeginEvaluation(version) for _ in right(state, version)]

    patch.setattr(evaluating, "open_evaluation", open_evaluation)


def a_due_evaluation_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluating, "open_evaluation", lambda state, version: [])


def a_redone_version_is_evaluated_again(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, Resumed):
            state.evaluated = 0
        return orders

    after_hearing(patch, forget)


def an_evaluated_version_is_retired(patch: pytest.MonkeyPatch) -> None:
    as_if_none_were_under_way(patch, versions, "retire")


def the_run_does_not_wait_for_an_evaluation(patch: pytest.MonkeyPatch) -> None:
    as_if_none_were_under_way(patch, batching, "train")


def an_evaluation_takes_all_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluating, "_most_running", lambda state, evaluation: state.num_rows)


def held_out_requests_are_those_of_another_version(patch: pytest.MonkeyPatch) -> None:
    right = EvaluationRule.request
    wrong: Callable[[EvaluationRule, int, int], RequestId]
    wrong = lambda rule, version, index: right(rule, version + 1, index)  # noqa: E731
    patch.setattr(EvaluationRule, "request", wrong)


def one_answer_too_few_is_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluation, "num_left", property(lambda run: max(0, run.num_requests - run.num_begun - 1)))


def an_engine_is_never_lent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "lend", lambda state, is_due: [])


def a_prompt_is_scored_before_it_is_whole(patch: pytest.MonkeyPatch) -> None:
    right = evaluating.end_request

    def end_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
        right(state, request, is_failed=is_failed)
        return [Score(request.group)]

    patch.setattr(evaluating, "end_request", end_request)


def an_answer_that_was_refused_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = evaluating.end_request

    def end_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
        return right(state, request)

    patch.setattr(evaluating, "end_request", end_request)


def a_prompt_at_its_end_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    right = evaluating.end_judging

    def end_judging(state: State, group: object) -> list[Action]:
        run = state.evaluation
        orders = right(state, group)  # type: ignore[arg-type]
        if run is not None and run.num_judged == 1:
            run.num_judged = 0
        return orders

    patch.setattr(evaluating, "end_judging", end_judging)


def what_was_with_the_rewarder_is_forgotten_in_a_resume(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        is_resumed = isinstance(event, Resumed)
        return [o for o in orders if not (is_resumed and isinstance(o, Score) and o.group.is_held_out)]

    after_hearing(patch, forget)


def the_end_is_not_told(patch: pytest.MonkeyPatch) -> None:
    right = evaluating._end_prompt
    patch.setattr(evaluating, "_end_prompt", lambda *known: right(*known) and [])


def an_evaluation_begins_with_any_version(patch: pytest.MonkeyPatch) -> None:
    right = hearing.hear

    def hear(state: State, event: Event) -> list[Action]:
        orders = right(state, event)
        if isinstance(event, Published) and state.evaluation is None and state.limits.evaluation:
            orders.append(BeginEvaluation(event.version))
        return orders

    patch.setattr(hearing, "hear", hear)


FAULTS: list[tuple[Fault, str]] = [
    (two_versions_are_evaluated_at_once, "are evaluated at once"),
    (a_due_evaluation_is_forgotten, "was due for an evaluation"),
    (a_redone_version_is_evaluated_again, "is not due for an evaluation"),
    (an_evaluation_begins_with_any_version, "is not due for an evaluation"),
    (an_evaluated_version_is_retired, "is retired under"),
    (the_run_does_not_wait_for_an_evaluation, "the run stops under an evaluation"),
    (an_evaluation_takes_all_rows, "rows evaluate"),
    (held_out_requests_are_those_of_another_version, "held-out requests of another version"),
    (one_answer_too_few_is_begun, "deadlock"),
    (an_engine_is_never_lent, "deadlock"),
    (a_prompt_is_scored_before_it_is_whole, "is scored before it is whole"),
    (an_answer_that_was_refused_is_forgotten, "is scored before it is whole"),
    (a_prompt_at_its_end_is_not_counted, "does not end"),
    (what_was_with_the_rewarder_is_forgotten_in_a_resume, "deadlock"),
    (the_end_is_not_told, "does not end"),
    (snapshot_without("evaluation", None), "ProtocolError"),
    (snapshot_without("evaluated", 0), "a resumed orchestrator orders"),
]
