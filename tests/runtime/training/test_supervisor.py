"""A trainer that dies, hangs or does not start has a successor, until it has had enough of them."""

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
from dora.runtime.process.worker_process import FIRST_DELAY_S, WorkerMessages, receive
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.runtime.training.checkpoints import CheckpointManager
from dora.runtime.training.supervisor import TrainerSupervisor
from dora.stream.sample_db import SampleStore
from dora.weights.store import WeightStore, make_store_folder

BATCH = (GroupId(0, 0), GroupId(0, 1))


class Scene:
    """A run that has begun, with a trainer whose words are the test's."""

    def __init__(self, task: Path, out: Path, *changes: str) -> None:
        self.plan = RunSetup.make(load.read_config(task, changes), out)
        self.facts: deque[Event] = deque()
        self.notices: list[str] = []
        self.published: dict[int, str] = {}
        self.launcher = FakeLauncher()
        self._told = WorkerMessages(self.launcher.start)
        self.samples = SampleStore(out / "samples.sqlite")
        self.store = WeightStore(make_store_folder(1))
        teller = SampleBook(self.plan, self.samples)
        checkpoints = CheckpointManager(self.plan, self.store, self.notices.append)
        folders = self.store.folder, out
        announce = self.published.__setitem__
        self.trainers = TrainerSupervisor(
            self.plan,
            folders,
            (0, None),
            self._told,
            self.facts,
            teller,
            checkpoints,
            announce,
            self.notices.append,
        )
        self.says(m.WorkerReady())
        self.trainers.open(may_replace=True)

    @property
    def process(self) -> FakeProcess:
        return self.launcher.processes[-1]

    def says(self, message: object) -> None:
        """The trainer of the day says something, and is heard."""
        self.process.emit(message)
        self.hear()

    def hear(self) -> None:
        for worker, message in receive(self._told, 5.0):
            if worker in self.trainers.ranks:
                self.trainers.on_message(worker, message)

    def train(self, step: int) -> None:
        self.trainers.send(m.TrainStep(step, BATCH))
        self.says(m.StepCompleted(step, {}))

    def replace(self) -> None:
        """Its successor's time has come."""
        num_before = len(self.launcher.processes)
        deadline_s = time.monotonic() + 3 * FIRST_DELAY_S
        while len(self.launcher.processes) == num_before:
            assert time.monotonic() < deadline_s
            self.trainers.check_deadlines(0.0)
            time.sleep(0.02)

    def close(self) -> None:
        self.trainers.kill()
        self.samples.close()
        self.store.close()


@pytest.fixture
def scene(task: Path, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(task, tmp_path, "runtime.max_restarts=1", "runtime.step_timeout_s=0.2")
    yield made
    made.close()


@pytest.fixture
def scene_of_many(task: Path, tmp_path: Path) -> Iterator[Scene]:
    """Trainers one after another."""
    made = Scene(task, tmp_path)
    yield made
    made.close()


def write_journal(out: Path, *steps: int) -> None:
    """With the orders to train some steps."""
    records = [{"kind": "train", "step": step, "groups": BATCH} for step in steps]
    lines = [json.dumps({"seq": seq, "t_s": 0.0, **record}) for seq, record in enumerate(records)]
    (out / "journal.jsonl").write_text("\n".join(["{}", *lines]) + "\n")


def test_a_successor_redoes_what_was_trained_with_the_batches_of_the_journal(scene: Scene) -> None:
    scene.train(0)
    scene.train(1)
    write_journal(scene.plan.out, 0, 1, 2)
    scene.trainers.send(m.TrainStep(2, BATCH))
    scene.process.kill()
    scene.hear()
    assert scene.facts.pop() == TrainerLost("trainer was killed by SIGKILL")
    assert "another one begins in 1 s" in scene.notices[-1]
    assert scene.trainers.restart_at_s is not None
    scene.replace()
    scene.says(m.WorkerReady())
    assert scene.facts.pop() == TrainerReplaced(0, (BATCH, BATCH))
    assert scene.process.spec.checkpoint is None


def test_a_version_that_is_only_attested_is_announced_to_nobody(scene: Scene) -> None:
    scene.trainers.send(m.PublishWeights(0))
    scene.says(m.WeightsPublished(0, "bytes"))
    scene.trainers.send(m.PublishWeights(1, is_stored=False))
    scene.says(m.WeightsPublished(1, "other bytes"))
    assert [*scene.facts] == [Published(0, "bytes"), DigestReported(1, "other bytes")]
    assert scene.published == {0: "bytes"}


def test_a_trainer_that_answers_no_order_is_lost_though_it_beats(scene: Scene) -> None:
    scene.trainers.send(m.TrainStep(0, BATCH))
    time.sleep(0.25)
    scene.process.emit(m.Heartbeat())
    scene.trainers.check_deadlines(0.0)
    assert scene.facts.pop() == TrainerLost(
        "the trainer has answered no order for runtime.step_timeout_s = 0.2 s"
    )
    assert not scene.process.is_alive


def test_a_trainer_without_an_order_may_rest(scene: Scene) -> None:
    scene.train(0)
    time.sleep(0.25)
    scene.trainers.check_deadlines(0.0)
    assert isinstance(scene.facts.pop(), Trained)
    assert scene.process.is_alive


def test_time_that_the_driver_has_slept_is_nobody_s_silence(scene: Scene) -> None:
    scene.trainers.send(m.TrainStep(0, BATCH))
    time.sleep(0.25)
    scene.trainers.check_deadlines(asleep_s=0.25)
    assert not scene.facts


def test_the_run_ends_when_too_many_have_died(scene: Scene) -> None:
    scene.process.kill()
    scene.hear()
    scene.replace()
    scene.process.kill()
    with pytest.raises(RunError, match=re.escape("it was started again runtime.max_restarts = 1 times")):
        scene.hear()


def test_who_follows_a_trainer_that_got_on_starts_soon(scene_of_many: Scene) -> None:
    """By a step that nobody had trained: one that dies every few seconds is not waited for ever longer."""
    scene = scene_of_many
    scene.process.kill()
    scene.hear()
    scene.replace()
    write_journal(scene.plan.out)
    scene.says(m.WorkerReady())
    scene.train(0)
    scene.process.kill()
    scene.hear()
    assert "another one begins in 1 s" in scene.notices[-1]


def test_a_checkpoint_that_gives_other_bytes_than_it_was_written_of_ends_the_run(scene: Scene) -> None:
    scene.trainers.send(m.PublishWeights(0))
    scene.says(m.WeightsPublished(0, "bytes"))
    scene.process.kill()
    scene.hear()
    scene.replace()
    write_journal(scene.plan.out)
    scene.says(m.WorkerReady())
    scene.trainers.send(m.PublishWeights(0, is_stored=False))
    with pytest.raises(RunError, match="the checkpoint of version 0 gives other, and it was bytes"):
        scene.says(m.WeightsPublished(0, "other"))


def test_one_that_is_ready_though_nobody_waits_for_it_is_no_successor(scene: Scene) -> None:
    """As a station beside it that was replaced."""
    scene.says(m.WorkerReady())
    assert not scene.facts


def test_once_all_is_saved_its_death_is_no_loss(scene: Scene) -> None:
    scene.trainers.ignore_exit()
    scene.process.kill()
    scene.hear()
    assert not scene.facts
