"""After the death of everything: redone as it was, begun again where it was, nothing new before that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Admit, Fetch, Generate, Load, Publish, Score, Stop, Train
from dora.core.events import Event, GroupScored, Published, RequestFinished, Trained
from dora.core.records import GroupId, ProtocolError, RequestId


def midway(num_steps: int) -> Stations:
    """So many steps are trained; two engines of four rows, two groups of two siblings in a batch."""
    run = Stations(limits(num_steps=9, group_size=2, max_staleness=2))
    for engine in (0, 1):
        run.join(engine, rows=4, slots=3)
    run.settle(but=lambda fact: isinstance(fact, Trained) and fact.step == num_steps)
    assert run.state.training == num_steps
    return run


def until(run: Stations, kind: type[Event]) -> None:
    """Tell what comes, but for facts of a kind."""
    run.settle(but=lambda fact: isinstance(fact, kind))


def test_steps_after_the_checkpoint_are_redone_with_their_batches() -> None:
    run = midway(num_steps=5)
    batches = {order.step: order.groups for order in run.orders(Train)}
    run.given.clear()
    assert run.die(from_step=3)[0] == Publish(3)
    assert run.state.num_trained == 3 * 2
    run.settle()
    again = {order.step: order.groups for order in run.orders(Train)}
    assert again.items() >= {step: groups for step, groups in batches.items() if step >= 3}.items()
    assert [order.version for order in run.orders(Publish)][:4] == [3, 4, 5, 6]


def test_nothing_is_admitted_before_all_steps_are_redone() -> None:
    run = midway(num_steps=5)
    run.given.clear()
    run.die(from_step=3)
    run.join(0, rows=8, slots=3)
    run.settle(but=lambda fact: fact == Trained(4))
    assert not run.orders(Admit)
    assert run.state.is_redoing
    run.settle()
    assert run.orders(Admit)
    assert run.core.done


def unfinished_at_two_versions() -> Stations:
    """A request of version 1 and some of version 3 run; versions 1 to 3 are stored."""
    run = Stations(limits(num_steps=9, max_staleness=4))
    run.join(0, rows=3, slots=5)
    late: list[RequestId] = []

    def is_late(fact: Event) -> bool:
        if isinstance(fact, RequestFinished) and fact.version == 1 and not late:
            late.append(fact.request)
        is_stuck = isinstance(fact, RequestFinished) and (fact.request in late or fact.version == 3)
        return is_stuck or (isinstance(fact, Trained) and fact.step > 2)

    run.settle(but=is_late)
    assert {1, 3} <= run.state.unfinished.keys()
    return run


def test_unfinished_requests_begin_again_on_their_version_once_it_is_there() -> None:
    run = unfinished_at_two_versions()
    unfinished = {request: q.version for request, q in run.state.requests.items()}
    run.given.clear()
    run.die(from_step=2)
    assert run.state.store == {1: "v1"}
    run.join(0, rows=3, slots=5)
    run.settle(but=is_work)
    assert {order.version for order in run.orders(Generate)} == {1}
    assert Load(0, 1) in run.orders(Load)
    run.settle()
    begun = {request: order.version for order in run.orders(Generate) for request in order.requests}
    assert begun.items() >= unfinished.items()


def test_a_checkpoint_without_a_pinned_version_is_refused() -> None:
    run = unfinished_at_two_versions()
    with pytest.raises(ProtocolError, match="every pinned version before the checkpoint is kept"):
        run.die(from_step=2, kept=())


@pytest.mark.parametrize("change", [lambda step: step + 1, lambda step: step + 3])
def test_a_checkpoint_of_steps_that_were_not_trained_is_refused(change: Callable[[int], int]) -> None:
    run = midway(num_steps=2)
    with pytest.raises(ProtocolError, match="no more steps than were trained"):
        run.die(from_step=change(2))


def test_groups_that_were_being_judged_are_judged_again() -> None:
    run = Stations(limits(group_size=2))
    run.join(0, rows=4, slots=1)
    until(run, GroupScored)
    assert run.orders(Score) == [Score(GroupId(0, 0)), Score(GroupId(0, 1))]
    assert run.die(from_step=0)[:3] == [Publish(0), Score(GroupId(0, 0)), Score(GroupId(0, 1))]


def test_prompts_that_were_asked_for_are_asked_for_again() -> None:
    run = Stations(limits())
    assert run.orders(Fetch) == [Fetch(2)]
    assert Fetch(2) in run.die(from_step=0)


def test_a_run_that_was_over_is_over_again() -> None:
    run = midway(num_steps=8)
    run.settle()
    assert run.core.done
    run.given.clear()
    run.die(from_step=7)
    assert not run.core.done
    run.settle()
    done = [type(order) for order in run.given if isinstance(order, Publish | Train | Stop)]
    assert done == [Publish, Train, Publish, Train, Publish, Stop]


def test_it_may_die_again_while_it_redoes() -> None:
    run = midway(num_steps=5)
    run.die(from_step=2)
    until(run, Published)
    run.settle(but=lambda fact: fact == Trained(3))
    run.given.clear()
    run.die(from_step=3)
    run.join(0, rows=8, slots=3)
    run.settle(but=lambda fact: fact == Trained(4))
    assert not run.orders(Admit)
    run.settle()
    assert run.core.done
