"""Worker processes: start one, exchange messages with it, kill it. `supervisor` watches and restarts them.

Workers of this machine are forked from a server process that has only imported what workers need: they start
at once and share the memory of the imports. `WorkerMessages.start` decides where a worker runs.

Sending never blocks the driver: each worker has a thread that writes to its channel, so one that hangs
delays no other. A channel carries lists of messages, because a wake-up costs more than a message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeVar

import psutil

from dora.errors import InputError
from dora.runtime.process.descendants import kill_descendants, kill_group, lead_group
from dora.runtime.process.messages import Heartbeat, WorkerCrashed, WorkerExited

# One thread per process: with more, workers on the same cores stall one another. Keeping freed memory
# avoids page faults for the activations of each trainer step.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "TOKENIZERS_PARALLELISM": "false",
}

if sys.platform == "linux":
    CONTEXT = multiprocessing.get_context("forkserver")
else:  # macOS system libraries do not survive a fork
    CONTEXT = multiprocessing.get_context("spawn")

HEARTBEAT_S = 1.0
EXIT_CODE_S = 1.0  # wait for the exit code of a process whose channel has ended
MAX_EXIT_CODE_S = 10.0  # the same if the process has ended
UNKNOWN_EXIT_CODE = 255  # what multiprocessing reports once the fork server has exited

T = TypeVar("T")


class Channel(Protocol):
    """Sends and receives lists of messages. Raises EOFError or OSError once it is closed."""

    def send(self, messages: Any, /) -> None:
        """Send a list of messages to the other end."""

    def recv(self) -> Any:
        """Wait for the next list."""


class WorkerOutbox:
    """Sends messages of a worker to the driver, from any of its threads."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, *messages: object) -> None:
        with self._lock:
            self._channel.send(messages)

    def start_heartbeat(self) -> None:
        """Send heartbeats from a thread, for a worker whose main thread is busy for long stretches."""
        threading.Thread(target=self._send_heartbeats, args=(threading.Event(),), daemon=True).start()

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send heartbeats from a thread until the block has ended."""
        ended = threading.Event()
        thread = threading.Thread(target=self._send_heartbeats, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _send_heartbeats(self, ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not ended.is_set():
                self.send(Heartbeat())
                ended.wait(HEARTBEAT_S)


class WorkerInbox:
    """Receives messages of the driver. The process exits once the driver has closed the channel or exited."""

    def __init__(self, channel: Channel, clean_up: Callable[[], object] = lambda: None) -> None:
        """`clean_up` is called before this exit, unless the channel is a pipe."""
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clean_up = clean_up
        self._pipe = channel if isinstance(channel, Connection) else None
        target: Callable[[Any], None] = self._read_channel if self._pipe is None else _exit_at_end
        threading.Thread(target=target, args=(channel,), daemon=True).start()

    def receive(self, timeout_s: float | None = 0.0) -> Iterator[Any]:
        """See the function `receive`."""
        if self._pipe is not None and self._queue.empty():
            self._read_pipe(self._pipe, timeout_s)
            timeout_s = 0.0
        return receive(self._queue, timeout_s)

    def _read_pipe(self, pipe: Connection, timeout_s: float | None) -> None:
        """Without a thread: it costs more to wake one up for a message than to handle the message."""
        try:
            while select.select((pipe,), (), (), timeout_s)[0]:
                for message in pipe.recv():
                    self._queue.put(message)
                timeout_s = 0.0
        except (EOFError, OSError):
            _exit()

    def _read_channel(self, channel: Channel) -> None:
        try:
            while True:
                for message in channel.recv():
                    self._queue.put(message)
        except (EOFError, OSError):
            if not getattr(channel, "is_closed", False):  # by this end, whose last messages are still sent
                self._clean_up()
                _exit()
        except Exception:  # exit: a worker that cannot decode messages must not keep running
            traceback.print_exc()
            self._clean_up()
            _exit(1)


def _exit_at_end(pipe: Connection) -> None:
    """Exit once the driver has closed the pipe, which the main thread may be too busy to read."""
    closed = select.poll()
    closed.register(pipe, 0)
    closed.poll()
    _exit()


def _exit(code: int = 0) -> None:
    try:
        kill_descendants(psutil.Process())
    finally:
        os._exit(code)


Target = Callable[[WorkerOutbox, WorkerInbox, Any], None]


def run_target(
    channel: Channel, target: Target, spec: object, clean_up: Callable[[], object] = lambda: None
) -> None:
    """Run `target` in a worker process; report an exception to the driver as `WorkerCrashed`.

    `clean_up`: see `WorkerInbox`.
    """
    outbox = WorkerOutbox(channel)
    try:
        target(outbox, WorkerInbox(channel, clean_up), spec)
    except Exception as error:
        input_error = str(error) if isinstance(error, InputError) else ""
        with contextlib.suppress(OSError):  # the driver has exited, which is why the worker has failed
            outbox.send(WorkerCrashed(traceback.format_exc(), input_error))


def _run_forked(connection: Connection, target: Target, spec: object) -> None:
    _ignore_sigterm()
    lead_group()
    _leave_fork_server()
    set_mask = partial(signal.pthread_sigmask, mask={signal.SIGTERM})
    os.register_at_fork(
        before=partial(set_mask, signal.SIG_BLOCK),  # until `_reset_fork` has removed the handler
        after_in_parent=partial(set_mask, signal.SIG_UNBLOCK),
        after_in_child=partial(_reset_fork, connection),
    )
    try:
        run_target(connection, target, spec)
    finally:
        kill_descendants(psutil.Process())


def allow_multiprocessing() -> None:
    """Let a user's code use multiprocessing in this worker as in a program of its own.

    Workers are daemons, which may not have children, and multiprocessing would start these from the fork
    server, which cannot import the user's file.
    """
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)


def _reset_fork(connection: Connection) -> None:
    """Close the connection, which a process that a worker forks would keep open: the driver waits for its
    end. SIGTERM ends the process, as pools of processes expect.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    connection.close()


def _leave_fork_server() -> None:
    """Close the pipe that keeps the fork server running: it ends with the driver, also if this worker hangs
    or is suspended, and kills its children.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def preload_workers() -> None:
    """Start the fork server, which imports the modules of workers. Without it each worker imports them
    itself.
    """
    if sys.platform == "linux":
        CONTEXT.set_forkserver_preload(["dora.runtime.process.preload"])
        with _environment(WORKER_ENV), _signals_blocked():
            forkserver.ensure_running()


class ProcessHandle(Channel, Protocol):
    """A worker's process, wherever it runs, and the channel to it."""

    @property
    def pid(self) -> int | None:
        """Process id on its own machine; None until it is known."""

    @property
    def node(self) -> str:
        """The machine it runs on; workers of one node share memory. "": the driver's, or unknown."""

    @property
    def waiting_for(self) -> str:
        """The provider of the slot that the process waits for, such as "the cluster"; "" if it does not
        wait.
        """

    @property
    def is_alive(self) -> bool:
        """False once the process is known to have exited."""

    @property
    def exit_reason(self) -> str:
        """Why the process exited; reads as the end of a sentence that begins with the worker's name."""

    def kill(self) -> None:
        """Kill the process and wait until it has exited."""


class ForkedProcess:
    """A process of this machine behind a pipe."""

    node = waiting_for = ""

    def __init__(self, name: str, target: Target, spec: object) -> None:
        connection, child_end = CONTEXT.Pipe()
        with _environment(WORKER_ENV), _signals_blocked():
            args = (child_end, target, spec)
            self._process = CONTEXT.Process(target=_run_forked, args=args, name=name, daemon=True)
            self._process.start()
        child_end.close()
        self._connection = connection
        self._found: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # it has exited already
            self._found = psutil.Process(self._process.pid)

    def send(self, messages: Any, /) -> None:
        self._connection.send(messages)

    def recv(self) -> Any:
        return self._connection.recv()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive() or self._is_orphan

    @property
    def _is_orphan(self) -> bool:
        """Whether the process still runs after the fork server, which reports its exit code, was killed."""
        if self._process.exitcode != UNKNOWN_EXIT_CODE or self._found is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._found.is_running() and self._found.status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def _has_exited(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._found is not None and self._found.status() == psutil.STATUS_ZOMBIE
        return True

    @property
    def exit_reason(self) -> str:
        self._process.join(timeout=EXIT_CODE_S)
        if self._has_exited:  # a fork server on a busy machine reports the exit code late
            self._process.join(timeout=MAX_EXIT_CODE_S)
        code = self._process.exitcode
        if code == UNKNOWN_EXIT_CODE:
            return f"exited (code {code}, or unknown because the run's fork server was killed)"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """As in `ProcessHandle`, with all processes that it has started."""
        if self._found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._found.suspend()  # it starts no more processes
            kill_descendants(self._found)
            kill_group(self._found.pid)
        self._process.kill()
        self._process.join(timeout=5.0)
        if self._is_orphan and self._found is not None:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                self._found.kill()
                self._found.wait(timeout=5.0)


class Launcher:
    """Starts worker processes on this machine; a subclass also starts them on others."""

    host: str | None = None  # the address at which processes of other machines reach this one
    draining_nodes: frozenset[str] = frozenset()  # will be removed, as `ProcessHandle.node` names them
    num_free_slots = 0  # how many more engines could start now

    def find_shortage(self, num_engines: int) -> str:
        """What is missing for this many more engines, and the remedy; "" if they may get a place."""
        return ""  # the operating system shares the cores out

    def start(self, name: str, target: Target, spec: Any) -> ProcessHandle:
        """Start a process that runs `target(outbox, inbox, spec)`. Raises RunError without resources."""
        return ForkedProcess(name, target, spec)

    def close(self) -> None:
        """Release what the processes shared; they have exited."""


StartProcess = Callable[[str, Target, Any], ProcessHandle]


class WorkerMessages(queue.SimpleQueue[tuple["Worker | None", Any]]):
    """Messages of all workers of a run, each with its sender; the sender None only wakes the driver up.

    `start` starts the workers' processes.
    """

    def __init__(self, start: StartProcess = ForkedProcess) -> None:
        super().__init__()
        self.start = start


class Worker:
    """A worker process as the driver sees it. Two threads serve its channel."""

    def __init__(self, name: str, target: Target, spec: object, messages: WorkerMessages) -> None:
        """Start `target(outbox, inbox, spec)` in a new process; both must be picklable.

        What the worker sends is put into `messages`; `WorkerExited` comes last.
        """
        self.name = name
        self.process = messages.start(name, target, spec)
        self.has_sent = False  # since the supervisor's last check
        self.heard_s = 0.0  # time of that check or an earlier one, on the driver's clock
        self.traceback = ""  # of the exception that ended it
        self.input_error = ""  # the message, if that exception is an InputError
        self._messages = messages
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: object) -> None:
        """Queue a message. A message to a process that has exited is lost."""
        self.send_batch([message])

    def send_batch(self, messages: Sequence[object]) -> None:
        """Queue messages, which are sent together."""
        self._outbox.put(messages)

    @property
    def exit_reason(self) -> str:
        """A sentence about a worker that has exited."""
        if self.traceback:
            return f"{self.name} failed: {self.traceback.strip().splitlines()[-1]}"
        return f"{self.name} {self.process.exit_reason}"

    def kill(self) -> None:
        """Kill the process and wait until it has exited."""
        self._outbox.put(None)
        self.process.kill()

    def _read(self) -> None:
        """A process that is killed while it sends leaves a partial message: the channel counts as closed."""
        with self._lost_by_errors():
            while True:
                messages = self.process.recv()
                self.has_sent = True
                for message in messages:
                    if isinstance(message, WorkerCrashed):
                        self.traceback, self.input_error = message.traceback, message.input_error
                    elif not isinstance(message, Heartbeat):
                        self._messages.put((self, message))
        self._messages.put((self, WorkerExited()))

    def _write(self) -> None:
        with self._lost_by_errors():
            while True:
                batches = [self._outbox.get()]
                while not self._outbox.empty():
                    batches.append(self._outbox.get())
                if None in batches:  # `kill` was called
                    return
                self.process.send([message for batch in batches for message in batch])

    @contextlib.contextmanager
    def _lost_by_errors(self) -> Iterator[None]:
        """A worker whose messages cannot be pickled or unpickled is lost, as it would wait forever."""
        try:
            yield
        except (EOFError, OSError):
            pass
        except Exception:  # a node may have other files of DORA-RL than the driver, for one
            self.traceback = traceback.format_exc()
            self._messages.put((self, WorkerExited()))


class WorkerState(NamedTuple):
    """The state of a worker for status displays: readiness, timeout, current work."""

    worker: Worker
    is_ready: bool
    timeout_s: float
    activity: str = ""

    def to_json(self, now_s: float) -> dict[str, Any]:
        """`now_s` is the time of the driver's clock."""
        silent_s, waiting_for = max(0.0, now_s - self.worker.heard_s), self.worker.process.waiting_for
        activity = (
            self.activity if self.is_ready else f"waiting for {waiting_for}" if waiting_for else "starting"
        )
        return {
            "name": self.worker.name,
            "pid": self.worker.process.pid,
            "node": self.worker.process.node[:8],
            "last_message_s": round(silent_s, 3),
            "timeout_s": self.timeout_s,
            "activity": activity,
        }


def receive(messages: queue.SimpleQueue[T], timeout_s: float | None) -> Iterator[T]:
    """Yield all messages that have arrived; wait up to `timeout_s` for the first, None: without limit."""
    try:
        yield messages.get(timeout=timeout_s)
        while True:
            yield messages.get_nowait()
    except queue.Empty:
        return


def cpu_s() -> float:
    """CPU seconds used so far by this process and its descendants, also by those that have exited."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()  # children_*: of children that have exited
            total += times.user + times.system + times.children_user + times.children_system
    return total


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C and SIGTERM, which a terminal or a batch system sends to a whole
    process group: the driver handles them, and may have to save a checkpoint first.
    """
    resource_tracker.ensure_running()  # started by the first process otherwise, and it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_sigterm() -> None:
    """Ignore SIGTERM with a handler, which programs do not inherit, as they would a blocked signal: those
    that an environment or a reward function starts can be terminated.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside; torch reads them when it loads."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
