"""Held-out prompts are answered beside the training, and neither holds up the other."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, limits

from dora.core import evaluating, versions
from dora.core.actions import (
    BeginEvaluation,
    EndEvaluation,
    Generate,
    Load,
    Retire,
    Score,
    SkipEvaluation,
    Stop,
    Train,
)
from dora.core.events import (
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    RequestFinished,
    Trained,
)
from dora.core.held_out import Evaluation
from dora.core.records import EvaluationRule, GroupId, ProtocolError, RequestId
from dora.core.state import State


def is_held_out(fact: Event) -> bool:
    """Whether a fact is the end of a held-out answer."""
    return isinstance(fact, RequestFinished) and fact.request.is_held_out


def stations(every: int = 1, num_prompts: int = 4, num_answers: int = 2, **changes: int) -> Stations:
    """Six steps of two groups, at most one version late."""
    rule = EvaluationRule(every, num_prompts, num_answers)
    return Stations(limits(evaluation=rule, **({"num_steps": 6, "max_staleness": 1} | changes)))


def begun(run: Stations) -> list[RequestId]:
    """Held-out requests in the order in which engines got them."""
    given = [request for order in run.orders(Generate) for request in order.requests]
    return [request for request in given if request.is_held_out]


def is_kept_back(fact: Event) -> bool:
    return is_held_out(fact) or isinstance(fact, Trained)


def train(run: Stations) -> None:
    """The step under way ends."""
    run.tell(next(fact for fact in run.pending if isinstance(fact, Trained)))


def train_to(run: Stations, version: int) -> None:
    """Until the version is published and all is done with it but training, without a held-out answer."""
    run.settle(but=is_kept_back)
    while run.state.newest != version:
        train(run)
        run.settle(but=is_kept_back)


def end_one(run: Stations) -> None:
    """One held-out answer comes to its end."""
    run.tell(next(fact for fact in run.possible() if is_held_out(fact)))


def test_every_so_many_th_version_is_evaluated_but_not_the_first_and_the_last() -> None:
    run = stations(every=2)
    run.join(0, rows=64, slots=3)
    run.settle()
    assert run.core.done
    assert [order.version for order in run.orders(BeginEvaluation)] == [2, 4]
    assert [order.version for order in run.orders(EndEvaluation)] == [2, 4]
    assert begun(run)[:3] == [RequestId(-3, 0, 0), RequestId(-3, 0, 1), RequestId(-3, 1, 0)]
    assert len(begun(run)) == len({*begun(run)}) == 2 * 4 * 2


def test_all_of_it_is_generated_on_its_version() -> None:
    run = stations()
    run.join(0, rows=8, slots=3)
    run.settle()
    for order in run.orders(Generate):
        assert all(order.version == -1 - r.epoch for r in order.requests if r.is_held_out)


@pytest.mark.parametrize(("rows", "share"), [(1, 1), (8, 1), (16, 2), (31, 3)])
def test_at_most_one_row_in_eight_is_theirs_beside_the_training(rows: int, share: int) -> None:
    run = stations(every=1, num_steps=9)
    run.join(0, rows, slots=3)
    train_to(run, 1)
    assert sum(request.is_held_out for request in run.state.requests) == share
    if rows > 1:
        end_one(run)
        assert sum(request.is_held_out for request in run.state.requests) == share


def test_training_goes_on_while_an_evaluation_is_under_way() -> None:
    run = stations(num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 6)
    assert run.state.evaluation is not None
    assert [order.step for order in run.orders(Train)][:6] == [*range(6)]
    assert len(begun(run)) == 1


def test_an_evaluation_that_is_due_while_another_is_under_way_is_skipped() -> None:
    run = stations()
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    assert run.orders(SkipEvaluation) == [SkipEvaluation(2, 1), SkipEvaluation(3, 1)]


def test_its_version_stays_in_the_store_and_its_only_copy_on_the_engine() -> None:
    run = stations(every=3, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    assert 3 in run.state.store
    assert 3 in run.state.engines[0].held
    run.settle(but=lambda fact: isinstance(fact, Trained))
    train(run)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert 3 not in run.state.store
    assert Retire(3) in run.given


def test_the_run_waits_for_it_and_gives_it_all_rows() -> None:
    run = stations(every=3)
    run.join(0, rows=8, slots=3)
    train_to(run, 6)
    assert (run.state.newest, run.orders(Stop)) == (6, [])
    assert sum(request.is_held_out for request in run.state.requests) == 8
    assert 6 not in run.state.engines[0].held
    run.settle()
    assert run.core.done


def test_the_newest_waits_on_the_only_slot_for_running_answers_at_most() -> None:
    run = stations(max_staleness=0)
    run.join(0, rows=16, slots=1)
    train_to(run, 2)
    assert run.state.engines[0].held == {1}
    running = [r for r in run.state.requests if r.is_held_out]
    assert len(running) == 2
    end_one(run)
    assert begun(run) == running, "nothing is begun where the newest is to be loaded"
    end_one(run)
    assert run.orders(Load)[-1] == Load(0, 2)


def test_the_only_slot_is_lent_again_while_a_step_is_trained() -> None:
    run = stations(max_staleness=0, every=5, num_steps=9)
    run.join(0, rows=16, slots=1)
    train_to(run, 6)
    end_one(run)
    end_one(run)
    assert run.orders(Load)[-1] == Load(0, 6)
    assert len(begun(run)) == 2
    run.now += 2.0
    run.settle(but=is_kept_back)
    assert run.state.training == 6
    assert run.orders(Load)[-1] == Load(0, 5)
    assert len(begun(run)) == 8
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert run.orders(EndEvaluation) == [EndEvaluation(5)]


def test_no_engine_takes_the_live_version_back_because_it_is_evaluated() -> None:
    """Version 2 has all its groups, and its held-out answers are with the rewarder."""
    rule = EvaluationRule(2, 1, 1)
    state = midway(limits(num_steps=9, max_staleness=1, batches_per_version=1, evaluation=rule), newest=4)
    state.current, state.num_admitted_current = 2, 2
    state.evaluation = Evaluation(2, 1, num_begun=1, judging={GroupId(-3, 0)})
    engine(state, 0, rows=2, held={3})
    engine(state, 1, rows=2, held={2})
    state.touch(state.engines[0])
    state.is_newest_asked, state.asked_for = False, (3, 4)
    assert versions.load(state, is_due=False) == []
    assert state.engines[0].held == {3}


def overdue() -> State:
    """Version 0 is evaluated and nobody has it, though the next evaluation is due."""
    state = midway(limits(num_steps=9, max_staleness=2, evaluation=EvaluationRule(1, 1, 1)), newest=1)
    state.evaluation = Evaluation(0, 1)
    engine(state, 0, rows=2, held={1})
    running(state, 0, 1, 1, 2)
    evaluating.begin(state)
    return state


def test_no_engine_is_cleared_for_held_out_answers_because_another_has_nothing_to_do_yet() -> None:
    state = overdue()
    engine(state, 1, rows=2, held=(), loading=1)
    assert versions.lend(state, is_due=False) == []
    assert state.engines[0].wanted is None
    versions.lend(state, is_due=True)
    assert state.engines[0].wanted == 0


def test_held_out_answers_get_an_engine_that_has_nothing_to_do() -> None:
    state = overdue()
    engine(state, 1, rows=2, held=())
    assert versions.lend(state, is_due=False) == [Load(1, 0)]


def test_answers_begin_again_on_their_version_when_their_engine_is_lost() -> None:
    run = stations(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    (request,) = begun(run)
    run.join(1, rows=4, slots=3)
    run.pending = [fact for fact in run.pending if not isinstance(fact, RequestFinished)]
    run.tell(EngineLost(0, "gone"))
    run.settle(but=is_kept_back)
    assert begun(run) == [request, request]
    assert run.state.requests[request].engine == 1


def test_a_run_that_goes_on_goes_on_with_its_evaluation() -> None:
    run = stations(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 4)
    end_one(run)
    end_one(run)
    judged = run.orders(Score)[-1].group
    assert judged == GroupId(-3, 0)
    assert Score(judged) in run.die(from_step=3)
    run.join(1, rows=8, slots=3)
    run.settle()
    assert run.core.done
    evaluated = [order.version for order in run.orders(EndEvaluation)]
    assert evaluated == [order.version for order in run.orders(BeginEvaluation)]
    assert len({*begun(run)}) == 8 * len(run.orders(EndEvaluation))


def test_what_was_begun_is_redone_with_its_version() -> None:
    run = stations(every=2, num_steps=9)
    run.join(0, rows=8, slots=3)
    train_to(run, 3)
    run.die(from_step=0)
    run.join(1, rows=8, slots=3)
    run.settle()
    assert run.core.done
    assert len({*begun(run)}) == len(run.orders(BeginEvaluation)) * 8


def test_a_prompt_with_a_refused_answer_is_not_judged_and_the_others_are() -> None:
    run = stations(every=5, num_prompts=2)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    run.refuse(begun(run)[0])
    run.settle()
    assert run.core.done
    assert [o.group for o in run.orders(Score) if o.group.is_held_out] == [GroupId(-6, 1)]
    assert run.state.num_failed == 0


def test_a_prompt_that_cannot_be_scored_is_at_its_end() -> None:
    run = stations(every=5, num_prompts=1, num_answers=1)
    run.join(0, rows=8, slots=3)
    train_to(run, 5)
    end_one(run)
    run.pending.remove(GroupScored(GroupId(-6, 0), (0.0,)))
    assert EndEvaluation(5) in run.tell(GroupUnscorable(GroupId(-6, 0), "no"))
    run.settle()
    assert run.state.num_failed == 0


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (GroupScored(GroupId(-6, 1), (1.0, 1.0)), "the prompt was given to the rewarder"),
        (GroupUnscorable(GroupId(-2, 0), "no"), "the prompt was given to the rewarder"),
        (GroupScored(GroupId(-6, 0), (1.0,)), "one reward per answer"),
    ],
)
def test_rewards_nobody_asked_for_are_refused(fact: Event, words: str) -> None:
    run = stations(every=5)
    run.join(0, rows=16, slots=3)
    train_to(run, 5)
    end_one(run)
    end_one(run)
    with pytest.raises(ProtocolError, match=words):
        run.core.handle(fact, 0.0)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_rule_without_effect_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        EvaluationRule(*numbers)
