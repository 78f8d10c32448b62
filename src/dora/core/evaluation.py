"""Evaluation on held-out prompts: before the first step, while training continues, and after the last step.

Nothing is admitted before version 0 is evaluated, and the run ends when the last version is. During training,
held-out requests wait for rows like all others. They get at most one row in eight, and more only where the
rows would stay free. Between two of them an engine may drop the evaluated version for the newest;
`weight_sync.load_for_evaluation` loads it again later.
"""

from __future__ import annotations

from dora.core.actions import Action, FinishEvaluation, Score, SkipEvaluation, StartEvaluation
from dora.core.state import EvaluationRecord, RequestRecord, State
from dora.core.types import EvaluationRule, GroupId, RequestId

ROWS_PER_HELD_OUT_REQUEST = 8


def start_if_due(state: State) -> list[Action]:
    """Start an evaluation of the newest version if the rule asks for it and none is running.

    A version that becomes due during another evaluation is skipped; the last version waits for its end.
    """
    rule, version, num_steps = state.limits.evaluation, state.newest_published, state.limits.num_steps
    if rule is None or version is None or version <= state.last_evaluated:
        return []
    if not rule.is_due(version, num_steps) or (state.evaluation is not None and version == num_steps):
        return []
    state.last_evaluated = version
    if state.evaluation is not None:
        return [SkipEvaluation(version, state.evaluation.version)]
    state.evaluation = EvaluationRecord(version, rule.num_requests)
    state.load_candidates.update(dict.fromkeys(state.engines))
    return [StartEvaluation(version)]


def start_requests(state: State) -> None:
    """Enqueue as many held-out requests as may be unfinished at a time."""
    rule, evaluation = state.limits.evaluation, state.evaluation
    if rule is None or evaluation is None or not evaluation.num_not_started:
        return
    version = evaluation.version
    if version not in state.stored_versions:
        return
    num_free = _max_unfinished(state, evaluation) - evaluation.num_unfinished
    count = min(num_free, evaluation.num_not_started)
    for index in range(evaluation.num_started, evaluation.num_started + count):
        request = rule.request_id(version, index)
        evaluation.unfinished_prompts.setdefault(request.group, rule.num_answers)
        state.requests[request] = RequestRecord(request, version)
        state.enqueue(request, version)
    if count > 0:
        state.pin(version, count)
        evaluation.num_started += count
        evaluation.num_unfinished += count


def finish_request(state: State, request: RequestId, *, is_failed: bool = False) -> list[Action]:
    """A held-out request has left its engine; score its prompt once all responses are finished."""
    rule, evaluation = _running(state)
    group = request.group
    state.unpin(state.requests.pop(request).version)
    evaluation.num_unfinished -= 1
    evaluation.unfinished_prompts[group] -= 1
    if is_failed:
        evaluation.failed_prompts.add(group)
    if evaluation.unfinished_prompts[group]:
        return []
    del evaluation.unfinished_prompts[group]
    if group in evaluation.failed_prompts:
        evaluation.failed_prompts.discard(group)
        return _finish_prompt(state, rule, evaluation)
    evaluation.scoring_prompts.add(group)
    return [Score(group)]


def finish_scoring(state: State, group: GroupId) -> list[Action]:
    """A held-out prompt has been scored, or scoring has failed."""
    rule, evaluation = _running(state)
    evaluation.scoring_prompts.discard(group)
    return _finish_prompt(state, rule, evaluation)


def _finish_prompt(state: State, rule: EvaluationRule, evaluation: EvaluationRecord) -> list[Action]:
    evaluation.num_prompts_done += 1
    if evaluation.num_prompts_done < rule.num_prompts:
        return []
    state.evaluation = None
    return [FinishEvaluation(evaluation.version), *start_if_due(state)]


def _running(state: State) -> tuple[EvaluationRule, EvaluationRecord]:
    rule, evaluation = state.limits.evaluation, state.evaluation
    assert rule is not None, "a held-out request exists without Limits.evaluation"
    assert evaluation is not None, "a held-out request exists without a running evaluation"
    return rule, evaluation


def _max_unfinished(state: State, evaluation: EvaluationRecord) -> int:
    """Held-out requests that may be unfinished at a time."""
    version, num_unfinished = evaluation.version, evaluation.num_unfinished
    fraction = max(1, state.num_rows // ROWS_PER_HELD_OUT_REQUEST)
    is_newest = state.newest_published in (None, version)
    if any(state.engines[e].is_accepting(version) for e in state.holders.get(version, ())):
        if state.is_only_evaluating or state.next_step == state.limits.num_steps:
            return state.num_rows  # nothing is admitted
        num_spare = 0 if is_newest else state.admission_rows[version] - state.num_waiting(version)
        return max(fraction, num_unfinished + num_spare)
    if is_newest or num_unfinished or version in state.holders or version in state.pending_holders:
        return 0  # engines load it anyway, or hold it and are evicting it
    single_slot_rows = (e.num_rows for e in state.engines.values() if e.num_slots == 1)  # otherwise unused
    return max(fraction, *single_slot_rows, 0)
