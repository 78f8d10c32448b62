"""Recovery of a crashed run: steps are redone, requests restart, and no group is admitted before that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine, run_in_step

from dora.core.actions import Admit, FetchPrompts, Generate, Load, Publish, Score, Stop, Train
from dora.core.events import Event, GroupScored, Published, RequestFinished, Trained
from dora.core.types import GroupId, ProtocolError, RequestId


def deliver_until(run: FakeWorkers, kind: type[Event]) -> None:
    """Deliver all events except those of a kind."""
    run.deliver_all(unless=lambda event: isinstance(event, kind))


def test_steps_after_the_checkpoint_are_redone_with_their_batches() -> None:
    run = run_in_step(5)
    batches = {action.step: action.groups for action in run.actions(Train)}
    run.emitted.clear()
    assert run.crash(from_step=3)[0] == Publish(3)
    assert run.state.num_trained == 3 * 2
    run.deliver_all()
    again = {action.step: action.groups for action in run.actions(Train)}
    assert again.items() >= {step: groups for step, groups in batches.items() if step >= 3}.items()
    assert [action.version for action in run.actions(Publish)][:4] == [3, 4, 5, 6]


def test_nothing_is_admitted_before_all_steps_are_redone() -> None:
    run = run_in_step(5)
    run.emitted.clear()
    run.crash(from_step=3)
    run.join(0, rows=8, slots=3)
    run.deliver_all(unless=lambda event: event == Trained(4))
    assert not run.actions(Admit)
    assert run.state.is_redoing_steps
    run.deliver_all()
    assert run.actions(Admit)
    assert run.orchestrator.done


def unfinished_at_two_versions() -> FakeWorkers:
    """A request of version 1 and some of version 3 run; versions 1 to 3 are stored."""
    run = one_engine(limits(num_steps=9, max_staleness=4), rows=3, slots=5)
    withheld: list[RequestId] = []

    def is_withheld(event: Event) -> bool:
        if isinstance(event, RequestFinished) and event.version == 1 and not withheld:
            withheld.append(event.request)
        is_last = isinstance(event, RequestFinished) and (event.request in withheld or event.version == 3)
        return is_last or (isinstance(event, Trained) and event.step > 2)

    run.deliver_all(unless=is_withheld)
    assert {1, 3} <= run.state.num_unfinished.keys()
    return run


def test_unfinished_requests_restart_on_their_version_once_it_is_published() -> None:
    run = unfinished_at_two_versions()
    unfinished = {request: q.version for request, q in run.state.requests.items()}
    run.emitted.clear()
    run.crash(from_step=2)
    assert run.state.stored_versions == {1: "v1"}
    run.join(0, rows=3, slots=5)
    run.deliver_all(unless=is_work)
    assert {action.version for action in run.actions(Generate)} == {1}
    assert Load(0, 1) in run.actions(Load)
    run.deliver_all()
    started = {request: action.version for action in run.actions(Generate) for request in action.requests}
    assert started.items() >= unfinished.items()


def test_a_checkpoint_without_a_pinned_version_is_rejected() -> None:
    run = unfinished_at_two_versions()
    with pytest.raises(ProtocolError, match="every pinned version before the checkpoint must be kept"):
        run.crash(from_step=2, kept=())


@pytest.mark.parametrize("change", [lambda step: step + 1, lambda step: step + 3])
def test_a_checkpoint_ahead_of_the_trained_steps_is_rejected(change: Callable[[int], int]) -> None:
    run = run_in_step(2)
    with pytest.raises(ProtocolError, match="must not be ahead of the trained steps"):
        run.crash(from_step=change(2))


def test_groups_that_were_being_scored_are_scored_again() -> None:
    run = one_engine(limits(group_size=2), rows=4, slots=1)
    deliver_until(run, GroupScored)
    assert run.actions(Score) == [Score(GroupId(0, 0)), Score(GroupId(0, 1))]
    assert run.crash(from_step=0)[:3] == [Publish(0), Score(GroupId(0, 0)), Score(GroupId(0, 1))]


def test_requested_prompts_are_requested_again() -> None:
    run = FakeWorkers(limits())
    assert run.actions(FetchPrompts) == [FetchPrompts(2)]
    assert FetchPrompts(2) in run.crash(from_step=0)


def test_a_finished_run_can_be_resumed_and_finishes_again() -> None:
    run = run_in_step(8)
    run.deliver_all()
    assert run.orchestrator.done
    run.emitted.clear()
    run.crash(from_step=7)
    assert not run.orchestrator.done
    run.deliver_all()
    done = [type(action) for action in run.emitted if isinstance(action, Publish | Train | Stop)]
    assert done == [Publish, Train, Publish, Train, Publish, Stop]


def test_the_run_may_crash_again_while_it_redoes_steps() -> None:
    run = run_in_step(5)
    run.crash(from_step=2)
    deliver_until(run, Published)
    run.deliver_all(unless=lambda event: event == Trained(3))
    run.emitted.clear()
    run.crash(from_step=3)
    run.join(0, rows=8, slots=3)
    run.deliver_all(unless=lambda event: event == Trained(4))
    assert not run.actions(Admit)
    run.deliver_all()
    assert run.orchestrator.done


def test_a_finished_run_that_gets_more_steps_admits_and_trains_again() -> None:
    run = run_in_step(8)
    run.deliver_all()
    run.emitted.clear()
    run.crash(from_step=9, num_steps=11)
    run.join(0, rows=8, slots=3)
    run.deliver_all()
    assert run.orchestrator.done
    assert [action.step for action in run.actions(Train)] == [9, 10]
    assert {action.deadline for action in run.actions(Admit)} == {10}
    assert run.state.num_trained == 11 * 2


def test_more_steps_move_the_deadlines_of_new_groups_only() -> None:
    run = run_in_step(4)
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished) and event.version == 6)
    admitted = {action.group: action.deadline for action in run.actions(Admit) if action.version == 6}
    assert {*admitted.values()} == {8}
    run.crash(from_step=6, num_steps=20)
    assert {group: run.state.groups[group].deadline for group in admitted} == admitted
    run.join(0, rows=8, slots=3)
    run.deliver_all()
    assert run.orchestrator.done
    assert max(action.deadline for action in run.actions(Admit)) == 19


@pytest.mark.parametrize("num_steps", [9, 8])
def test_a_run_can_only_get_more_steps(num_steps: int) -> None:
    run = run_in_step(5)
    with pytest.raises(ProtocolError, match="num_steps can only grow"):
        run.crash(from_step=5, num_steps=num_steps)
