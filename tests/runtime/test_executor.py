"""What only real processes can do wrong: bytes that change on their way, calls that never return."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.actions import Load, Publish, Score, Train
from dora.core.events import (
    EngineLost,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    ProgressReported,
    Published,
    StepFailed,
    Trained,
)
from dora.core.types import GroupId, RequestId
from dora.errors import RunError
from dora.runtime.control.evaluation import evaluate
from dora.runtime.executor import ProcessExecutor
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import Trajectory


@pytest.fixture
def hands(task: Path, tmp_path: Path) -> Iterator[ProcessExecutor]:
    made = ProcessExecutor(RunSetup.make(load.read_config(task), tmp_path), notice=print)
    made.wait_until_ready()
    yield made
    made.close()


def hear(hands: ProcessExecutor) -> Event:
    fact = hands.next_event(hands.now + 30)
    assert fact is not None
    return fact


def test_an_engine_that_holds_other_bytes_than_the_published_ones_is_lost(hands: ProcessExecutor) -> None:
    hands.execute(Publish(0))
    assert isinstance(hear(hands), Published)
    hands.execute(Load(0, 0))
    assert isinstance(hear(hands), Loaded)
    stored = hands.weights.folder / "0.f32"
    stored.write_bytes(bytes(stored.stat().st_size))
    hands.execute(Load(1, 0))
    assert hear(hands) == EngineLost(1, "its bytes of version 0 are not the published ones")
    assert hands.engines == [0]
    hands.execute(Load(1, 0))  # an order to an engine that is lost goes nowhere
    psutil.Process(hands.engine_pool.workers[0].pid).kill()
    assert hear(hands) == EngineLost(0, "engine 0 was killed by SIGKILL")
    with pytest.raises(RunError, match="the last engine is lost: engine 0 was killed by SIGKILL"):
        hear(hands)


def store_group(hands: ProcessExecutor, group: GroupId, token: int) -> GroupId:
    """A scored group whose answers repeat one token."""
    for sibling in range(2):
        request = RequestId(*group, sibling)
        hands.samples.put(Trajectory(request, 0, "digest", [1, 2], [token] * 3, [-1.0] * 3))
    hands.samples.score(group, (1.0, 0.0), [1.0, -1.0])
    return group


def test_a_step_that_fails_changes_nothing_and_may_be_tried_again(hands: ProcessExecutor) -> None:
    good, bad = (store_group(hands, GroupId(0, row), token) for row, token in ((1, 3), (2, 10**6)))
    for version in (0, 1):
        hands.execute(Train(0, (good, bad)))
        failed = hear(hands)
        assert isinstance(failed, StepFailed)
        assert failed.step == 0
        assert "Error: " in failed.reason
        hands.execute(Publish(version))
        assert isinstance(hear(hands), Published)
    assert hands.engine_pool.digests[0] == hands.engine_pool.digests[1]
    hands.execute(Train(0, (good,)))
    trained = hear(hands)
    assert isinstance(trained, Trained)
    assert trained.step == 0


def test_a_step_that_fails_too_often_ends_the_run(hands: ProcessExecutor) -> None:
    bad = store_group(hands, GroupId(0, 2), 10**6)
    for _ in range(2):
        hands.execute(Train(0, (bad,)))
        assert isinstance(hear(hands), StepFailed)
    hands.execute(Train(0, (bad,)))
    with pytest.raises(RunError, match=r"training step 1 failed: .*; it failed 3 times and changed nothing"):
        hear(hands)


def test_an_engine_that_cannot_load_is_lost_after_the_third_time(hands: ProcessExecutor) -> None:
    for _ in range(2):
        hands.execute(Load(0, 7))
        failed = hear(hands)
        assert isinstance(failed, LoadFailed)
        assert (failed.engine, failed.version) == (0, 7)
    hands.execute(Load(0, 7))
    lost = hear(hands)
    assert isinstance(lost, EngineLost)
    assert lost.reason.startswith("3 loads in a row failed")


def test_what_an_episode_earned_is_durable_before_its_group_is_called_scored(
    hands: ProcessExecutor, tmp_path: Path
) -> None:
    """Whoever reads the file now sees what would be left of a run that is killed with the next fact."""
    group = GroupId(0, 3)
    for sibling, reward in enumerate((1.0, 0.0)):
        request = RequestId(*group, sibling)
        hands.samples.put(Trajectory(request, 0, "digest", [1, 2], [3], [-1.0], reward=reward))
        hands.sample_book.episode_rewards[request] = reward
    hands.samples.commit()
    hands.execute(Score(group))
    assert hear(hands) == GroupScored(group, (1.0, 0.0))
    with sqlite3.connect(tmp_path / "samples.sqlite") as db:
        rows = db.execute("select state, reward, round(advantage, 3) from samples").fetchall()
    assert rows == [("scored", 1.0, 0.707), ("scored", 0.0, -0.707)]


def test_a_run_that_is_held_waits_without_work(hands: ProcessExecutor) -> None:
    def release() -> None:
        hands.is_paused = False
        hands.wake_up()

    hands.is_paused = True
    threading.Timer(1.0, release).start()
    began_s = time.thread_time()
    hands.next_event(hands.now)  # the timer of the orchestrator has run out, and nobody may be told
    assert time.thread_time() - began_s < 0.3


def test_evaluation_leaves_no_fact_of_a_slow_engine_behind(tmp_path: Path) -> None:
    held_out = [f"eval.path={tmp_path / 'prompts.jsonl'}", "eval.num_prompts=1"]
    config = load.read_config(write_task(tmp_path), held_out)
    hands = ProcessExecutor(RunSetup.make(config, tmp_path), notice=print)
    try:
        hands.wait_until_ready()
        hands.execute(Publish(0))
        assert isinstance(hear(hands), Published)
        slow = psutil.Process(hands.engine_pool.workers[1].pid)
        slow.suspend()
        resumed = threading.Timer(1.0, slow.resume)
        resumed.start()
        assert evaluate(hands, 0, {}) is not None
        resumed.join()
        left = hands.next_event(hands.now + 0.5)
        assert left is None or (isinstance(left, ProgressReported) and not left.lengths)
    finally:
        hands.close()
