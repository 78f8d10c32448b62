"""A lost storage process is replaced and refilled, as on Ray."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from tests.runtime.tiny import save_start, write_task

from dora.config import load
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId, RequestId
from dora.errors import RunError, StorageFullError
from dora.runtime.process import supervisor
from dora.runtime.process.messages import RewardSpec
from dora.runtime.process.storage_process import StorageProcess
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.sample_book import TaskRewards
from dora.runtime.scoring.reward_manager import RewardManager, RewardTask
from dora.runtime.scoring.reward_worker import REWARD
from dora.stream import run_stream
from dora.stream.run_stream import GroupReader, RunStream
from dora.stream.sample_db import SampleStore, Trajectory
from dora.stream.storage import SegmentWriter

REWARD_FUNCTION = """
import time
from pathlib import Path
def reward(prompt, completion, **row):
    Path(__file__).with_name("has started").touch()
    while not Path(__file__).with_name("may return").exists():
        time.sleep(0.01)
    return 0.5
"""
SCORED, TRAINED, SUBMITTED = (GroupId(0, row) for row in range(3))


class StreamBench:
    """The sample store, the stream with a storage process, and a reward manager."""

    def __init__(self, folder: Path, *changes: str) -> None:
        (folder / "blocking.py").write_text(REWARD_FUNCTION)
        config = load.read_config(write_task(folder), changes)
        self.folder, self.notices = folder, list[str]()
        self.events: list[GroupScored | ScoringFailed] = []
        self.supervisor = Supervisor(config, folder, WorkerMessages(), lambda message: None)
        serve = partial(StorageProcess, supervisor=self.supervisor, config=config, notice=self.notices.append)
        spec = RewardSpec(
            REWARD, f"{folder}/blocking.py:reward", "reward.function", save_start(folder / "start")
        )
        task = RewardTask(spec, 60.0, "reward.timeout_s")
        self.stream = RunStream(folder / "stream", 2, tasks={REWARD: task.lease_s()}, serve=serve)
        assert isinstance(self.stream.storage, StorageProcess)
        self.storage = self.stream.storage
        self.store = SampleStore(folder / "samples.sqlite")
        self.store.subscribe(self.stream)
        self.manager = RewardManager(
            [task], self.stream, self.supervisor, self.store.finished, self._on_score, self.notices.append
        )

    def _on_score(self, event: GroupScored | ScoringFailed, task_rewards: TaskRewards) -> None:
        self.events.append(event)

    def put(self, group: GroupId) -> None:
        for sibling in range(2):
            self.store.put(Trajectory(RequestId(*group, sibling), 0, "digest", [1], [2], [-1.0]))
        self.store.commit()

    def kill_storage(self) -> None:
        process = psutil.Process(self.storage.states()[0].worker.process.pid)
        process.kill()
        process.wait(5.0)

    def wait_for_restart(self) -> None:
        """Do what the driver does once the storage is restarted."""
        while not self.storage.take_replaced():
            self.supervisor.poll(0.1)
        self.stream.reconnect()
        self.store.subscribe(self.stream)
        self.manager.on_storage_replaced()

    def wait_for_scores(self) -> list[GroupScored | ScoringFailed]:
        """The next scored groups, at least one."""
        self.events.clear()
        while not self.events:
            self.supervisor.poll(0.1)
        return [*self.events]

    def close(self) -> None:
        self.manager.close()
        self.store.close()
        self.stream.close()


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)


def test_a_restarted_storage_gets_all_untrained_samples_and_no_group_is_scored_twice(folder: Path) -> None:
    bench = StreamBench(folder)
    reader = GroupReader(bench.stream.folder)
    for group in (SCORED, TRAINED, SUBMITTED):
        bench.put(group)
    for group in (SCORED, TRAINED):
        bench.store.score(group, (1.0, 0.0), (0.5, -0.5))
    bench.store.set_state([TRAINED], "trained", 0)
    bench.store.commit()
    bench.store.resend([TRAINED])  # its step is redone
    before = reader.read_group(SCORED)
    bench.manager.submit(SUBMITTED, b"[{}, {}]")
    while not (folder / "has started").exists():
        bench.supervisor.poll(0.01)
    bench.kill_storage()
    bench.put(late := GroupId(0, 9))  # the stream drops it, the sample store keeps it
    bench.store.score(late, (1.0, 0.0), (0.5, -0.5))
    reader.commit([SCORED])
    bench.wait_for_restart()
    for group in (SCORED, TRAINED, late):
        after = reader.read_group(group)
        assert [s._replace(stream_row=None) for s in after] == [s._replace(stream_row=None) for s in before]
    (folder / "may return").touch()
    assert bench.wait_for_scores() == [GroupScored(SUBMITTED, (0.5, 0.5))]
    bench.manager.submit(late, b"[{}, {}]")
    assert bench.wait_for_scores() == [GroupScored(late, (0.5, 0.5))]  # and SUBMITTED is not scored again
    assert len(bench.notices) == 1  # the reward worker was not restarted
    assert bench.notices[0].endswith("restarting it in 0.01 s")
    reader.close()
    bench.close()


def test_a_call_before_the_driver_has_reconnected_does_not_report_the_loss_of_the_new_storage(
    folder: Path,
) -> None:
    bench = StreamBench(folder)
    bench.put(TRAINED)
    bench.kill_storage()
    bench.put(SUBMITTED)
    while not any(state.is_ready for state in bench.storage.states()):
        bench.supervisor.poll(0.1)
    bench.put(late := GroupId(0, 9))  # in the same round of the driver
    bench.wait_for_restart()
    for group in (TRAINED, SUBMITTED, late):
        bench.store.score(group, (1.0, 0.0), (0.5, -0.5))
    bench.store.commit()
    reader = GroupReader(bench.stream.folder)
    assert [len(reader.read_group(group)) for group in (TRAINED, SUBMITTED, late)] == [2, 2, 2]
    assert len(bench.notices) == 1, bench.notices
    reader.close()
    bench.close()


def test_a_storage_without_restarts_left_ends_the_run(folder: Path) -> None:
    bench = StreamBench(folder, "runtime.max_restarts=1")
    bench.kill_storage()
    bench.wait_for_restart()
    bench.kill_storage()
    with pytest.raises(RunError, match=r"no restarts left.*max_restarts = 1.*--resume"):
        bench.put(SUBMITTED)
    bench.close()


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_storage_is_reported_lost_once_and_its_replacement_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = StreamBench(folder, "runtime.max_restarts=2")
    bench.put(TRAINED)
    bench.put(SUBMITTED)
    bench.manager.submit(SUBMITTED, b"[{}, {}]")
    bench.kill_storage()
    bench.store.set_state([TRAINED], "trained", 0)
    bench.put(late := GroupId(0, 9))  # two calls, to remove groups and to send others, find the loss
    assert len(bench.notices) == 1
    bench.wait_for_restart()
    with monkeypatch.context() as full:
        full.setattr(SegmentWriter, "allocate", refuse)
        full.setattr(run_stream, "WAIT_S", 0.0)
        with pytest.raises(StorageFullError):
            bench.put(SCORED)
    bench.kill_storage()
    bench.wait_for_restart()
    bench.store.score(late, (1.0, 0.0), (0.5, -0.5))
    bench.store.commit()
    reader = GroupReader(bench.stream.folder)
    assert [s.reward for s in reader.read_group(late)] == [1.0, 0.0]
    reader.close()
    bench.close()
