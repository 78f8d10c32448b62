"""Evaluation on held-out prompts before, during and after training."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_running, state_at

from dora.core import actions, evaluation, events, weight_sync
from dora.core.state import EvaluationRecord, State
from dora.core.types import EvaluationRule, GroupId, ProtocolError, RequestId


def is_held_out(event: events.Event) -> bool:
    """Whether an event finishes a held-out request of an evaluation during or after training."""
    return isinstance(event, events.RequestFinished) and event.request.epoch < -1


def new_run(every: int = 1, num_prompts: int = 4, num_answers: int = 2, **changes: Any) -> FakeWorkers:
    """Six steps of two groups, with max_staleness = 1."""
    rule = EvaluationRule(every, num_prompts, num_answers)
    return FakeWorkers(limits(evaluation=rule, **({"num_steps": 6, "max_staleness": 1} | changes)))


def started(run: FakeWorkers) -> list[RequestId]:
    """Held-out requests of the evaluations during and after training, in the order of their placement."""
    given = [request for action in run.actions(actions.Generate) for request in action.requests]
    return [request for request in given if request.epoch < -1]


def is_withheld(event: events.Event) -> bool:
    return is_held_out(event) or isinstance(event, events.Trained)


def train(run: FakeWorkers) -> None:
    """Finish the running step."""
    run.deliver(next(event for event in run.pending if isinstance(event, events.Trained)))


def train_to(run: FakeWorkers, version: int) -> None:
    """Run until the version is published and rollouts wait for training; finish no held-out request."""
    run.deliver_all(unless=is_withheld)
    while run.state.newest_published != version:
        train(run)
        run.deliver_all(unless=is_withheld)


def finish_one(run: FakeWorkers) -> None:
    """Finish one held-out request."""
    run.deliver(next(event for event in run.deliverable() if is_held_out(event)))


@pytest.mark.parametrize(("every", "versions"), [(0, [0, 6]), (2, [0, 2, 4, 6]), (4, [0, 4, 6])])
def test_the_first_the_last_and_every_n_th_version_are_evaluated(every: int, versions: list[int]) -> None:
    run = new_run(every)
    run.join(0, rows=64, slots=3)
    run.deliver_all()
    assert run.orchestrator.done
    assert [action.version for action in run.actions(actions.StartEvaluation)] == versions
    assert [action.version for action in run.actions(actions.FinishEvaluation)] == versions
    first = -1 - versions[1]
    assert started(run)[:3] == [RequestId(first, 0, 0), RequestId(first, 0, 1), RequestId(first, 1, 0)]
    assert len(started(run)) == len({*started(run)}) == (len(versions) - 1) * 4 * 2


def test_nothing_is_admitted_before_version_0_is_evaluated_on_all_rows() -> None:
    run = new_run(num_prompts=8)
    run.join(0, rows=4, slots=1)
    run.join(1, rows=8, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, events.RequestFinished))
    assert [engine.loaded for engine in run.state.engines.values()] == [{0}, {0}]
    assert len(run.state.requests) == 12
    assert run.actions(actions.Admit) == []
    run.deliver_all(unless=lambda event: isinstance(event, events.GroupScored))
    assert (run.state.requests, run.actions(actions.Admit)) == ({}, [])
    run.deliver_all(unless=lambda event: isinstance(event, events.RequestFinished))
    kinds = [type(action) for action in run.emitted]
    assert kinds.index(actions.FinishEvaluation) < kinds.index(actions.Admit)


@pytest.mark.parametrize("changes", [{}, {"batches_per_version": 1}, {"defers_loads": True}])
def test_all_engines_load_the_last_version_for_its_evaluation(changes: dict[str, Any]) -> None:
    run = new_run(every=0, num_prompts=16, **changes)
    run.join(0, rows=4, slots=1)
    run.join(1, rows=8, slots=1)
    run.deliver_all(unless=is_withheld)
    while run.state.newest_published != 6:
        train(run)
        run.deliver_all(unless=is_withheld)
    assert [engine.loaded for engine in run.state.engines.values()] == [{6}, {6}]
    assert sum(request.is_held_out for request in run.state.requests) == 12
    run.deliver_all()
    assert run.orchestrator.done


def test_the_last_version_waits_for_a_running_evaluation_and_is_not_skipped() -> None:
    run = new_run(every=4)
    run.join(0, rows=8, slots=3)
    train_to(run, 6)
    assert run.state.evaluation is not None
    assert run.state.evaluation.version == 4
    run.deliver_all()
    assert run.orchestrator.done
    assert [action.version for action in run.actions(actions.FinishEvaluation)] == [0, 4, 6]
    assert run.actions(actions.SkipEvaluation) == []


def test_a_run_that_gets_more_steps_evaluates_its_new_end() -> None:
    run = new_run(every=0)
    run.join(0, rows=8, slots=1)
    run.deliver_all()
    run.crash(from_step=6, num_steps=8)
    run.join(1, rows=8, slots=1)
    run.deliver_all()
    assert run.orchestrator.done
    assert [action.version for action in run.actions(actions.FinishEvaluation)] == [0, 6, 8]


def test_a_run_that_crashed_in_the_evaluation_before_training_continues_it() -> None:
    run = new_run()
    run.join(0, rows=4, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, events.RequestFinished))
    run.deliver(run.deliverable()[0])
    run.crash(from_step=0)
    run.join(1, rows=4, slots=1)
    run.deliver_all()
    assert run.orchestrator.done
    assert [a.version for a in run.actions(actions.StartEvaluation)][:2] == [0, 1]
    scored = [action.group for action in run.actions(actions.Score) if action.group.epoch == -1]
    assert len(scored) == len({*scored}) == 4


def test_held_out_requests_run_on_the_evaluated_version() -> None:
    run = new_run()
    run.join(0, rows=8, slots=3)
    run.deliver_all()
    for action in run.actions(actions.Generate):
        assert all(action.version == -1 - r.epoch for r in action.requests if r.is_held_out)


@pytest.mark.parametrize(("rows", "fraction"), [(1, 1), (8, 1), (16, 2), (31, 3)])
def test_held_out_requests_get_at_most_one_row_in_eight_during_training(rows: int, fraction: int) -> None:
    run = new_run(every=1, num_steps=9)
    run.join(0, rows, slots=3)
    train_to(run, 1)
    assert sum(request.is_held_out for request in run.state.requests) == fraction
    if rows > 1:
        finish_one(run)
        assert sum(request.is_held_out for request in run.state.requests) == fraction


def test_training_continues_during_an_evaluation() -> None:
    run = new_run(num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 6)
    assert run.state.evaluation is not None
    assert [action.step for action in run.actions(actions.Train)][:6] == [*range(6)]
    assert len(started(run)) == 1


def test_an_evaluation_due_during_another_is_skipped() -> None:
    run = new_run()
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    assert run.actions(actions.SkipEvaluation) == [actions.SkipEvaluation(2, 1), actions.SkipEvaluation(3, 1)]


def test_the_evaluated_version_stays_stored_and_its_only_copy_loaded() -> None:
    run = new_run(every=3, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    assert 3 in run.state.stored_versions
    assert 3 in run.state.engines[0].loaded
    run.deliver_all(unless=lambda event: isinstance(event, events.Trained))
    train(run)
    run.deliver_all(unless=lambda event: isinstance(event, events.Trained))
    assert 3 not in run.state.stored_versions
    assert actions.Retire(3) in run.emitted


def test_the_run_waits_for_the_evaluation_and_gives_it_all_rows() -> None:
    run = new_run(every=3)
    run.join(0, rows=8, slots=3)
    train_to(run, 6)
    assert (run.state.newest_published, run.actions(actions.Stop)) == (6, [])
    assert sum(request.is_held_out for request in run.state.requests) == 8
    assert 6 not in run.state.engines[0].loaded
    run.deliver_all()
    assert run.orchestrator.done


def test_the_newest_version_waits_only_for_running_held_out_requests() -> None:
    run = new_run(max_staleness=0)
    run.join(0, rows=16, slots=1)
    train_to(run, 2)
    assert run.state.engines[0].loaded == {1}
    running = [r for r in run.state.requests if r.is_held_out]
    assert len(running) == 2
    finish_one(run)
    assert started(run) == running, "no request starts where the newest is about to be loaded"
    finish_one(run)
    assert run.actions(actions.Load)[-1] == actions.Load(0, 2)


def test_the_evaluated_version_is_loaded_again_while_a_step_trains() -> None:
    run = new_run(max_staleness=0, every=5, num_steps=9)
    run.join(0, rows=16, slots=1)
    train_to(run, 6)
    finish_one(run)
    finish_one(run)
    assert run.actions(actions.Load)[-1] == actions.Load(0, 6)
    assert len(started(run)) == 2
    run.now += 2.0
    run.deliver_all(unless=is_withheld)
    assert run.state.training_step == 6
    assert run.actions(actions.Load)[-1] == actions.Load(0, 5)
    assert len(started(run)) == 8
    run.deliver_all(unless=lambda event: isinstance(event, events.Trained))
    assert run.actions(actions.FinishEvaluation) == [actions.FinishEvaluation(0), actions.FinishEvaluation(5)]


def test_no_engine_reloads_the_live_version_for_an_evaluation_that_needs_no_rows() -> None:
    """Version 2 has all its groups, and its held-out answers are being scored."""
    rule = EvaluationRule(2, 1, 1)
    state = state_at(limits(num_steps=9, max_staleness=1, batches_per_version=1, evaluation=rule), newest=4)
    state.admission_version, state.num_admitted_at_version = 2, 2
    state.evaluation = EvaluationRecord(2, 1, num_started=1, scoring_prompts={GroupId(-3, 0)})
    add_engine(state, 0, rows=2, loaded={3})
    add_engine(state, 1, rows=2, loaded={2})
    state.mark_dirty(state.engines[0])
    state.is_newest_needed, state.rebalanced_for = False, (3, 4)
    assert weight_sync.load_versions(state, is_rebalance=False) == []
    assert state.engines[0].loaded == {3}


def state_with_overdue_evaluation() -> State:
    """Version 0 is evaluated and on no engine, and the next evaluation is due."""
    state = state_at(limits(num_steps=9, max_staleness=2, evaluation=EvaluationRule(1, 1, 1)), newest=1)
    state.evaluation = EvaluationRecord(0, 1)
    add_engine(state, 0, rows=2, loaded={1})
    add_running(state, 0, 1, 1, 2)
    evaluation.start_requests(state)
    return state


def test_no_version_is_evicted_for_an_evaluation_while_another_engine_is_loading() -> None:
    state = state_with_overdue_evaluation()
    add_engine(state, 1, rows=2, loaded=(), loading=1)
    assert weight_sync.load_for_evaluation(state, is_rebalance=False) == []
    assert state.engines[0].next_load is None
    weight_sync.load_for_evaluation(state, is_rebalance=True)
    assert state.engines[0].next_load == 0


def test_an_unused_engine_loads_the_evaluated_version() -> None:
    state = state_with_overdue_evaluation()
    add_engine(state, 1, rows=2, loaded=())
    assert weight_sync.load_for_evaluation(state, is_rebalance=False) == [actions.Load(1, 0)]


def test_held_out_requests_restart_on_their_version_after_the_loss_of_their_engine() -> None:
    run = new_run(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    (request,) = started(run)
    run.join(1, rows=4, slots=3)
    run.pending = [event for event in run.pending if not isinstance(event, events.RequestFinished)]
    run.deliver(events.EngineLost(0, "killed"))
    run.deliver_all(unless=is_withheld)
    assert started(run) == [request, request]
    assert run.state.requests[request].engine == 1


def test_a_resumed_run_resumes_its_evaluation() -> None:
    run = new_run(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 4)
    finish_one(run)
    finish_one(run)
    scoring = run.actions(actions.Score)[-1].group
    assert scoring == GroupId(-3, 0)
    assert actions.Score(scoring) in run.crash(from_step=3)
    run.join(1, rows=8, slots=3)
    run.deliver_all()
    assert run.orchestrator.done
    evaluated = [action.version for action in run.actions(actions.FinishEvaluation)]
    assert evaluated == [action.version for action in run.actions(actions.StartEvaluation)]
    assert len({*started(run)}) == 8 * len(evaluated[1:])


def test_held_out_requests_wait_until_their_version_is_published_again() -> None:
    run = new_run(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    run.crash(from_step=0)
    run.join(1, rows=8, slots=3)
    run.deliver_all()
    assert run.orchestrator.done
    assert len({*started(run)}) == 8 * len(run.actions(actions.StartEvaluation)[1:])


def test_a_prompt_with_a_failed_answer_is_not_scored_and_the_others_are() -> None:
    run = new_run(every=5, num_prompts=2)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    run.fail_request(started(run)[0])
    run.deliver_all()
    assert run.orchestrator.done
    assert [o.group for o in run.actions(actions.Score) if o.group.epoch == -6] == [GroupId(-6, 1)]
    assert run.state.num_failed == 0


def test_a_prompt_that_cannot_be_scored_is_done() -> None:
    run = new_run(every=5, num_prompts=1, num_answers=1)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    finish_one(run)
    run.pending.remove(events.GroupScored(GroupId(-6, 0), (0.0,)))
    assert actions.FinishEvaluation(5) in run.deliver(events.ScoringFailed(GroupId(-6, 0), "no"))
    run.deliver_all()
    assert run.state.num_failed == 0


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (events.GroupScored(GroupId(-6, 1), (1.0, 1.0)), "the held-out prompt must be awaiting its score"),
        (events.ScoringFailed(GroupId(-2, 0), "no"), "the held-out prompt must be awaiting its score"),
        (events.GroupScored(GroupId(-6, 0), (1.0,)), "every response must have a reward"),
    ],
)
def test_unexpected_rewards_are_rejected(event: events.Event, rule: str) -> None:
    run = new_run(every=5)
    run.join(0, rows=16, slots=3)
    train_to(run, 5)
    finish_one(run)
    finish_one(run)
    with pytest.raises(ProtocolError, match=rule):
        run.orchestrator.handle(event, 0.0)


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_rule_without_effect_is_rejected(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        EvaluationRule(*numbers)
