"""When the supervisor declares a worker lost, when it restarts it, and what it reports to the owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.fake_process import FakeLauncher, FakeProcess

from dora.config import load
from dora.errors import InputError, RunError, WorkerTimeoutError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import (
    DELAY_MEMORY_S,
    FIRST_DELAY_S,
    MAX_DELAY_S,
    RESET_FACTOR,
    STABLE_UPTIME_S,
    Backoff,
    DriverClock,
    Loss,
    Role,
    Slot,
    Supervisor,
)
from dora.runtime.process.worker_process import Worker, WorkerMessages

ROLE = Role("helpers", heartbeat_timeout_s=5.0)


class Helpers:
    """An owner that records messages and losses; its workers are called "helper 0", "helper 1", ..."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self.num_started = supervisor, 0
        self.messages: list[object] = []
        self.losses: list[Loss] = []

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        self.messages.append(message)

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        self.losses.append(loss)

    def restart(self, slot: Slot) -> None:
        self.supervisor.start(slot, f"helper {self.num_started}", lambda *_: None, None)
        self.num_started += 1


class Driver:
    """A driver that polls every 0.2 s of a time that passes only in `run` and `sleep`."""

    def __init__(self, task: Path, role: Role = ROLE, num_workers: int = 1) -> None:
        self.monotonic_s = 1000.0
        self.launcher, config = FakeLauncher(), load.read_config(task, ["runtime.max_restarts=3"])
        self.supervisor = Supervisor(config, Path("runs/a"), WorkerMessages(self.launcher.start))
        self.supervisor.clock = DriverClock(lambda: self.monotonic_s)
        self.owner = Helpers(self.supervisor)
        self.slot = self.supervisor.add(self.owner, role)
        for _ in range(num_workers):
            self.owner.restart(self.slot)

    @property
    def process(self) -> FakeProcess:
        """The newest one."""
        return self.launcher.processes[-1]

    def emit(self, message: object) -> None:
        """The newest worker sends a message."""
        self.process.emit(message)
        self.supervisor.poll(5.0)

    def kill(self) -> Loss:
        """The newest worker is killed."""
        num_before = len(self.owner.losses)
        self.process.kill()
        while len(self.owner.losses) == num_before:
            self.supervisor.poll(5.0)
        return self.owner.losses[-1]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.monotonic_s += 0.2
            self.supervisor.poll()

    def sleep(self, seconds: float) -> None:
        """The driver's process is suspended."""
        self.monotonic_s += seconds
        self.supervisor.poll()


@pytest.fixture
def driver(task: Path) -> Iterator[Driver]:
    """One worker, which is ready."""
    driver = Driver(task)
    driver.emit(m.WorkerReady())
    yield driver
    driver.supervisor.close()


def test_a_worker_without_heartbeats_is_killed_and_restarted_after_the_delay(driver: Driver) -> None:
    driver.run(4.8)
    assert not driver.owner.losses
    driver.run(0.4)
    (loss,) = driver.owner.losses
    assert loss.reason == "helper 0 sent no heartbeat for more than runtime.heartbeat_timeout_s = 5 s"
    assert (loss.restart_in_s, loss.is_timeout) == (FIRST_DELAY_S, True)
    assert not driver.process.is_alive
    assert driver.supervisor.restarts() == {"helper 0": pytest.approx(FIRST_DELAY_S, abs=0.3)}
    driver.run(0.6)
    assert driver.owner.num_started == 1
    driver.run(0.6)
    assert driver.slot.name == "helper 1"


def test_time_in_which_the_driver_was_suspended_does_not_count(driver: Driver) -> None:
    driver.run(3.0)
    driver.sleep(8 * 3600.0)
    driver.run(0.6)
    assert not driver.owner.losses
    driver.run(1.0)
    assert len(driver.owner.losses) == 1


def test_delays_of_the_driver_extend_heartbeat_timeouts(driver: Driver) -> None:
    """A machine too busy to run the driver is too busy to run its workers."""
    driver.sleep(2.0)  # twice as long as a driver takes at most that is on time; counts as MAX_GAP_S
    driver.run(8.6)
    assert not driver.owner.losses
    driver.run(0.8)
    (loss,) = driver.owner.losses
    assert loss.reason == (
        "helper 0 sent no heartbeat for more than runtime.heartbeat_timeout_s = 5 s (extended to 10 s, "
        "because the driver itself was 2.0 s late)"
    )


def test_delays_of_the_driver_extend_heartbeat_timeouts_at_most_fourfold_and_for_a_minute(
    driver: Driver,
) -> None:
    driver.sleep(20.0)
    driver.run(18.6)
    assert not driver.owner.losses
    driver.run(0.8)
    assert len(driver.owner.losses) == 1
    driver.run(DELAY_MEMORY_S)
    driver.emit(m.WorkerReady())
    driver.run(5.4)
    assert len(driver.owner.losses) == 2


def test_delays_while_the_run_starts_extend_no_heartbeat_timeout(driver: Driver) -> None:
    driver.sleep(20.0)
    driver.supervisor.check_starts()
    driver.run(4.6)
    assert len(driver.owner.losses) == 1


def test_the_default_heartbeat_timeout_is_for_busy_machines(task: Path) -> None:
    assert load.read_config(task).runtime.heartbeat_timeout_s == 15.0


def test_replacements_that_exit_before_they_are_ready_are_restarts_with_backoff(driver: Driver) -> None:
    delays = []
    for number in range(3):
        loss = driver.kill()
        assert loss.reason == f"helper {number} was killed by SIGKILL"
        assert loss.restart_in_s is not None
        delays.append(loss.restart_in_s)
        driver.run(loss.restart_in_s + 0.2)
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    last = driver.kill()
    assert last.restart_in_s is None
    assert str(last.error) == (
        "helper 3 was killed by SIGKILL; it has no restarts left (it was restarted runtime.max_restarts = 3 "
        "times in a row). The run cannot continue without its helpers. Resume the run: dora train --resume "
        "runs/a"
    )
    driver.run(100.0)
    assert driver.owner.num_started == 4


def test_a_worker_that_made_progress_leaves_all_restarts_to_the_next(driver: Driver) -> None:
    for _ in range(5):
        driver.slot.made_progress = True
        assert driver.kill().restart_in_s == FIRST_DELAY_S
        driver.run(FIRST_DELAY_S + 0.2)
        driver.emit(m.WorkerReady())


def test_a_worker_lost_with_a_task_is_replaced_at_once_and_does_not_count(driver: Driver) -> None:
    for _ in range(5):
        driver.slot.has_task = True
        driver.run(10.0)  # its owner checks how long a task takes
        assert driver.kill().restart_in_s == 0.0
        driver.supervisor.poll()
        driver.emit(m.WorkerReady())


def test_a_role_may_have_only_workers_that_were_not_ready_wait_for_their_restart(task: Path) -> None:
    driver = Driver(task, Role("helpers", restarts_at_once=True))
    driver.emit(m.WorkerReady())
    assert driver.kill().restart_in_s == 0.0
    driver.supervisor.poll()
    delays = [driver.kill().restart_in_s]
    driver.run(FIRST_DELAY_S + 0.2)
    delays.append(driver.kill().restart_in_s)
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S]
    driver.run(2 * FIRST_DELAY_S + 0.2)
    driver.emit(m.WorkerReady())
    assert driver.kill().restart_in_s is None, "all of these are restarts in a row"


def test_no_worker_is_restarted_before_any_of_its_owner_has_been_ready(task: Path) -> None:
    driver = Driver(task)
    driver.process.emit(m.WorkerCrashed("a traceback", "reward.function: no such file"))
    loss = driver.kill()
    assert loss.restart_in_s is None
    assert isinstance(loss.error, InputError)
    assert str(loss.error) == "reward.function: no such file"


def test_a_worker_that_is_not_ready_in_time_is_lost(driver: Driver) -> None:
    driver.kill()
    driver.run(FIRST_DELAY_S + 0.2)
    driver.run(601.0)
    assert driver.process.is_alive, "the run itself may still be starting"
    driver.supervisor.check_starts()
    driver.supervisor.poll()
    loss = driver.owner.losses[-1]
    assert loss.reason == "helper 1 not ready within runtime.start_timeout_s = 600 s"
    assert isinstance(loss.error, WorkerTimeoutError)
    assert loss.has_place


def test_only_a_replacement_that_gets_no_place_in_time_is_started_again(driver: Driver) -> None:
    driver.supervisor.check_starts()
    driver.kill()
    driver.run(FIRST_DELAY_S + 0.2)
    added = driver.supervisor.add(driver.owner, ROLE)
    driver.owner.restart(added)
    for process in driver.launcher.processes[1:]:
        process.waiting_for = "the cluster"
    driver.run(601.0)
    replacement, first = driver.owner.losses[1:]
    limit = "runtime.start_timeout_s = 600 s"
    assert replacement.reason == f"helper 1 got no place on the cluster within {limit}"
    assert first.reason == f"helper 2 got no place on the cluster within {limit}"
    assert (replacement.has_place, first.has_place) == (False, False)
    assert (replacement.restart_in_s, first.restart_in_s) == (FIRST_DELAY_S, None)


def test_the_workers_of_one_slot_are_lost_together_once(task: Path) -> None:
    driver = Driver(task, num_workers=3)
    driver.emit(m.WorkerReady())
    assert driver.supervisor.not_started() == ["helper 0", "helper 1"]
    driver.kill()
    assert [process.is_alive for process in driver.launcher.processes] == [False] * 3
    driver.supervisor.report_lost(driver.slot, "its steps take too long")
    assert len(driver.owner.losses) == 1


def test_a_message_of_a_lost_worker_is_ignored(driver: Driver) -> None:
    lost = driver.process
    driver.supervisor.report_lost(driver.slot, "its weights are wrong")
    lost.emit("too late")
    driver.supervisor.poll(0.2)
    assert driver.owner.messages == [m.WorkerReady()]


def test_a_drained_worker_is_asked_to_exit_and_is_not_restarted(driver: Driver) -> None:
    driver.supervisor.drain(driver.slot)
    assert driver.process.received.get(timeout=5.0) == m.Shutdown()
    loss = driver.kill()
    assert (loss.is_drained, loss.restart_in_s) == (True, None)


def test_an_owner_that_cannot_go_on_raises_the_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(slot: Slot, loss: Loss) -> None:
        raise loss.error

    monkeypatch.setattr(driver.owner, "on_lost", fail)
    with pytest.raises(RunError, match=r"wrong. The run cannot continue without its helpers. Resume the run"):
        driver.supervisor.report_lost(driver.slot, "its weights are wrong")


def test_an_uptime_much_longer_than_the_delay_resets_the_delay() -> None:
    backoff = Backoff(max_restarts=9)
    delays = [backoff.next_delay_s(uptime_s) for uptime_s in (1.0, 1.0, 1.0, RESET_FACTOR * 4, 0.0)]
    assert delays == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]


def test_a_stable_worker_gives_its_slot_all_restarts_back() -> None:
    backoff = Backoff(max_restarts=1)
    uptimes_s = (1.0, STABLE_UPTIME_S, 1.0)
    assert [backoff.next_delay_s(uptime_s) for uptime_s in uptimes_s] == [FIRST_DELAY_S, FIRST_DELAY_S, None]


def test_no_delay_exceeds_the_maximum() -> None:
    backoff = Backoff(max_restarts=100)
    assert max(backoff.next_delay_s(1.0) or 0.0 for _ in range(100)) == MAX_DELAY_S


def test_a_slot_without_restarts_gets_none() -> None:
    assert Backoff(max_restarts=0).next_delay_s(STABLE_UPTIME_S, made_progress=True) is None
