"""Supervise the workers of a run: start, ready, heartbeat, loss, restart with backoff, drain, kill.

A slot is a place in the run, such as that of the second reward worker. Workers fill it one after another. The
owner of a slot (such as the engine pool) decides what its workers do and what happens to their work. This
module alone decides when a worker is lost, and when its successor may start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dora.errors import DoraError, InputError, RunError, WorkerTimeoutError
from dora.runtime.process.messages import Shutdown, WorkerExited, WorkerReady
from dora.runtime.process.worker_process import Target, Worker, WorkerMessages, WorkerState, receive

if TYPE_CHECKING:
    from dora.config.schema import Config

MAX_GAP_S = 1.0  # longest time that counts between two readings of the driver's clock
MIN_SUSPENDED_S = 30.0  # after a longer gap the driver was suspended, which does not show a busy machine
DELAY_MEMORY_S = 60.0  # how long a gap extends heartbeat timeouts
MAX_EXTENSION = 4.0  # of a heartbeat timeout
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0  # before a restart; the delay doubles in between
STABLE_UPTIME_S = 300.0  # after a worker has run for this long, its slot has all restarts again
RESET_FACTOR = 4.0  # after a worker has run for this many times its delay, the delay is reset


class DriverClock:
    """Time in which the driver has been running (s): the only place that knows that it was suspended.

    The driver reads it several times a second. A longer gap between two readings means that the driver could
    not run, as on a laptop that was closed, and counts as MAX_GAP_S.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._read_s, self._ran_s = monotonic, monotonic(), 0.0
        self.delay_s = 0.0  # the longest recent gap
        self._delayed_at_s = 0.0

    @property
    def now_s(self) -> float:
        """Only the driver's thread may read it."""
        before_s, self._read_s = self._read_s, self._monotonic()
        gap_s = self._read_s - before_s
        self._ran_s += min(gap_s, MAX_GAP_S)
        if self.delay_s <= gap_s < MIN_SUSPENDED_S or self._ran_s > self._delayed_at_s + DELAY_MEMORY_S:
            self.delay_s, self._delayed_at_s = gap_s, self._ran_s
        return self._ran_s

    @property
    def extension(self) -> float:
        """Factor of heartbeat timeouts: a machine too busy to run the driver is too busy to run workers."""
        return min(max(1.0, self.delay_s / MAX_GAP_S), MAX_EXTENSION)

    def forget_delays(self) -> None:
        """Count delays from now on."""
        self.delay_s, self._delayed_at_s = 0.0, self._ran_s


class Backoff:
    """Delays before the restarts of a slot, which double, up to a number of restarts in a row.

    With `at_once` only a worker that was lost before it was ready is restarted after a delay.
    """

    def __init__(self, max_restarts: int, *, at_once: bool = False) -> None:
        self.max_restarts, self._at_once = max_restarts, at_once
        self._num_restarts, self.delay_s = 0, MAX_DELAY_S

    @property
    def is_exhausted(self) -> bool:
        """Whether no restarts are left."""
        return self._num_restarts >= self.max_restarts

    def next_delay_s(
        self, uptime_s: float, *, was_ready: bool = True, made_progress: bool = False
    ) -> float | None:
        """The delay (s) before the restart of a worker that ran for `uptime_s`; None if none are left."""
        if made_progress or uptime_s >= STABLE_UPTIME_S:
            self._num_restarts = 0
        if self.is_exhausted:
            return None
        reset_after_s = RESET_FACTOR * max(FIRST_DELAY_S, self.delay_s)
        if self._at_once and was_ready:
            self.delay_s = 0.0
        elif self._num_restarts == 0 or made_progress or uptime_s >= reset_after_s:
            self.delay_s = FIRST_DELAY_S
        else:
            self.delay_s = min(MAX_DELAY_S, max(FIRST_DELAY_S, 2 * self.delay_s))
        self._num_restarts += 1
        return self.delay_s


@dataclass(frozen=True)
class Role:
    """What the workers of one kind have in common."""

    title: str  # completes "The run cannot continue without its"
    heartbeat_key: str = "runtime.heartbeat_timeout_s"
    heartbeat_timeout_s: float = float("inf")  # inf: they send no heartbeats
    restarts_at_once: bool = False  # without delay, if the lost worker was ready


class Slot:
    """A place that one worker at a time fills; the ranks of a trainer fill one together.

    The owner may read all attributes. It sets `made_progress` and `has_task`.
    """

    def __init__(self, owner: Owner, role: Role, max_restarts: int, number: int) -> None:
        self.owner, self.role, self.number = owner, role, number
        self.workers: list[Worker] = []
        self.ready: set[Worker] = set()
        self.name = ""  # of its first worker; kept after a loss
        self.started_s = 0.0
        self.restart_at_s: float | None = None  # when a lost worker is restarted
        self.made_progress = False  # the number of restarts in a row begins again
        # Busy with a task. The owner checks how long it takes, and native code may stop heartbeats meanwhile.
        # Usually the task is the cause of a loss, which is then not counted: the owner limits the attempts.
        self.has_task = False
        self.is_draining = False  # an exit is no loss
        self.has_been_ready = False  # any of its workers
        self.backoff = Backoff(max_restarts, at_once=role.restarts_at_once)

    @property
    def worker(self) -> Worker:
        """The only worker, or the first of several ranks."""
        return self.workers[0]

    @property
    def is_ready(self) -> bool:
        """Whether it is filled and all of its workers are ready."""
        return bool(self.workers) and len(self.ready) == len(self.workers)

    @property
    def not_started(self) -> list[str]:
        """Names of the workers that are not ready yet."""
        return [worker.name for worker in self.workers if worker not in self.ready]


@dataclass(frozen=True)
class Loss:
    """The end of a slot's workers, which have exited."""

    worker: Worker  # the one that was lost first
    reason: str  # begins with its name
    restart_in_s: float | None  # None: it is not restarted
    is_drained: bool  # the worker has exited because `drain` asked it to
    is_timeout: bool  # the worker exceeded a time limit, while its process existed
    error: DoraError  # for an owner that cannot continue without the worker
    has_place: bool = True  # False: it never started, because no place for it was found in time


class Owner(Protocol):
    """What the workers of some slots work for."""

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        """Handle a message of a worker; `WorkerReady` is noted already. May raise RunError."""

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """The slot is empty. Raises `loss.error` if the run cannot continue."""

    def restart(self, slot: Slot) -> None:
        """Fill the slot again: the delay is over."""


class Supervisor:
    """Watches all workers of a run, on whatever machine they are."""

    def __init__(
        self,
        config: Config,
        out: Path,
        messages: WorkerMessages,
        on_own_message: Callable[[Any], object] = lambda message: None,
        check_run: Callable[[], None] = lambda: None,
    ) -> None:
        """`out` is the run's folder, for error messages. `on_own_message` gets messages without a sender.

        `check_run` is called before a loss is handled. It raises RunError if no replacement could work.
        """
        self.clock = DriverClock()
        self._runtime, self._resume_command, self._out = config.runtime, config.resume_command, out
        self.messages, self._on_own_message, self._check_run = messages, on_own_message, check_run
        self._slots: list[Slot] = []
        self._slot_of: dict[Worker, Slot] = {}
        self._started: set[Owner] = set()  # owners that have had a ready worker
        self._checks_starts = False

    # slots and workers

    def add(self, owner: Owner, role: Role, number: int = 0) -> Slot:
        """A new, empty slot, the `number`-th of its owner."""
        self._slots.append(Slot(owner, role, self._runtime.max_restarts, number))
        return self._slots[-1]

    def start(self, slot: Slot, name: str, target: Target, spec: object) -> Worker:
        """Start a worker in a slot. Raises RunError if its process cannot be started."""
        return self.watch(slot, Worker(name, target, spec, self.messages))

    def watch(self, slot: Slot, worker: Worker) -> Worker:
        """Put a worker that has just been started into a slot."""
        worker.heard_s = now_s = self.clock.now_s
        if not slot.workers:
            slot.name, slot.started_s, slot.restart_at_s = worker.name, now_s, None
            slot.made_progress = slot.has_task = False
        slot.workers.append(worker)
        self._slot_of[worker] = slot
        return worker

    def drain(self, slot: Slot) -> None:
        """Ask the workers of a slot to exit once they have finished their work."""
        slot.is_draining = True
        for worker in slot.workers:
            worker.send(Shutdown())

    def end(self, slot: Slot) -> None:
        """Kill the workers of a slot, which is no loss; the owner may fill it again."""
        for worker in slot.workers:
            worker.kill()
            del self._slot_of[worker]
        slot.workers, slot.restart_at_s = [], None
        slot.ready.clear()

    def remove(self, slot: Slot) -> None:
        """End a slot and forget it."""
        self.end(slot)
        self._slots.remove(slot)

    def close(self) -> None:
        """Kill all workers."""
        for slot in self._slots:
            self.end(slot)

    # state

    def not_started(self) -> list[str]:
        """Names of the workers that are not ready yet."""
        return [name for slot in self._slots for name in slot.not_started]

    def check_starts(self) -> None:
        """From now on a worker that is not ready within runtime.start_timeout_s is lost.

        Before, while the run itself starts, its caller checks this limit, and delays of the driver, which
        starts processes, do not show a busy machine.
        """
        self._checks_starts = True
        self.clock.forget_delays()

    def silence_s(self, worker: Worker) -> float:
        """Time since the last message or heartbeat of a worker, as of the last check."""
        return self.clock.now_s - worker.heard_s

    def restarts(self) -> dict[str, float]:
        """Seconds until each lost worker is restarted, by its name."""
        now_s = self.clock.now_s
        return {s.name: max(0.0, s.restart_at_s - now_s) for s in self._slots if s.restart_at_s is not None}

    def states(self, owner: Owner | None = None) -> list[WorkerState]:
        """The state of each worker, or of the workers of one owner."""
        timeouts_s = {False: self._runtime.start_timeout_s}
        return [
            WorkerState(worker, is_ready, timeouts_s.get(is_ready, slot.role.heartbeat_timeout_s))
            for slot in self._slots
            for worker, is_ready in [(worker, worker in slot.ready) for worker in slot.workers]
            if owner in (None, slot.owner)
        ]

    # messages, timeouts, losses

    def poll(self, timeout_s: float = 0.0) -> None:
        """Pass all messages to their owners, waiting up to `timeout_s` for the first, and check the slots.

        Raises what the owners raise: InputError or RunError, if the run cannot continue.
        """
        for worker, message in receive(self.messages, timeout_s):
            if worker is None:
                self._on_own_message(message)
            elif worker in self._slot_of:  # else the worker is lost: ignore what it sent before
                self._on_message(worker, self._slot_of[worker], message)
        self.check()

    def check(self) -> None:
        """Find workers that have timed out, and restart those whose delay is over."""
        now_s = self.clock.now_s
        for slot in [*self._slots]:
            self._check_slot(slot, now_s)
            if slot.restart_at_s is not None and now_s >= slot.restart_at_s:
                slot.restart_at_s = None
                slot.owner.restart(slot)

    def report_lost(
        self, slot: Slot, reason: str, worker: Worker | None = None, *, is_timeout: bool = False
    ) -> None:
        """Kill the workers of a slot, one of which is lost, and schedule their restart.

        Reports about an empty slot are ignored. Raises what the owner raises.
        """
        if not slot.workers:
            return
        self._check_run()
        worker = worker or slot.worker
        was_started, was_ready = slot.owner in self._started, slot.is_ready
        has_place = not (is_timeout and worker not in slot.ready and worker.process.waiting_for)
        self.end(slot)
        delay_s: float | None = None
        if was_started and not slot.is_draining and (has_place or slot.has_been_ready):
            delay_s = self._next_delay_s(slot, was_ready)
        slot.restart_at_s = None if delay_s is None else self.clock.now_s + delay_s
        fatal = self._error(slot, reason, worker, WorkerTimeoutError if is_timeout else RunError, was_started)
        loss = Loss(worker, reason, delay_s, slot.is_draining, is_timeout, fatal, has_place)
        slot.owner.on_lost(slot, loss)

    def _on_message(self, worker: Worker, slot: Slot, message: Any) -> None:
        if isinstance(message, WorkerExited):
            self.report_lost(slot, worker.exit_reason, worker)
            return
        if isinstance(message, WorkerReady):
            slot.ready.add(worker)
            slot.has_been_ready = True
            self._started.add(slot.owner)
        slot.owner.on_message(slot, worker, message)

    def _check_slot(self, slot: Slot, now_s: float) -> None:
        for worker in slot.workers:
            if worker.has_sent:
                worker.has_sent, worker.heard_s = False, now_s
        timeout_s, extension = slot.role.heartbeat_timeout_s, self.clock.extension
        silent = [worker for worker in slot.workers if now_s - worker.heard_s > timeout_s * extension]
        silent = [worker for worker in silent if worker in slot.ready]
        if silent and not slot.has_task:
            limit = f"{slot.role.heartbeat_key} = {timeout_s:g} s"
            if extension > 1.0:
                cause = f"because the driver itself was {self.clock.delay_s:.1f} s late"
                limit += f" (extended to {timeout_s * extension:.0f} s, {cause})"
            reason = f"{silent[0].name} sent no heartbeat for more than {limit}"
            self.report_lost(slot, reason, silent[0], is_timeout=True)
        elif self._checks_starts and slot.not_started:
            start_timeout_s = self._runtime.start_timeout_s
            if now_s > slot.started_s + start_timeout_s:
                limit = f"runtime.start_timeout_s = {start_timeout_s:g} s"
                late = next(worker for worker in slot.workers if worker not in slot.ready)
                waiting_for = late.process.waiting_for
                problem = f"got no place on {waiting_for}" if waiting_for else "not ready"
                reason = f"{', '.join(slot.not_started)} {problem} within {limit}"
                self.report_lost(slot, reason, late, is_timeout=True)

    def _next_delay_s(self, slot: Slot, was_ready: bool) -> float | None:
        if slot.has_task and was_ready:
            return 0.0
        uptime_s, made_progress = self.clock.now_s - slot.started_s, slot.made_progress
        return slot.backoff.next_delay_s(uptime_s, was_ready=was_ready, made_progress=made_progress)

    def _error(
        self, slot: Slot, reason: str, worker: Worker, error: type[RunError], was_started: bool
    ) -> DoraError:
        if not was_started and worker.input_error:
            return InputError(worker.input_error)
        if not was_started:
            return error(f"{reason}\n{worker.traceback}".rstrip())
        limit, max_restarts = "", slot.backoff.max_restarts
        if max_restarts and slot.backoff.is_exhausted:
            times = f"runtime.max_restarts = {max_restarts} times in a row"
            limit = f"; it has no restarts left (it was restarted {times})"
        return error(
            f"{reason}{limit}. The run cannot continue without its {slot.role.title}. Resume the run: "
            f"{self._resume_command} {self._out}\n{worker.traceback}".rstrip()
        )
