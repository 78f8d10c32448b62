"""An engine that never got a place in the cluster is not lost: the orchestrator never knew it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.runtime.fake_process import FakeLauncher

from dora.config import load
from dora.core.actions import Migrate
from dora.core.events import EngineJoined, EngineLost, Event, MigrationFailed
from dora.core.types import GroupId, RequestId
from dora.engine.request import Request, SamplingParams
from dora.runtime.process.messages import WorkerReady
from dora.runtime.process.supervisor import DriverClock, Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore

START_TIMEOUT_S = 60.0
END = f"no place on the cluster within runtime.start_timeout_s = {START_TIMEOUT_S:g} s"


class Case:
    """Two engines that have joined; time passes only in `run`."""

    def __init__(self, task: Path, folder: Path, samples: SampleStore) -> None:
        timeouts = [f"runtime.start_timeout_s={START_TIMEOUT_S}", "runtime.heartbeat_timeout_s=1000.0"]
        setup = RunSetup.make(load.read_config(task, timeouts), folder / "run")
        self.launcher, self.monotonic_s = FakeLauncher(), 0.0
        self.events, self.notices = deque[Event](), list[str]()
        self.supervisor = Supervisor(setup.config, setup.out, WorkerMessages(self.launcher.start))
        self.supervisor.clock = DriverClock(lambda: self.monotonic_s)
        book = SampleBook(setup, samples)
        self.pool = EnginePool(setup, folder, self.supervisor, self.events, book, self.notices.append)
        for number, process in enumerate(self.launcher.processes):
            process.emit(WorkerReady(pool=folder / f"pool-{number}", kv_address=f"machine-{number}"))
        while len(self.pool.ready) < 2:
            self.supervisor.poll(5.0)
        self.supervisor.check_starts()
        self.pool.join_all()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.monotonic_s += 1.0
            self.supervisor.poll()

    def kill(self, number: int) -> None:
        """An engine exits."""
        num_before = len(self.pool.workers)
        self.launcher.processes[number].kill()
        while len(self.pool.workers) == num_before:
            self.supervisor.poll(5.0)


@pytest.fixture
def case(task: Path, tmp_path: Path) -> Iterator[Case]:
    with closing(SampleStore(tmp_path / "samples.sqlite")) as samples:
        case = Case(task, tmp_path, samples)
        yield case
        case.supervisor.close()


def test_an_added_engine_without_a_place_ends_and_is_not_started_again(case: Case) -> None:
    assert case.pool.start() == 2
    case.launcher.processes[2].waiting_for = "the cluster"
    case.run(START_TIMEOUT_S + 200.0)
    assert case.pool.end_states == {2: END}
    assert case.notices == [f"engine 2 got {END}; add it again once a node has a place"]
    assert {type(event) for event in case.events} == {EngineJoined}
    assert case.supervisor.restarts() == {}
    assert len(case.launcher.processes) == 3


def test_a_replacement_without_a_place_is_started_again(case: Case) -> None:
    case.kill(1)
    assert case.pool.num_restarting == 1
    case.run(2.0)
    case.launcher.processes[2].waiting_for = "the cluster"
    case.run(START_TIMEOUT_S + 2.0)
    assert case.pool.end_states[2] == END
    retry = "starting engine 3 in place of engine 2"
    assert case.notices[-2:] == [f"engine 2 got {END}; restarting in 1 s", retry]
    case.launcher.processes[3].emit(WorkerReady())
    while 3 not in case.pool.joined:
        case.supervisor.poll(5.0)
    assert [event.engine for event in case.events if isinstance(event, EngineLost)] == [1]
    joined = case.events[-1]
    assert isinstance(joined, EngineJoined)
    assert (joined.engine, joined.replaces) == (3, 1)


def test_outputs_continue_only_on_engines_that_can(case: Case) -> None:
    case.kill(1)
    case.run(2.0)
    case.launcher.processes[2].emit(WorkerReady(continues_outputs=True))
    while 2 not in case.pool.joined:
        case.supervisor.poll(5.0)
    assert [case.pool.continues_outputs(engine) for engine in (0, 2)] == [False, True]


def test_kv_comes_from_the_pool_on_one_node_and_from_the_address_between_two(
    case: Case, tmp_path: Path
) -> None:
    assert case.pool._kv_source(0, 1) == tmp_path / "pool-0"
    case.launcher.processes[1].node = "another"
    assert case.pool._kv_source(0, 1) == "machine-0"
    case.pool._kv_addresses.clear()
    assert case.pool._kv_source(0, 1) is None


def test_a_migration_to_an_engine_whose_loss_is_not_reported_yet_fails(case: Case) -> None:
    """The loss waits for another migration, which the source has not ended."""
    first, second = (
        Request(RequestId(0, 0, k), GroupId(0, 0), (1, 2), 0, k, SamplingParams(1.0, 4)) for k in range(2)
    )
    case.pool.migrate(Migrate(first.id, 0, 1, 0, "a test"), first)
    case.events.clear()
    case.kill(1)
    assert not case.events
    case.pool.migrate(Migrate(second.id, 0, 1, 0, "a test"), second)
    assert [*case.events] == [MigrationFailed(second.id, 0, 1, "an engine is lost")]
