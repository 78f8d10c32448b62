"""The storage of the sample stream as a process of its own, as the driver sees it; another one replaces it.

On Ray it is an actor on the driver's node. It begins empty each time, and the driver tells it what
`samples.sqlite` has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from dora.config.schema import Config
from dora.core.types import GroupId
from dora.errors import RunError, StorageFullError, StreamError
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import (
    RestartPolicy,
    StartProcess,
    Worker,
    WorkerInbox,
    WorkerMessages,
    WorkerOutbox,
    WorkerState,
    receive,
)
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest
from dora.stream.run_stream import DRIVER_TIMEOUT_S, StorageSpec, fill, remote_address
from dora.stream.schema import BlockPacker, ColumnData, StreamBatch, TimedOut

POLL_S = 0.2
_PLACE = 0  # a run has one storage


def run_storage(outbox: WorkerOutbox, inbox: WorkerInbox, spec: StorageSpec) -> None:
    """Serve the stream until the process is ended; `inbox` ends it with the driver."""
    server = spec.open()
    outbox.start_heartbeat()
    outbox.send(m.StorageReady(remote_address(server)))
    server.run()


class StorageProcess:
    """A `StreamStorage`: its process of the day, which speaks to this object alone."""

    is_replaceable = True

    def __init__(
        self, spec: StorageSpec, config: Config, start: StartProcess, notice: Callable[[str], None]
    ) -> None:
        """Return once it is there. Raises RunError if it does not come."""
        runtime = config.runtime
        self._spec, self._notice, self._told = spec, notice, WorkerMessages(start)
        self.timeout_s, self._start_timeout_s = runtime.heartbeat_timeout_s, runtime.start_timeout_s
        self._restarts = RestartPolicy(runtime.max_restarts)
        self._begin()
        while not self.poll(POLL_S):
            pass

    def _begin(self) -> None:
        self.remote: tuple[str, str] | None = None
        self.is_available, self._is_lost = False, False
        self._started_s = time.monotonic()
        self._worker = Worker("storage", run_storage, self._spec, self._told)

    @property
    def due_s(self) -> float | None:
        """When another one takes the place of a lost one (s, time.monotonic)."""
        return self._restarts.due_s.get(_PLACE)

    def state(self) -> WorkerState:
        """What is known of its process."""
        return WorkerState(
            self._worker, self.is_available, self.timeout_s if self.is_available else self._start_timeout_s
        )

    def poll(self, wait_s: float = 0.0, asleep_s: float = 0.0) -> bool:
        """Whether one is there since the last look, and so has nothing. Looks at deadlines, our own sleep
        left out, and starts another one when its time has come. Raises RunError if there is to be none.
        """
        self._started_s += asleep_s
        self._worker.last_message_s += asleep_s
        was_there = self.is_available
        for worker, message in receive(self._told, wait_s):
            if worker is not self._worker or self._is_lost:
                continue
            if isinstance(message, m.StorageReady):
                self.remote, self.is_available = message.remote, True
            elif isinstance(message, m.WorkerExited):
                self.report_lost(self._worker.exit_reason)
        now_s = time.monotonic()
        if self.is_available and self._worker.has_timed_out(self.timeout_s):
            limit = f"runtime.heartbeat_timeout_s = {self.timeout_s:g} s"
            self.report_lost(f"the storage was silent for more than {limit}")
        elif not (self.is_available or self._is_lost) and now_s > self._started_s + self._start_timeout_s:
            self.report_lost(
                f"the storage did not start within runtime.start_timeout_s = {self._start_timeout_s:g} s"
            )
        if self._restarts.pop_due(now_s):
            self._begin()
        return self.is_available and not was_there

    def report_lost(self, reason: str) -> None:
        """It is gone, or does not answer. Raises RunError once it was replaced too often.

        Who finds out later finds nothing new.
        """
        if self._is_lost:
            return
        self._end()
        self.is_available, self._is_lost = False, True
        now_s = time.monotonic()
        wait_s = self._restarts.on_lost(_PLACE, _PLACE, now_s - self._started_s, now_s)
        if wait_s is None:
            most = f"started again runtime.max_restarts = {self._restarts.max_restarts} times"
            raise RunError(
                f"the sample stream has no storage any more: {reason}; it was {most}; go on with --resume"
            )
        self._notice(
            f"the storage of the sample stream is lost ({reason}); another one begins in {wait_s:g} s"
        )

    def close(self) -> None:
        self._worker.kill()

    def _end(self) -> None:
        """At once, also one that is stopped: Ray takes seconds, and its clients would wait for so long."""
        if self._worker.is_alive and self._worker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._worker.pid, signal.SIGKILL)
        self._worker.kill()


# === dora.runtime.process.stream_workers: A task's side of the sample stream: take rows, make columns of them, fill the columns in.
#
# Data goes through the stream. The pipe to the driver has words only: at which groups the worker is, and
# which it cannot do. What a worker has on lease when it dies is handed to another.

GET_TIMEOUT_S = 60.0  # for the next rows; then they are asked for again


class TaskError(Exception):
    """A task cannot do the rows it was given: the groups fail as `reason`; `detail` is for a person."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


class ConsumerTask(Protocol):
    """What one task does, in a process of its own."""

    def process(self, batch: StreamBatch) -> ColumnData:
        """The task's columns for all rows of the batch, which may be read until it returns.

        Raises NoResult, or whatever it likes: then each group of the batch is tried alone, and fails alone.
        """


@dataclass(frozen=True)
class ConsumerSpec:
    """What a worker needs: its consumer's name, the stream's folder, and how to `make` its work.

    `make` must be picklable; it is called in the worker with a function that starts the time of a call
    anew, for work that is many calls. `want` says how much is taken at once. On another machine the stream is
    at the TCP endpoint `far`, which comes with its token.
    """

    name: str
    stream_folder: Path
    make_task: Callable[[Callable[[], None]], ConsumerTask]
    batch_request: BatchRequest
    remote: tuple[str, str] | None = None

    def open_stream(self) -> StreamClient:
        """A client of the stream, from wherever this is called. Raises RunError."""
        endpoint, token = self.remote or (transport.stream_endpoint(self.stream_folder), "")
        return StreamClient(endpoint, DRIVER_TIMEOUT_S, token)


def run_consumer(outbox: WorkerOutbox, inbox: WorkerInbox, spec: ConsumerSpec) -> None:
    """Serve the consumer until the process is ended; `inbox` ends it with the driver."""
    outbox.start_heartbeat()
    place = _Place(spec.name, outbox)
    work = spec.make_task(place.still)
    while True:
        try:
            with spec.open_stream() as client:
                outbox.send(m.WorkerReady(client_id=client.client_id))
                _serve_all(spec, work, client, place)
        except StorageFullError as error:
            outbox.send(m.StreamFull(str(error)))
            return
        except RunError:  # the storage has ended: another one takes its place, or the run ends
            place.go(())


class _Place:
    """Where the worker is, as the driver is told."""

    def __init__(self, name: str, outbox: WorkerOutbox) -> None:
        self._name, self._outbox = name, outbox
        self._groups: tuple[GroupId, ...] = ()

    def go(self, groups: tuple[GroupId, ...]) -> None:
        self._groups = groups
        self.still()

    def still(self) -> None:
        self._outbox.send(m.TaskStarted(self._groups))

    def give_up(self, error: Exception) -> None:
        if isinstance(error, TaskError):
            reason, detail = error.reason, error.detail
        else:
            reason = f"{self._name} raised {type(error).__name__}"
            detail = "".join(traceback.format_exception(error))
        self._outbox.send(m.TaskFailed(self._groups, reason, detail))


def _serve_all(spec: ConsumerSpec, work: ConsumerTask, client: StreamClient, place: _Place) -> NoReturn:
    """Until it cannot be done any more: raises RunError."""
    while True:
        batch = client.get(spec.name, spec.batch_request, GET_TIMEOUT_S)
        if not isinstance(batch, TimedOut):
            _serve(spec, work, client, batch, place)
            place.go(())


def _serve(
    spec: ConsumerSpec, work: ConsumerTask, client: StreamClient, batch: StreamBatch, place: _Place
) -> None:
    """Fill, then commit: who dies in between only has it done once more, and that comes too late to count.

    Raises StorageFullError; then its rows are still on lease, and go to another when the client leaves.
    """
    groups = tuple(dict.fromkeys(batch.groups))
    place.go(groups)
    try:
        columns = work.process(batch)
        BlockPacker(client.fields, columns, len(batch))  # columns that do not fit are the task's failure, too
    except Exception as error:
        if len(groups) > 1:
            _serve_alone(spec, work, client, batch, place)
            return
        place.give_up(error)
    else:
        with contextlib.suppress(StreamError):  # the group has ended meanwhile, or somebody was faster
            fill(client, spec.stream_folder, batch.indices, columns, place.still)
    with contextlib.suppress(StreamError):  # the lease has ended
        client.commit(batch)


def _serve_alone(
    spec: ConsumerSpec, work: ConsumerTask, client: StreamClient, batch: StreamBatch, place: _Place
) -> None:
    """One group after the other, so that only those fail that must."""
    groups = dict.fromkeys(batch.groups)
    with contextlib.suppress(StreamError):
        client.release(batch)
    for group in groups:
        alone = client.get(spec.name, BatchRequest(groups=(group,)), 0.0)
        if not isinstance(alone, TimedOut):  # somebody else may have taken it
            _serve(spec, work, client, alone, place)
