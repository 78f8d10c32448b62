"""The storage of the sample stream as a worker process; on Ray it is an actor on the driver's node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora.curve import CurveAddress
from dora.errors import RunError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import Worker, WorkerInbox, WorkerOutbox, WorkerState
from dora.stream.client import StreamClient
from dora.stream.run_stream import StorageSpec

if TYPE_CHECKING:
    from dora.config.schema import Config

POLL_S = 0.2


def run_storage(outbox: WorkerOutbox, inbox: WorkerInbox, spec: StorageSpec) -> None:
    """Serve the stream until the process is killed; `inbox` exits with the driver."""
    server = spec.open()
    outbox.start_heartbeat()
    outbox.send(m.WorkerReady(remote=server.remote))
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
        self._timeout_s, start_timeout_s = config.runtime.heartbeat_timeout_s, config.runtime.start_timeout_s
        self._slot = supervisor.add(self, Role("sample stream", heartbeat_timeout_s=self._timeout_s))
        self.remote: CurveAddress | None = None
        self._is_replaced = False
        self.restart(self._slot)
        clock, started_s = supervisor.clock, supervisor.clock.now_s
        while not self._slot.is_ready:
            supervisor.poll(POLL_S)
            if clock.now_s > started_s + start_timeout_s:
                limit = f"runtime.start_timeout_s = {start_timeout_s:g} s"
                raise RunError(f"the storage of the sample stream did not start within {limit}")
        self._is_replaced = False

    @property
    def is_available(self) -> bool:
        """Whether the storage serves requests; if not, a replacement is starting, or is not taken yet."""
        return self._slot.is_ready and not self._is_replaced

    def connect(self) -> StreamClient:
        """A client of the current process. Raises RunError."""
        return StreamClient(self._spec.folder, self._timeout_s)

    def take_replaced(self) -> bool:
        """Whether the storage has been replaced since the last call, by an empty one.

        Until then it is not available: a call on the connection to the old storage would report the loss of
        the new one.
        """
        if not (self._is_replaced and self._slot.is_ready):
            return False
        self._is_replaced = False
        return True

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
