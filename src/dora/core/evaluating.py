"""Which held-out requests run beside the training, so that neither holds up the other.

They are begun one after the other and then wait for a row like any request: at most one row in eight is
theirs, but more where nobody else would use it. Between two of them an engine may leave their version for
the newest; later one is lent to them again (`versions.lend`).
"""

from __future__ import annotations

from dora.core.actions import Action, BeginEvaluation, EndEvaluation, Score, SkipEvaluation
from dora.core.held_out import Evaluation
from dora.core.records import EvaluationRule, GroupId, RequestId
from dora.core.state import Request, State

ROWS_PER_REQUEST = 8


def open_evaluation(state: State, version: int) -> list[Action]:
    """A version is published for the first time: it may be due, and one at a time is enough."""
    rule = state.limits.evaluation
    if rule is None or version % rule.every or not state.evaluated < version < state.limits.num_steps:
        return []
    state.evaluated = version
    if state.evaluation is not None:
        return [SkipEvaluation(version, state.evaluation.version)]
    state.evaluation = Evaluation(version, rule.num_requests)
    return [BeginEvaluation(version)]


def begin(state: State) -> None:
    """Let as many requests wait for a row as may be unfinished at once."""
    rule, evaluation = state.limits.evaluation, state.evaluation
    if rule is None or evaluation is None or not evaluation.num_left:
        return
    version = evaluation.version
    if version not in state.store:
        return
    most = _most_running(state, evaluation)
    count = min(most - evaluation.num_running, evaluation.num_left)
    for index in range(evaluation.num_begun, evaluation.num_begun + count):
        request = rule.request(version, index)
        evaluation.unfinished.setdefault(request.group, rule.num_answers)
        state.requests[request] = Request(request, version)
        state.wait(request, version)
    if count > 0:
        state.pin(version, count)
        evaluation.num_begun += count
        evaluation.num_running += count


def end_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
    """The request has left its engine for good; a prompt with all its answers is judged."""
    rule, evaluation = _under_way(state)
    group = request.group
    state.unpin(state.requests.pop(request).version)
    evaluation.num_running -= 1
    evaluation.unfinished[group] -= 1
    if is_failed:
        evaluation.failed.add(group)
    if evaluation.unfinished[group]:
        return []
    del evaluation.unfinished[group]
    if group in evaluation.failed:
        evaluation.failed.discard(group)
        return _end_prompt(state, rule, evaluation)
    evaluation.judging.add(group)
    return [Score(group)]


def is_awaited(state: State, group: GroupId) -> bool:
    """Whether a held-out prompt was given to the rewarder."""
    return state.evaluation is not None and group in state.evaluation.judging


def end_judging(state: State, group: GroupId) -> list[Action]:
    """The prompt has its rewards, or will have none."""
    rule, evaluation = _under_way(state)
    evaluation.judging.discard(group)
    return _end_prompt(state, rule, evaluation)


def _end_prompt(state: State, rule: EvaluationRule, evaluation: Evaluation) -> list[Action]:
    evaluation.num_judged += 1
    if evaluation.num_judged < rule.num_prompts:
        return []
    state.evaluation = None
    return [EndEvaluation(evaluation.version)]


def _under_way(state: State) -> tuple[EvaluationRule, Evaluation]:
    rule, evaluation = state.limits.evaluation, state.evaluation
    assert rule is not None, "a held-out request runs without a rule"
    assert evaluation is not None, "a held-out request runs without an evaluation"
    return rule, evaluation


def _most_running(state: State, evaluation: Evaluation) -> int:
    """Requests that may be unfinished at once."""
    version, num_running = evaluation.version, evaluation.num_running
    share = max(1, state.num_rows // ROWS_PER_REQUEST)
    is_newest, is_over = state.newest in (None, version), state.next_step == state.limits.num_steps
    if any(state.engines[e].is_open(version) for e in state.holders.get(version, ())):
        if is_over:
            return state.num_rows  # nothing more is admitted
        num_spare = 0 if is_newest else state.fresh_rows[version] - state.num_waiting(version)
        return max(share, num_running + num_spare)
    if is_newest or num_running or version in state.holders or version in state.coming:
        return 0  # engines take it in any case, or have it and give way to another version
    single = (e.rows for e in state.engines.values() if e.slots == 1)  # has no other use for its rows
    return max(share, *single, 0)
