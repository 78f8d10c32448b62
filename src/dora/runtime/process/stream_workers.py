"""Workers of the sample stream: the storage process, and the consumers that score its groups.

Samples go through the stream only. Control messages name groups, and have one number for each sample. On Ray
the storage is an actor on the driver's node.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dora.core.types import GroupId
from dora.curve import CurveAddress
from dora.errors import RunError, StreamError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import Worker, WorkerInbox, WorkerOutbox, WorkerState
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest
from dora.stream.run_stream import DRIVER_TIMEOUT_S, StorageSpec, remote_address
from dora.stream.schema import StreamBatch, TimedOut

if TYPE_CHECKING:
    from dora.config.schema import Config

POLL_S = 0.2
GET_TIMEOUT_S = 60.0  # of one request for rows; it is repeated
REPORT_INTERVAL_S = 0.1  # between two reports that restart the timeout of a call


def run_storage(outbox: WorkerOutbox, inbox: WorkerInbox, spec: StorageSpec) -> None:
    """Serve the stream until the process is killed; `inbox` exits with the driver."""
    server = spec.open()
    outbox.start_heartbeat()
    outbox.send(m.WorkerReady(remote=remote_address(server)))
    server.run()


class StorageProcess:
    """A `StreamStorage` in a worker process, which is restarted when it is lost.

    A restarted storage is empty: the driver sends it the content of `samples.sqlite`.
    """

    def __init__(
        self, spec: StorageSpec, supervisor: Supervisor, config: Config, notice: Callable[[str], None]
    ) -> None:
        """Start the process and wait until it serves the stream. Raises RunError if it does not start."""
        self._spec, self._supervisor, self._notice = spec, supervisor, notice
        self.timeout_s, start_timeout_s = config.runtime.heartbeat_timeout_s, config.runtime.start_timeout_s
        self._slot = supervisor.add(self, Role("sample stream", heartbeat_timeout_s=self.timeout_s))
        self.remote: CurveAddress | None = None
        self._is_replaced = False
        self.restart(self._slot)
        clock, started_s = supervisor.clock, supervisor.clock.now_s
        while not self.is_available:
            supervisor.poll(POLL_S)
            if clock.now_s > started_s + start_timeout_s:
                limit = f"runtime.start_timeout_s = {start_timeout_s:g} s"
                raise RunError(f"the storage of the sample stream did not start within {limit}")
        self._is_replaced = False

    @property
    def is_available(self) -> bool:
        """Whether the storage serves requests; if not, a replacement is starting."""
        return self._slot.is_ready

    def connect(self) -> StreamClient:
        """A client of the current process. Raises RunError."""
        return StreamClient(transport.stream_endpoint(self._spec.folder), self.timeout_s)

    def take_replaced(self) -> bool:
        """Whether the storage has been replaced since the last call, by an empty one."""
        is_replaced, self._is_replaced = self._is_replaced and self.is_available, False
        return is_replaced

    def states(self) -> list[WorkerState]:
        """The state of its process, if there is one now."""
        return self._supervisor.states(self)

    def check(self) -> None:
        """The supervisor checks the process."""

    def report_lost(self, reason: str) -> None:
        """Report that the storage does not reply; later reports are ignored.

        Raises RunError if there are no restarts left.
        """
        self._supervisor.report_lost(self._slot, reason)

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        if isinstance(message, m.WorkerReady):
            self.remote, self._is_replaced = message.remote, True

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """Raises RunError if there are no restarts left."""
        if loss.restart_in_s is None:
            raise loss.error
        self._notice(
            f"the storage of the sample stream is lost ({loss.reason}); restarting it in "
            f"{loss.restart_in_s:g} s"
        )

    def restart(self, slot: Slot) -> None:
        self._supervisor.start(slot, "storage", run_storage, self._spec)

    def close(self) -> None:
        self._supervisor.end(self._slot)


class TaskError(Exception):
    """A task failed for the rows of a batch, for `reason`; `detail` is for the user."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


class ConsumerTask(Protocol):
    """What a consumer computes."""

    def process(self, batch: StreamBatch) -> Sequence[float]:
        """One number for each row. The batch may be read until this returns.

        If it raises TaskError or any other exception, each group of the batch is processed alone.
        """


@dataclass(frozen=True)
class ConsumerSpec:
    """A worker that processes rows of the stream."""

    name: str  # of the consumer
    stream_folder: Path
    # Picklable. Called in the worker, with a function that restarts the timeout of the current call.
    make_task: Callable[[Callable[[], None]], ConsumerTask]
    batch_request: BatchRequest
    remote: CurveAddress | None = None  # of a stream on another machine

    def open_stream(self) -> StreamClient:
        """A client of the stream. Raises RunError."""
        return StreamClient(self.remote or transport.stream_endpoint(self.stream_folder), DRIVER_TIMEOUT_S)


def run_consumer(outbox: WorkerOutbox, inbox: WorkerInbox, spec: ConsumerSpec) -> None:
    """Process rows, and send the results, until the process is killed; `inbox` exits with the driver."""
    outbox.start_heartbeat()
    reporter = TaskReporter(spec.name, outbox)
    task = spec.make_task(reporter.restart_timeout)
    while True:
        try:
            with spec.open_stream() as client:
                outbox.send(m.WorkerReady(client_id=client.client_id))
                _Consumer(spec, task, client, reporter).run()
        except RunError:  # the storage is lost: connect to its replacement, or the run ends
            reporter.start(())


class TaskReporter:
    """Reports to the driver which groups the worker processes."""

    def __init__(self, name: str, outbox: WorkerOutbox) -> None:
        self._name, self._outbox = name, outbox
        self._groups: tuple[GroupId, ...] = ()
        self._reported_s = 0.0

    def start(self, groups: tuple[GroupId, ...]) -> None:
        self._groups, self._reported_s = groups, time.monotonic()
        self._outbox.send(m.TaskStarted(groups))

    def restart_timeout(self) -> None:
        """Fast calls share a report."""
        if time.monotonic() >= self._reported_s + REPORT_INTERVAL_S:
            self.start(self._groups)

    def complete(self, values: Mapping[GroupId, tuple[float, ...]]) -> None:
        self._outbox.send(m.TaskCompleted(values))

    def fail(self, error: Exception) -> None:
        if isinstance(error, TaskError):
            reason, detail = error.reason, error.detail
        else:
            reason = f"{self._name} raised {type(error).__name__}"
            detail = "".join(traceback.format_exception(error))
        self._outbox.send(m.TaskFailed(self._groups, reason, detail))


class _Consumer:
    """Processes batches with one connection to the stream."""

    def __init__(
        self, spec: ConsumerSpec, task: ConsumerTask, client: StreamClient, reporter: TaskReporter
    ) -> None:
        self._spec, self._task, self._client, self._reporter = spec, task, client, reporter

    def run(self) -> NoReturn:
        """Process batches until the storage is lost. Raises RunError."""
        done: StreamBatch | None = None
        while True:
            batch = self._client.get(self._spec.name, self._spec.batch_request, GET_TIMEOUT_S, done)
            done = None
            if not isinstance(batch, TimedOut):
                self._process(batch)
                done = batch

    def _process(self, batch: StreamBatch) -> None:
        """Send the result, which the caller commits: after a crash in between the work is repeated, and its
        result is ignored.
        """
        groups = tuple(dict.fromkeys(batch.groups))
        self._reporter.start(groups)
        try:
            values = self._task.process(batch)
            by_group: dict[GroupId, tuple[float, ...]] = dict.fromkeys(groups, ())
            for group, value in zip(batch.groups, values, strict=True):
                by_group[group] += (value,)
        except Exception as error:
            if len(groups) > 1:
                self._process_groups(batch)
                return
            self._reporter.fail(error)
            self._reporter.start(())
        else:
            self._reporter.complete(by_group)

    def _process_groups(self, batch: StreamBatch) -> None:
        """Process each group of a failed batch alone, so that only the failing ones fail."""
        groups = dict.fromkeys(batch.groups)
        with suppress(StreamError):
            self._client.release(batch)
        for group in groups:
            rows = self._client.get(self._spec.name, BatchRequest(groups=(group,)), 0.0)
            if not isinstance(rows, TimedOut):  # otherwise another worker has leased the group
                self._process(rows)
                with suppress(StreamError):  # the lease has expired
                    self._client.commit(rows)
        self._reporter.start(())
