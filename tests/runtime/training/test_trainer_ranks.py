"""The supervisor restarts a trainer that crashes, hangs or does not start, up to its limit of restarts."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.fake_process import FakeLauncher, FakeProcess

from dora.config import load
from dora.core.events import DigestReported, Event, Published, Trained, TrainerLost, TrainerReplaced
from dora.core.types import GroupId
from dora.errors import RunError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import FIRST_DELAY_S, Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.runtime.training.checkpoints import CheckpointManager
from dora.runtime.training.trainer_ranks import TrainerRanks
from dora.stream.sample_db import SampleStore
from dora.weights.store import WeightStore, make_store_folder

BATCH = (GroupId(0, 0), GroupId(0, 1))


class SupervisedTrainer:
    """A supervisor in a run that has begun, and a trainer whose messages the test sends."""

    def __init__(self, task: Path, out: Path, *changes: str) -> None:
        self.setup = RunSetup.make(load.read_config(task, changes), out)
        self.events: deque[Event] = deque()
        self.notices: list[str] = []
        self.published: dict[int, str] = {}
        self.launcher = FakeLauncher()
        self._workers = Supervisor(self.setup.config, out, WorkerMessages(self.launcher.start))
        self.samples = SampleStore(out / "samples.sqlite")
        self.store = WeightStore(make_store_folder(1))
        self.supervisor = TrainerRanks(
            self.setup,
            (self.store.folder, out),
            (0, None),
            self._workers,
            self.events,
            SampleBook(self.setup, self.samples),
            CheckpointManager(self.setup, self.store, self.notices.append),
            self.published.__setitem__,
            self.notices.append,
        )
        self.emit(m.WorkerReady())
        self.supervisor.can_restart = True

    @property
    def process(self) -> FakeProcess:
        """The newest process."""
        return self.launcher.processes[-1]

    def emit(self, message: object) -> None:
        """The trainer sends a message and the supervisor handles it."""
        self.process.emit(message)
        self.handle_messages()

    def handle_messages(self) -> None:
        self._workers.poll(5.0)

    def train(self, step: int) -> None:
        self.supervisor.send(m.TrainStep(step, BATCH))
        self.emit(m.StepCompleted(step, {}))

    def kill(self) -> None:
        self.process.kill()
        self.handle_messages()

    def wait_for_restart(self) -> None:
        num_before = len(self.launcher.processes)
        deadline_s = time.monotonic() + 3 * FIRST_DELAY_S
        while len(self.launcher.processes) == num_before:
            assert time.monotonic() < deadline_s
            self._workers.poll(0.02)

    def close(self) -> None:
        self._workers.close()
        self.samples.close()
        self.store.close()


@pytest.fixture
def trainer(task: Path, tmp_path: Path) -> Iterator[SupervisedTrainer]:
    """It may be restarted once, and must reply within 0.2 s."""
    supervised = SupervisedTrainer(task, tmp_path, "runtime.max_restarts=1", "runtime.step_timeout_s=0.2")
    yield supervised
    supervised.close()


@pytest.fixture
def restartable_trainer(task: Path, tmp_path: Path) -> Iterator[SupervisedTrainer]:
    """It has the default limits."""
    supervised = SupervisedTrainer(task, tmp_path)
    yield supervised
    supervised.close()


def write_journal(out: Path, *steps: int) -> None:
    """Write a journal with the action to train each of some steps."""
    records = [{"kind": "train", "step": step, "groups": BATCH} for step in steps]
    lines = [json.dumps({"seq": seq, "t_s": 0.0, **record}) for seq, record in enumerate(records)]
    (out / "journal.jsonl").write_text("\n".join(["{}", *lines]) + "\n")


def test_a_restarted_trainer_redoes_steps_with_the_batches_of_the_journal(trainer: SupervisedTrainer) -> None:
    trainer.train(0)
    trainer.train(1)
    write_journal(trainer.setup.out, 0, 1, 2)
    trainer.supervisor.send(m.TrainStep(2, BATCH))
    trainer.kill()
    assert trainer.events.pop() == TrainerLost("trainer was killed by SIGKILL")
    assert "restarting in 1 s" in trainer.notices[-1]
    trainer.wait_for_restart()
    trainer.emit(m.WorkerReady())
    assert trainer.events.pop() == TrainerReplaced(0, (BATCH, BATCH))
    assert trainer.process.spec.checkpoint is None


def test_a_version_that_is_not_stored_is_not_announced(trainer: SupervisedTrainer) -> None:
    trainer.supervisor.send(m.PublishWeights(0))
    trainer.emit(m.WeightsPublished(0, "digest"))
    trainer.supervisor.send(m.PublishWeights(1, is_stored=False))
    trainer.emit(m.WeightsPublished(1, "another digest"))
    assert [*trainer.events] == [Published(0, "digest"), DigestReported(1, "another digest")]
    assert trainer.published == {0: "digest"}


def test_a_trainer_that_sends_heartbeats_but_no_reply_is_lost(trainer: SupervisedTrainer) -> None:
    trainer.supervisor.send(m.TrainStep(0, BATCH))
    time.sleep(0.25)
    trainer.process.emit(m.Heartbeat())
    trainer.supervisor.check_deadlines()
    assert trainer.events.pop() == TrainerLost("trainer sent no reply within runtime.step_timeout_s = 0.2 s")
    assert not trainer.process.is_alive


def test_a_trainer_without_a_pending_request_has_no_deadline(trainer: SupervisedTrainer) -> None:
    trainer.train(0)
    time.sleep(0.25)
    trainer.supervisor.check_deadlines()
    assert isinstance(trainer.events.pop(), Trained)
    assert trainer.process.is_alive


def test_the_run_ends_after_too_many_restarts(trainer: SupervisedTrainer) -> None:
    trainer.kill()
    trainer.wait_for_restart()
    trainer.process.kill()
    with pytest.raises(RunError, match=re.escape("it was restarted runtime.max_restarts = 1 times")):
        trainer.handle_messages()


def test_a_replacement_that_exits_before_it_is_ready_is_replaced_after_a_longer_delay(
    restartable_trainer: SupervisedTrainer,
) -> None:
    trainer = restartable_trainer
    trainer.kill()
    trainer.wait_for_restart()
    trainer.kill()
    assert [*trainer.events] == [TrainerLost("trainer was killed by SIGKILL")] * 2
    assert "restarting in 2 s" in trainer.notices[-1]
    trainer.wait_for_restart()
    write_journal(trainer.setup.out)
    trainer.emit(m.WorkerReady())
    assert trainer.events.pop() == TrainerReplaced(0, ())


def test_a_newly_trained_step_resets_the_backoff(restartable_trainer: SupervisedTrainer) -> None:
    """A trainer that makes progress between crashes is restarted after the first delay each time."""
    trainer = restartable_trainer
    trainer.kill()
    trainer.wait_for_restart()
    write_journal(trainer.setup.out)
    trainer.emit(m.WorkerReady())
    trainer.train(0)
    trainer.kill()
    assert "restarting in 1 s" in trainer.notices[-1]


def test_a_checkpoint_with_other_weights_than_were_published_ends_the_run(trainer: SupervisedTrainer) -> None:
    trainer.supervisor.send(m.PublishWeights(0))
    trainer.emit(m.WeightsPublished(0, "digest"))
    trainer.kill()
    trainer.wait_for_restart()
    write_journal(trainer.setup.out)
    trainer.emit(m.WorkerReady())
    trainer.supervisor.send(m.PublishWeights(0, is_stored=False))
    with pytest.raises(RunError, match="version 0 has weights with digest other, but digest was published"):
        trainer.emit(m.WeightsPublished(0, "other"))


def test_a_second_ready_message_reports_no_restart(trainer: SupervisedTrainer) -> None:
    """A restarted aux worker sends one."""
    trainer.emit(m.WorkerReady())
    assert not trainer.events


def test_an_exit_after_everything_is_saved_is_no_loss(trainer: SupervisedTrainer) -> None:
    trainer.supervisor.ignore_exit()
    trainer.kill()
    assert not trainer.events
