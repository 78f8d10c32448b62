"""Colocated engines pause for every training step, and no response is lost."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine
from tests.core.midrun import add_engine, add_running, state_at

from dora.core.actions import Generate, Load, Migrate, PauseEngine, ResumeEngine, Train
from dora.core.events import EngineLost, EnginePaused, Migrated, Published, StepFailed, Trained
from dora.core.state import State
from dora.core.types import GroupId, RequestId


def run_on_one_device(**changes: int) -> FakeWorkers:
    """One engine on the trainer's device, with more requests than one batch."""
    run = one_engine(limits(**({"max_staleness": 1} | changes)), rows=4, slots=2, is_colocated=True)
    run.deliver_all(unless=is_work)
    return run


def finish_batch_0(run: FakeWorkers) -> None:
    run.finish_group(GroupId(0, 0))
    run.finish_group(GroupId(0, 1))


def test_a_colocated_engine_joins_paused_and_resumes_once_the_trainer_is_idle() -> None:
    run = one_engine(limits(max_staleness=1), rows=4, slots=2, is_colocated=True)
    assert run.state.engines[0].is_paused
    assert run.actions(ResumeEngine) == [], "the first version is being published"
    run.deliver_all(unless=is_work)
    assert run.actions(ResumeEngine) == [ResumeEngine(0)]
    assert run.actions(Generate)


def test_a_step_waits_until_the_engine_is_paused() -> None:
    run = run_on_one_device()
    finish_batch_0(run)
    assert run.actions(PauseEngine) == [PauseEngine(0)]
    assert run.actions(Train) == []
    run.deliver(EnginePaused(0))
    assert run.actions(Train) == [Train(0, (GroupId(0, 0), GroupId(0, 1)))]


def test_the_engine_resumes_with_its_requests_after_the_version_is_published() -> None:
    run = run_on_one_device()
    finish_batch_0(run)
    run.deliver(EnginePaused(0))
    kept = dict(run.state.engines[0].requests)
    assert kept
    run.deliver(Trained(0))
    assert len(run.actions(ResumeEngine)) == 1, "the version is not published yet"
    run.deliver(Published(1, "v1"))
    assert len(run.actions(ResumeEngine)) == 2
    assert kept.items() <= run.state.engines[0].requests.items()
    assert run.state.num_regenerated_tokens == 0


def test_a_paused_engine_gets_no_requests() -> None:
    run = run_on_one_device()
    num_before = len(run.actions(Generate))
    finish_batch_0(run)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    assert run.state.training_step == 0
    assert len(run.actions(Generate)) == num_before


def test_a_failed_step_is_repeated_without_resuming_the_engine() -> None:
    run = run_on_one_device()
    finish_batch_0(run)
    run.deliver(EnginePaused(0))
    assert run.deliver(StepFailed(0, "no memory")) == run.actions(Train)[:1]
    assert len(run.actions(ResumeEngine)) == 1


def test_the_trainer_does_not_wait_for_a_lost_engine() -> None:
    run = run_on_one_device()
    run.join(1, rows=4, slots=1)
    finish_batch_0(run)
    assert run.actions(Train) == []
    run.deliver(EngineLost(0, "killed"))
    assert len(run.actions(Train)) == 1


def test_all_engines_on_the_device_are_paused() -> None:
    run = FakeWorkers(limits(num_steps=4, max_staleness=1))
    for number in (0, 1):
        run.join(number, rows=2, slots=2, is_colocated=True)
    run.deliver_all(unless=is_work)
    finish_batch_0(run)
    assert {action.engine for action in run.actions(PauseEngine)} == {0, 1}
    run.deliver(EnginePaused(0))
    assert run.actions(Train) == []
    run.deliver(EnginePaused(1))
    assert len(run.actions(Train)) == 1


def test_an_engine_that_joins_during_a_step_stays_paused_until_its_end() -> None:
    run = run_on_one_device()
    finish_batch_0(run)
    run.deliver(EnginePaused(0))
    run.join(1, rows=2, slots=1, is_colocated=True)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    assert run.state.engines[1].is_paused
    assert run.actions(PauseEngine) == [PauseEngine(0)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_on_one_device_finishes(max_staleness: int) -> None:
    run = run_on_one_device(max_staleness=max_staleness)
    run.deliver_all()
    assert run.orchestrator.done
    requests = [r for action in run.actions(Generate) for r in action.requests]
    assert len(requests) == len({*requests}) == 8


def state_with_colocated_engine(rows: int = 5) -> State:
    """Engine 0 shares the trainer's device; the trainer waits for requests 1 and 2 on engine 1."""
    state = state_at(limits(num_steps=20, batch_size=2, max_staleness=2), newest=0)
    add_engine(state, 0, rows=4, loaded={0}, is_colocated=True)
    add_engine(state, 1, rows, loaded={0})
    add_running(state, 0, 0, 3, 4, 5, num_tokens=30)
    add_running(state, 1, 0, 1, 2)
    return state


def test_requests_migrate_off_a_colocated_engine_before_a_step() -> None:
    run = FakeWorkers(state_with_colocated_engine().limits, state=state_with_colocated_engine())
    run.finish_group(GroupId(0, 1))
    run.finish_group(GroupId(0, 2))
    assert run.actions(PauseEngine) == [PauseEngine(0)]
    migrations = [Migrate(RequestId(0, row, 0), 0, 1, 0, "reclaim") for row in (3, 4, 5)]
    assert run.actions(Migrate) == migrations
    run.deliver_all(unless=lambda event: not isinstance(event, Migrated | EnginePaused))
    assert run.dataset_rows(1) == [3, 4, 5]
    assert run.state.engines[0].is_empty
    assert len(run.actions(Train)) == 1


def test_the_trainer_need_not_wait_for_the_migrations() -> None:
    run = FakeWorkers(state_with_colocated_engine().limits, state=state_with_colocated_engine())
    run.finish_group(GroupId(0, 1))
    run.finish_group(GroupId(0, 2))
    run.deliver(EnginePaused(0))
    assert len(run.actions(Train)) == 1
    assert run.dataset_rows(0) == [3, 4, 5]
    run.deliver_all(unless=is_work)
    assert run.dataset_rows(0) == []


def test_requests_without_a_row_elsewhere_pause_with_the_engine() -> None:
    run = FakeWorkers(state_with_colocated_engine().limits, state=state_with_colocated_engine(rows=2))
    run.finish_group(GroupId(0, 1))
    run.finish_group(GroupId(0, 2))
    run.deliver_all(unless=is_work)
    assert len(run.actions(Train)) == 1
    assert len(run.dataset_rows(0)) == 1
    run.deliver(Trained(0))
    run.deliver_all(unless=is_work)
    assert run.actions(ResumeEngine) == [ResumeEngine(0)]
    assert run.state.num_regenerated_tokens == 0


def test_the_engine_loads_the_newest_version_after_the_step() -> None:
    run = run_on_one_device()
    finish_batch_0(run)
    run.deliver_all(unless=lambda event: is_work(event) and not isinstance(event, Trained))
    assert run.actions(Load)[-1] == Load(0, 1)
