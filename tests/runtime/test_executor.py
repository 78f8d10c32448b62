"""The executor with real worker processes: failed loads, failed steps, damaged weights, lost engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.runtime.running import query

from dora.config import load
from dora.config.schema import Config
from dora.core import actions, events
from dora.core.types import GroupId, RequestId
from dora.envs.episode import EpisodeId
from dora.errors import RunError
from dora.runtime.executor import ProcessExecutor
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import Trajectory


@pytest.fixture
def executor(task: Path, tmp_path: Path) -> Iterator[ProcessExecutor]:
    executor = start(load.read_config(task, ["runtime.max_restarts=0"]), tmp_path)
    yield executor
    executor.close()


def start(config: Config, folder: Path) -> ProcessExecutor:
    """An executor whose workers have started; its engines have not joined."""
    executor = ProcessExecutor(RunSetup.make(config, folder), notice=print)
    try:
        while executor.not_started():
            executor.poll()
    except BaseException:
        executor.close()
        raise
    return executor


def next_event(executor: ProcessExecutor) -> events.Event:
    deadline_s = executor.now + 30
    while executor.now < deadline_s:
        if (event := executor.next_event(deadline_s)) is not None:
            return event
    raise AssertionError("no event within 30 s")


def join_all(executor: ProcessExecutor) -> None:
    """Let both engines join."""
    executor.join_all()
    for _ in range(2):
        assert isinstance(next_event(executor), events.EngineJoined)


def test_an_engine_whose_weights_differ_from_the_published_ones_is_lost(executor: ProcessExecutor) -> None:
    join_all(executor)
    executor.execute(actions.Publish(0))
    assert isinstance(next_event(executor), events.Published)
    executor.execute(actions.Load(0, 0))
    assert isinstance(next_event(executor), events.Loaded)
    with executor.weights.path(0).open("rb+") as stored:
        stored.seek(-4, os.SEEK_END)
        stored.write(bytes(4))
    executor.execute(actions.Load(1, 0))
    assert next_event(executor) == events.EngineLost(
        1, "its weights of version 0 differ from the published ones"
    )
    assert executor.engine_pool.active == {0}
    executor.execute(actions.Load(1, 0))  # a message to a lost engine is dropped
    psutil.Process(executor.engine_pool.workers[0].process.pid).kill()
    assert next_event(executor) == events.EngineLost(0, "engine 0 was killed by SIGKILL")
    with pytest.raises(RunError, match="the last engine is lost: engine 0 was killed by SIGKILL"):
        next_event(executor)


def store_group(executor: ProcessExecutor, group: GroupId, token: int) -> GroupId:
    """A scored group whose answers repeat one token."""
    for sibling in range(2):
        request = RequestId(*group, sibling)
        executor.samples.put(Trajectory(request, 0, "digest", [1, 2], [token] * 3, [-1.0] * 3))
    executor.samples.score(group, (1.0, 0.0), [1.0, -1.0])
    return group


def test_a_failed_step_changes_nothing_and_can_be_retried(executor: ProcessExecutor) -> None:
    good, bad = (store_group(executor, GroupId(0, row), token) for row, token in ((1, 3), (2, 10**6)))
    for version in (0, 1):
        executor.execute(actions.Train(0, (good, bad)))
        failed = next_event(executor)
        assert isinstance(failed, events.StepFailed)
        assert failed.step == 0
        assert "Error: " in failed.reason
        executor.execute(actions.Publish(version))
        assert isinstance(next_event(executor), events.Published)
    assert executor.engine_pool.digests[0] == executor.engine_pool.digests[1]
    executor.execute(actions.Train(0, (good,)))
    trained = next_event(executor)
    assert isinstance(trained, events.Trained)
    assert trained.step == 0


def test_a_step_that_fails_too_often_ends_the_run(executor: ProcessExecutor) -> None:
    bad = store_group(executor, GroupId(0, 2), 10**6)
    for _ in range(2):
        executor.execute(actions.Train(0, (bad,)))
        assert isinstance(next_event(executor), events.StepFailed)
    executor.execute(actions.Train(0, (bad,)))
    with pytest.raises(RunError, match=r"training step 1 failed: .*; it failed 3 times, the weights"):
        next_event(executor)


def test_an_engine_is_lost_after_the_third_failed_load_in_a_row(executor: ProcessExecutor) -> None:
    join_all(executor)
    for _ in range(2):
        executor.execute(actions.Load(0, 7))
        failed = next_event(executor)
        assert isinstance(failed, events.LoadFailed)
        assert (failed.engine, failed.version) == (0, 7)
    executor.execute(actions.Load(0, 7))
    lost = next_event(executor)
    assert isinstance(lost, events.EngineLost)
    assert lost.reason.startswith("3 weight loads in a row failed")


def test_rewards_of_episodes_are_durable_before_the_event_of_their_score(
    executor: ProcessExecutor, tmp_path: Path
) -> None:
    """Another connection reads what a run leaves that is killed with its next event."""
    group = GroupId(0, 3)
    for sibling, reward in enumerate((1.0, 0.0)):
        request = RequestId(*group, sibling)
        executor.samples.put(Trajectory(request, 0, "digest", [1, 2], [3], [-1.0], reward=reward))
        executor.sample_book.episode_rewards[request] = reward
    executor.samples.commit()
    executor.execute(actions.Score(group))
    assert next_event(executor) == events.GroupScored(group, (1.0, 0.0))
    rows = query(tmp_path, "select state, reward, round(advantage, 3) from samples")
    assert rows == [("scored", 1.0, 0.707), ("scored", 0.0, -0.707)]


def test_a_paused_executor_waits_without_polling(executor: ProcessExecutor) -> None:
    def release() -> None:
        executor.is_paused = False
        executor.wake_up()

    executor.is_paused = True
    threading.Timer(1.0, release).start()
    began_s = time.thread_time()
    executor.next_event(executor.now)  # a timer of the orchestrator is due
    assert time.thread_time() - began_s < 0.3


def test_a_stalled_step_names_what_an_agent_has_to_do(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = start(load.read_config(task, ["service.agents=true"]), tmp_path)
    try:
        assert executor.agent_sessions is not None
        executor.agent_sessions.start(EpisodeId(RequestId(0, 3, 1), 0), version=0)
        requests = (RequestId(0, 3, 0), RequestId(0, 3, 1))
        executor.execute(actions.ReportStall(2, GroupId(0, 3), requests, 7.0))
    finally:
        executor.close()
    line = "step 3 waits for group 0/3 (0/3/0, 0/3/1 needs an agent that opens a session) since 7.0 s"
    assert line in capsys.readouterr().out
