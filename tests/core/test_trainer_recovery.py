"""Recovery of the trainer alone: engines continue, steps are redone, published weights do not change."""

from __future__ import annotations

import json

import pytest
from tests.core.fake_workers import FakeWorkers, limits, one_engine, run_in_step

from dora.core import actions, codec, events
from dora.core.orchestrator import Orchestrator
from dora.core.types import ProtocolError
from dora.core.wait_graph import find_root_causes, find_waits


def test_steps_after_the_checkpoint_are_redone_with_their_batches() -> None:
    run = run_in_step(5)
    batches = {action.step: action.groups for action in run.actions(actions.Train)}
    run.lose_trainer()
    run.emitted.clear()
    assert run.replace_trainer(from_step=3)[0] == actions.ReportDigest(3)
    run.deliver_all()
    assert [(o.step, o.groups) for o in run.actions(actions.Train)][:3] == [
        (k, batches[k]) for k in (3, 4, 5)
    ]
    assert [action.version for action in run.actions(actions.ReportDigest)] == [3, 4, 5]
    assert [action.version for action in run.actions(actions.Publish)] == [6, 7, 8, 9]
    assert run.orchestrator.done


def test_engines_keep_their_versions_and_requests_and_get_more() -> None:
    run = one_engine(limits(num_steps=9, group_size=2, max_staleness=2), rows=4, slots=3)
    run.deliver_all(
        unless=lambda event: (
            event == events.Trained(3) or (isinstance(event, events.RequestFinished) and event.version > 1)
        )
    )
    loaded = {engine.id: set(engine.loaded) for engine in run.state.engines.values()}
    store = dict(run.state.stored_versions)
    run.emitted.clear()
    run.lose_trainer()
    run.deliver_all()
    assert run.actions(actions.Admit)
    assert run.actions(actions.Generate)
    assert not run.actions(actions.Train)
    assert {engine.id: set(engine.loaded) for engine in run.state.engines.values()} == loaded
    assert run.state.stored_versions.items() <= store.items()


def test_a_redone_version_leaves_the_published_weights_unchanged() -> None:
    run = run_in_step(3)
    redone = events.DigestReported(3, "v3 again")
    run.lose_trainer()
    run.replace_trainer(from_step=2)
    run.deliver_all(unless=lambda event: event == redone)
    assert redone in run.pending
    run.deliver(redone)
    assert run.state.stored_versions[3] == "v3"


def test_without_a_checkpoint_all_steps_are_redone() -> None:
    run = run_in_step(2)
    run.lose_trainer()
    run.emitted.clear()
    run.replace_trainer(from_step=0)
    run.deliver_all()
    assert [action.step for action in run.actions(actions.Train)] == list(range(9))
    assert run.orchestrator.done


def test_a_trainer_lost_before_the_first_publication_publishes_version_0() -> None:
    run = FakeWorkers(limits())
    run.lose_trainer()
    assert run.replace_trainer(from_step=0)[0] == actions.Publish(0)


def test_a_trained_but_unpublished_step_is_redone_and_published() -> None:
    run = run_in_step(2)
    run.deliver(events.Trained(2))
    run.lose_trainer()
    run.emitted.clear()
    run.replace_trainer(from_step=2)
    run.deliver_all(unless=lambda event: event == events.Published(3, "v3"))
    assert run.actions(actions.ReportDigest) == [actions.ReportDigest(2)]
    assert run.actions(actions.Publish) == [actions.Publish(3)]


def test_a_checkpoint_of_an_unpublished_version_publishes_it() -> None:
    run = run_in_step(2)
    run.deliver(events.Trained(2))
    run.lose_trainer()
    assert run.replace_trainer(from_step=3)[0] == actions.Publish(3)


def test_the_trainer_may_be_lost_again_while_it_redoes_steps() -> None:
    run = run_in_step(5)
    run.lose_trainer()
    run.replace_trainer(from_step=2)
    run.deliver_all(unless=lambda event: event == events.Trained(3))
    run.lose_trainer()
    run.emitted.clear()
    run.replace_trainer(from_step=3)
    run.deliver_all()
    assert [action.step for action in run.actions(actions.Train)] == [3, 4, 5, 6, 7, 8]


def test_the_run_may_crash_while_the_trainer_is_lost() -> None:
    run = run_in_step(5)
    run.lose_trainer()
    run.crash(from_step=4)
    run.join(0, rows=4, slots=3)
    run.deliver_all()
    assert run.orchestrator.done


def test_a_run_does_not_finish_before_its_last_steps_are_redone() -> None:
    run = run_in_step(8)
    run.deliver_all(unless=lambda event: event == events.Published(9, "v9"))
    run.lose_trainer()
    run.replace_trainer(from_step=7)
    run.deliver_all(unless=lambda event: event == events.Trained(8))
    assert not run.actions(actions.Stop)
    run.deliver_all()
    assert run.actions(actions.Stop) == [actions.Stop()]


def test_a_restored_orchestrator_redoes_the_remaining_steps() -> None:
    run = run_in_step(5)
    run.lose_trainer()
    run.replace_trainer(from_step=3)
    restored = codec.state_from_json(json.loads(json.dumps(codec.state_to_json(run.state))))
    assert restored.redo_batches == run.state.redo_batches
    run.orchestrator = Orchestrator(restored.limits, restored)
    run.deliver_all()
    assert run.orchestrator.done


def test_a_lost_trainer_is_the_root_cause_and_not_a_stall() -> None:
    run = run_in_step(2)
    run.lose_trainer()
    assert find_root_causes(find_waits(run.state)) == ["trainer"]
    run.deliver_all()
    run.now += 100.0
    run.deliver(events.TimerFired())
    assert run.state.stall_group is None
    assert not run.actions(actions.ReportStall)


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (events.TrainerReplaced(2, ()), "the trainer must be lost first"),
        (events.DigestReported(2, "v2"), "the digest of this version must be due"),
    ],
)
def test_events_of_a_lost_trainer_are_rejected_while_it_runs(
    event: events.TrainerReplaced | events.DigestReported, rule: str
) -> None:
    with pytest.raises(ProtocolError, match=rule):
        run_in_step(2).deliver(event)


def test_a_replacement_that_is_lost_before_it_is_ready_changes_nothing() -> None:
    run = run_in_step(2)
    run.lose_trainer()
    before = codec.state_to_json(run.state)
    assert run.deliver(events.TrainerLost("again")) == []
    assert codec.state_to_json(run.state) == before


@pytest.mark.parametrize("from_step", [-1, 3, 7])
def test_a_new_trainer_that_would_skip_steps_is_rejected(from_step: int) -> None:
    run = run_in_step(5)
    run.lose_trainer()
    with pytest.raises(ProtocolError, match="redone must have every trained step since the checkpoint"):
        run.deliver(events.TrainerReplaced(from_step, ()))
