"""The trainer dies alone: engines go on, steps are redone as they were, and no number gets other bytes."""

from __future__ import annotations

import json

import pytest
from tests.core.stations import Stations, limits

from dora.core import snapshot
from dora.core.actions import Admit, Attest, Generate, Publish, ReportStall, Stop, Train
from dora.core.events import (
    Attested,
    Published,
    RequestFinished,
    Trained,
    TrainerLost,
    TrainerReplaced,
    Woken,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import ProtocolError
from dora.core.waits import owners, waits


def midway(num_steps: int) -> Stations:
    """So many steps are trained, and the next one is under way."""
    run = Stations(limits(num_steps=9, group_size=2, max_staleness=2))
    for engine in (0, 1):
        run.join(engine, rows=4, slots=3)
    run.settle(but=lambda fact: isinstance(fact, Trained) and fact.step == num_steps)
    assert run.state.training == num_steps
    return run


def test_steps_after_the_checkpoint_are_redone_with_their_batches() -> None:
    run = midway(num_steps=5)
    batches = {order.step: order.groups for order in run.orders(Train)}
    run.lose_trainer()
    run.given.clear()
    assert run.replace_trainer(from_step=3)[0] == Attest(3)
    run.settle()
    assert [(o.step, o.groups) for o in run.orders(Train)][:3] == [(k, batches[k]) for k in (3, 4, 5)]
    assert [order.version for order in run.orders(Attest)] == [3, 4, 5]
    assert [order.version for order in run.orders(Publish)] == [6, 7, 8, 9]
    assert run.core.done


def test_engines_keep_versions_and_requests_and_are_given_more() -> None:
    run = Stations(limits(num_steps=9, group_size=2, max_staleness=2))
    run.join(0, rows=4, slots=3)
    run.settle(
        but=lambda fact: fact == Trained(3) or (isinstance(fact, RequestFinished) and fact.version > 1)
    )
    held = {engine.id: set(engine.held) for engine in run.state.engines.values()}
    store = dict(run.state.store)
    run.given.clear()
    run.lose_trainer()
    run.settle()
    assert run.orders(Admit)
    assert run.orders(Generate)
    assert not run.orders(Train)
    assert {engine.id: set(engine.held) for engine in run.state.engines.values()} == held
    assert run.state.store.items() <= store.items()


def test_a_redone_version_leaves_what_was_published_under_its_number() -> None:
    run = midway(num_steps=3)
    before = dict(run.state.store)
    run.lose_trainer()
    run.replace_trainer(from_step=3)
    run.pending.remove(Attested(3, "v3 again"))
    run.tell(Attested(3, "other bytes"))
    assert run.state.store == before


def test_without_a_checkpoint_all_is_redone_from_the_start() -> None:
    run = midway(num_steps=2)
    run.lose_trainer()
    run.given.clear()
    run.replace_trainer(from_step=0)
    run.settle()
    assert [order.step for order in run.orders(Train)] == list(range(9))
    assert run.core.done


def test_a_trainer_that_dies_before_anything_was_published_publishes_the_start() -> None:
    run = Stations(limits())
    run.lose_trainer()
    assert run.replace_trainer(from_step=0)[0] == Publish(0)


def test_a_step_that_was_trained_and_not_published_is_redone_and_published() -> None:
    run = midway(num_steps=2)
    run.tell(Trained(2))
    run.lose_trainer()
    run.given.clear()
    run.replace_trainer(from_step=2)
    run.settle(but=lambda fact: fact == Published(3, "v3"))
    assert run.orders(Attest) == [Attest(2)]
    assert run.orders(Publish) == [Publish(3)]


def test_a_checkpoint_of_a_version_that_was_not_published_publishes_it() -> None:
    run = midway(num_steps=2)
    run.tell(Trained(2))
    run.lose_trainer()
    assert run.replace_trainer(from_step=3)[0] == Publish(3)


def test_it_may_be_lost_again_while_it_redoes() -> None:
    run = midway(num_steps=5)
    run.lose_trainer()
    run.replace_trainer(from_step=2)
    run.settle(but=lambda fact: fact == Trained(3))
    run.lose_trainer()
    run.given.clear()
    run.replace_trainer(from_step=3)
    run.settle()
    assert [order.step for order in run.orders(Train)] == [3, 4, 5, 6, 7, 8]


def test_everything_may_die_while_it_is_lost() -> None:
    run = midway(num_steps=5)
    run.lose_trainer()
    run.die(from_step=4)
    run.join(0, rows=4, slots=3)
    run.settle()
    assert run.core.done


def test_a_run_does_not_end_before_its_last_steps_are_redone() -> None:
    run = midway(num_steps=8)
    run.settle(but=lambda fact: fact == Published(9, "v9"))
    run.lose_trainer()
    run.replace_trainer(from_step=7)
    run.settle(but=lambda fact: fact == Trained(8))
    assert not run.orders(Stop)
    run.settle()
    assert run.orders(Stop) == [Stop()]


def test_an_orchestrator_that_comes_back_meanwhile_knows_what_is_to_be_redone() -> None:
    run = midway(num_steps=5)
    run.lose_trainer()
    run.replace_trainer(from_step=3)
    restored = snapshot.from_json(json.loads(json.dumps(snapshot.to_json(run.state))))
    assert restored.redo == run.state.redo
    run.core = Orchestrator(restored.limits, restored)
    run.settle()
    assert run.core.done


def test_a_trainer_that_is_not_there_waits_for_nobody_and_is_waited_for() -> None:
    run = midway(num_steps=2)
    run.lose_trainer()
    assert owners(waits(run.state)) == ["trainer"]
    run.settle()
    run.now += 100.0
    run.tell(Woken())
    assert run.state.stall_group is None
    assert not run.orders(ReportStall)


@pytest.mark.parametrize(
    ("fact", "rule"),
    [
        (TrainerReplaced(2, ()), "only a lost trainer is replaced"),
        (Attested(2, "v2"), "the attestation was ordered"),
    ],
)
def test_what_cannot_be_told_of_a_trainer_that_lives_is_refused(
    fact: TrainerReplaced | Attested, rule: str
) -> None:
    with pytest.raises(ProtocolError, match=rule):
        midway(num_steps=2).tell(fact)


def test_a_trainer_is_lost_once() -> None:
    run = midway(num_steps=2)
    run.lose_trainer()
    with pytest.raises(ProtocolError, match="a trainer is lost once"):
        run.tell(TrainerLost("again"))


@pytest.mark.parametrize("from_step", [-1, 3, 7])
def test_a_successor_that_would_leave_steps_out_is_refused(from_step: int) -> None:
    run = midway(num_steps=5)
    run.lose_trainer()
    with pytest.raises(ProtocolError, match="each step after the checkpoint is redone, and no other"):
        run.tell(TrainerReplaced(from_step, ()))
