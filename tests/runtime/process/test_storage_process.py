"""A storage that is a process of its own, as on Ray: what it takes with it is told to the next one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.runtime.tiny import save_start, write_task

from dora.config import load
from dora.core.events import GroupScored
from dora.core.types import GroupId, RequestId
from dora.errors import RunError, ServiceError, StorageFullError
from dora.runtime.process import worker_process
from dora.runtime.process.stream_workers import StorageProcess
from dora.runtime.process.worker_process import ForkedProcess, WorkerMessages, receive
from dora.runtime.scoring.external import ExternalRewards
from dora.runtime.scoring.reward_manager import RewardManager, RewardTask
from dora.runtime.scoring.reward_worker import REWARD, RewardSpec
from dora.stream.client import StreamClient
from dora.stream.run_stream import GroupReader, RunStream
from dora.stream.sample_db import SampleStore, Trajectory
from dora.stream.schema import TimedOut

JUDGE = """
import time
from pathlib import Path
def reward(prompt, completion, **row):
    Path(__file__).with_name("judging").touch()
    while not Path(__file__).with_name("may judge").exists():
        time.sleep(0.01)
    return 0.5
"""
JUDGED, TRAINED, ASKED = (GroupId(0, row) for row in range(3))


class Life:
    """A record, its stream, and who judges; the storage may die."""

    def __init__(self, folder: Path, *changes: str) -> None:
        (folder / "judge.py").write_text(JUDGE)
        config = load.read_config(write_task(folder), changes)
        self.folder, self.told, self.notices = folder, WorkerMessages(), list[str]()
        serve = partial(StorageProcess, config=config, start=ForkedProcess, notice=self.notices.append)
        judge = RewardSpec(
            REWARD, f"{folder}/judge.py:reward", "reward.function", save_start(folder / "start")
        )
        task = RewardTask(judge, 60.0, "reward.timeout_s")
        self.feed = RunStream(folder / "stream", 2, tasks={REWARD: task.lease_s()}, serve=serve)
        assert isinstance(self.feed.storage, StorageProcess)
        self.storage = self.feed.storage
        self.store = SampleStore(folder / "samples.sqlite")
        self.store.subscribe(self.feed)
        self.rewarding = RewardManager([task], self.feed, 60.0, self.told, self.notices.append)

    def put(self, group: GroupId) -> None:
        for sibling in range(2):
            self.store.put(Trajectory(RequestId(*group, sibling), 0, "digest", [1], [2], [-1.0]))
        self.store.commit()

    def kill(self) -> None:
        process = psutil.Process(self.storage.state().worker.pid)
        process.kill()
        process.wait(5.0)

    def begin_again(self) -> None:
        """As the driver does."""
        while not self.storage.poll(0.1):
            pass
        self.feed.reconnect()
        self.store.subscribe(self.feed)
        self.rewarding.on_storage_replaced()

    def hear(self) -> list[GroupScored]:
        """What is judged, after at least one group is."""
        facts: list[GroupScored] = []
        while not facts:
            for worker, message in receive(self.told, 0.1):
                found = self.rewarding.on_message(worker, message) or []
                facts += [fact for fact in found if isinstance(fact, GroupScored)]
        return facts

    def end(self) -> None:
        self.rewarding.kill()
        self.store.close()
        self.feed.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    monkeypatch.setattr(worker_process, "FIRST_S", 0.01)
    made = Path(tempfile.mkdtemp(prefix="dora-"))
    yield made
    shutil.rmtree(made)


def test_another_storage_has_what_was_not_trained_and_nothing_is_judged_twice(folder: Path) -> None:
    life = Life(folder)
    reader = GroupReader(life.feed.folder)
    for group in (JUDGED, TRAINED, ASKED):
        life.put(group)
    for group in (JUDGED, TRAINED):
        life.store.score(group, (1.0, 0.0), (0.5, -0.5))
    life.store.set_state([TRAINED], "trained", 0)
    life.store.commit()
    life.store.resend([TRAINED])  # its step is redone
    before = reader.read_group(JUDGED)
    life.rewarding.submit(ASKED, b"[{}, {}]")
    while not (folder / "judging").exists():
        life.rewarding.check_deadlines()
    life.kill()
    life.put(late := GroupId(0, 9))  # nobody takes it now; the record does
    life.store.score(late, (1.0, 0.0), (0.5, -0.5))
    reader.commit([JUDGED])
    life.begin_again()
    for group in (JUDGED, TRAINED, late):
        again = reader.read_group(group)
        assert [s._replace(stream_index=None) for s in again] == [
            s._replace(stream_index=None) for s in before
        ]
    (folder / "may judge").touch()
    assert life.hear() == [GroupScored(ASKED, (0.5, 0.5))]
    life.rewarding.submit(late, b"[{}, {}]")
    assert life.hear() == [GroupScored(late, (0.5, 0.5))]  # and no more of the other one
    assert len(life.notices) == 1  # whoever judges has lived on
    assert life.notices[0].endswith("another one begins in 0.01 s")
    reader.close()
    life.end()


def test_a_storage_that_was_replaced_too_often_ends_the_run(folder: Path) -> None:
    life = Life(folder, "runtime.max_restarts=1")
    life.kill()
    life.begin_again()
    life.kill()
    with pytest.raises(RunError, match=r"no storage any more.*max_restarts = 1 times.*--resume"):
        life.put(ASKED)
    life.end()


def test_a_storage_that_was_full_is_lost_once_whoever_finds_out_and_the_next_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(folder, "runtime.max_restarts=2")
    life.put(TRAINED)
    life.put(ASKED)
    life.rewarding.submit(ASKED, b"[{}, {}]")
    life.kill()
    life.store.set_state([TRAINED], "trained", 0)
    life.put(late := GroupId(0, 9))  # at once: groups are dropped, and others sent, where nobody is
    assert len(life.notices) == 1
    life.begin_again()
    with monkeypatch.context() as full:
        full.setattr(StreamClient, "put", lambda *_: TimedOut(0.0, "nobody takes anything"))
        with pytest.raises(StorageFullError):
            life.put(JUDGED)
    life.kill()
    life.begin_again()
    life.store.score(late, (1.0, 0.0), (0.5, -0.5))
    life.store.commit()
    reader = GroupReader(life.feed.folder)
    assert [s.reward for s in reader.read_group(late)] == [1.0, 0.0]
    reader.close()
    life.end()


def test_rewards_for_a_loan_of_a_lost_storage_are_no_rewards_for_one_of_the_next(folder: Path) -> None:
    life = Life(folder)
    judge = ExternalRewards(REWARD, 60.0, "reward.timeout_s", life.feed.folder, folder / "start")
    for group in (JUDGED, ASKED):
        life.put(group)
    life.rewarding.kill()  # who judges is outside
    life.feed.request_scores(JUDGED, b"[{}, {}]")
    judge.add(JUDGED)
    lost = judge.lease()
    assert lost is not None
    life.kill()
    with pytest.raises(RunError):
        judge.submit(lost.lease, [1.0, 1.0])
    assert judge.has_group()  # which is nobody's by now
    life.begin_again()
    judge.on_storage_replaced()
    life.feed.request_scores(ASKED, b"[{}, {}]")
    judge.add(ASKED)
    loan = judge.thread.submit(judge.lease).result()
    assert loan is not None
    with pytest.raises(ServiceError, match=f"lease {lost.lease} has expired"):
        judge.submit(lost.lease, [1.0, 1.0])
    judge.submit(loan.lease, [0.0, 0.0])
    judge.close()
    life.end()
