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

from dora import settings
from dora.core.events import GroupScored
from dora.core.records import GroupId, RequestId
from dora.errors import NoRoomError, RunError, ServiceError
from dora.runtime import restarts
from dora.runtime.judging import REWARD, JudgeSpec
from dora.runtime.lending import OutsideJudge
from dora.runtime.process import Forked, Told, take
from dora.runtime.rewarding import Rewarding, RewardTask
from dora.runtime.storage import InProcess
from dora.stream.batch import Waited
from dora.stream.client import StreamClient
from dora.stream.feed import Feed, GroupReader
from dora.stream.samples import SampleStore, Trajectory

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
        config = settings.read(write_task(folder), changes)
        self.folder, self.told, self.notices = folder, Told(), list[str]()
        serve = partial(InProcess, config=config, start=Forked, notice=self.notices.append)
        judge = JudgeSpec(
            REWARD, f"{folder}/judge.py:reward", "reward.function", save_start(folder / "start")
        )
        task = RewardTask(judge, 60.0, "reward.timeout_s")
        self.feed = Feed(folder / "stream", 2, tasks={REWARD: task.lease_s()}, serve=serve)
        assert isinstance(self.feed.storage, InProcess)
        self.storage = self.feed.storage
        self.store = SampleStore(folder / "samples.sqlite")
        self.store.follow(self.feed)
        self.rewarding = Rewarding([task], self.feed, 60.0, self.told, self.notices.append)

    def put(self, group: GroupId) -> None:
        for sibling in range(2):
            self.store.put(Trajectory(RequestId(*group, sibling), 0, "digest", [1], [2], [-1.0]))
        self.store.commit()

    def kill(self) -> None:
        process = psutil.Process(self.storage.pulse().worker.pid)
        process.kill()
        process.wait(5.0)

    def begin_again(self) -> None:
        """As the driver does."""
        while not self.storage.is_new(0.1):
            pass
        self.feed.begin_again()
        self.store.follow(self.feed)
        self.rewarding.ask_again()

    def hear(self) -> list[GroupScored]:
        """What is judged, after at least one group is."""
        facts: list[GroupScored] = []
        while not facts:
            for worker, message in take(self.told, 0.1):
                found = self.rewarding.hear(worker, message) or []
                facts += [fact for fact in found if isinstance(fact, GroupScored)]
        return facts

    def end(self) -> None:
        self.rewarding.kill()
        self.store.close()
        self.feed.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    monkeypatch.setattr(restarts, "FIRST_S", 0.01)
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
    life.store.mark([TRAINED], "trained", 0)
    life.store.commit()
    life.store.offer_again([TRAINED])  # its step is redone
    before = reader.group(JUDGED)
    life.rewarding.submit(ASKED, b"[{}, {}]")
    while not (folder / "judging").exists():
        life.rewarding.check_deadlines()
    life.kill()
    life.put(late := GroupId(0, 9))  # nobody takes it now; the record does
    life.store.score(late, (1.0, 0.0), (0.5, -0.5))
    reader.commit([JUDGED])
    life.begin_again()
    for group in (JUDGED, TRAINED, late):
        again = reader.group(group)
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
    life.store.mark([TRAINED], "trained", 0)
    life.put(late := GroupId(0, 9))  # at once: groups are dropped, and others sent, where nobody is
    assert len(life.notices) == 1
    life.begin_again()
    with monkeypatch.context() as full:
        full.setattr(StreamClient, "put", lambda *_: Waited(0.0, "nobody takes anything"))
        with pytest.raises(NoRoomError):
            life.put(JUDGED)
    life.kill()
    life.begin_again()
    life.store.score(late, (1.0, 0.0), (0.5, -0.5))
    life.store.commit()
    reader = GroupReader(life.feed.folder)
    assert [s.reward for s in reader.group(late)] == [1.0, 0.0]
    reader.close()
    life.end()


def test_rewards_for_a_loan_of_a_lost_storage_are_no_rewards_for_one_of_the_next(folder: Path) -> None:
    life = Life(folder)
    judge = OutsideJudge(REWARD, 60.0, "reward.timeout_s", life.feed.folder, folder / "start")
    for group in (JUDGED, ASKED):
        life.put(group)
    life.rewarding.kill()  # who judges is outside
    life.feed.ask(JUDGED, b"[{}, {}]")
    judge.ask(JUDGED)
    lost = judge.lend()
    assert lost is not None
    life.kill()
    with pytest.raises(RunError):
        judge.take(lost.lease, [1.0, 1.0])
    assert judge.has_group()  # which is nobody's by now
    life.begin_again()
    judge.reconnect()
    life.feed.ask(ASKED, b"[{}, {}]")
    judge.ask(ASKED)
    loan = judge.thread.submit(judge.lend).result()
    assert loan is not None
    with pytest.raises(ServiceError, match=f"lease {lost.lease} is over"):
        judge.take(lost.lease, [1.0, 1.0])
    judge.take(loan.lease, [0.0, 0.0])
    judge.close()
    life.end()
