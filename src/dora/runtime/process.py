"""A worker process as the driver sees it: a line to it, a sign of life, and a way to end it.

Workers of this machine are forked from a process that has imported what they need and has done nothing
else: they start at once, and share the memory of what is imported. `Told.start` says who starts workers.

Sending never blocks the driver: a thread per worker writes to the line, so a worker that hangs holds up
nobody else. What passes a line is a list of messages, for a wake-up costs more than a message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import psutil

from dora.errors import InputError
from dora.runtime.messages import Alive, Crashed, Gone

# One thread per process: with more, worker processes on the same cores stall one another. Keeping
# freed memory spares the trainer the page faults of ever new activations.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "TOKENIZERS_PARALLELISM": "false",
}

if sys.platform == "linux":
    CONTEXT = multiprocessing.get_context("forkserver")
else:  # libraries of a Mac do not survive a fork
    CONTEXT = multiprocessing.get_context("spawn")

BEAT_S = 1.0


class Line(Protocol):
    """Lists of messages to the other end and back; its end is an EOFError or an OSError."""

    def send(self, messages: Any, /) -> None:
        """To the other end."""

    def recv(self) -> Any:
        """The next list, once it is here."""


class Outbox:
    """What this worker tells the driver, from any of its threads."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()

    def send(self, *messages: object) -> None:
        with self._lock:
            self._line.send(messages)

    def beat(self) -> None:
        """Send signs of life from a thread, for a worker whose main thread works in long pieces."""
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.send(Alive())
                time.sleep(BEAT_S)


class Inbox:
    """What the driver sent to this worker; a thread empties the line, so the driver's end never fills."""

    def __init__(self, line: Line) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._line = line
        threading.Thread(target=self._receive, daemon=True).start()

    def take(self, timeout_s: float | None = 0.0) -> Iterator[Any]:
        """All messages that are here, after waiting for a first one for at most `timeout_s`."""
        try:
            yield self._queue.get(timeout=timeout_s) if timeout_s != 0.0 else self._queue.get_nowait()
            while True:
                yield self._queue.get_nowait()
        except queue.Empty:
            return

    def _receive(self) -> None:
        try:
            while True:
                for message in self._line.recv():
                    self._queue.put(message)
        except (EOFError, OSError):
            os._exit(0)  # the driver is gone, and nobody is left to tell
        except Exception:  # a message that cannot be read: better dead than deaf
            traceback.print_exc()
            os._exit(1)


Body = Callable[[Outbox, Inbox, Any], None]


def live(line: Line, body: Body, spec: object) -> None:
    """A worker's life: run `body` until it ends; tell the driver of an exception."""
    outbox = Outbox(line)
    try:
        body(outbox, Inbox(line), spec)
    except Exception as error:
        refusal = str(error) if isinstance(error, InputError) else ""
        outbox.send(Crashed(traceback.format_exc(), refusal))


def _live_forked(connection: Connection, body: Body, spec: object) -> None:
    _ignore_termination()
    live(connection, body, spec)


def warm_up() -> None:
    """Have the imports of workers begin; also without it they start, each with its own imports."""
    if sys.platform == "linux":
        CONTEXT.set_forkserver_preload(["dora.runtime.imports"])
        with _environment(WORKER_ENVIRONMENT), _deaf_to_signals():
            forkserver.ensure_running()


class Carrier(Line, Protocol):
    """A worker's process, wherever it runs, and the line to it."""

    @property
    def pid(self) -> int | None:
        """Its number on its own machine, once it is known."""

    @property
    def node(self) -> str:
        """The machine it is on; those of one node share memory and files. "": the driver's, or not known."""

    @property
    def awaits(self) -> str:
        """Who has to have a place for it before it can start. "": nobody, or it has one."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as is known here."""

    @property
    def how_it_ended(self) -> str:
        """What became of a dead one, to be read after its name."""

    def kill(self) -> None:
        """End it now, and wait until it is gone."""


class Forked:
    """A carrier: a process of this machine behind a pipe."""

    node = awaits = ""

    def __init__(self, name: str, body: Body, spec: object) -> None:
        connection, theirs = CONTEXT.Pipe()
        with _environment(WORKER_ENVIRONMENT), _deaf_to_signals():
            args = (theirs, body, spec)
            self._process = CONTEXT.Process(target=_live_forked, args=args, name=name, daemon=True)
            self._process.start()
        theirs.close()
        self._connection = connection

    def send(self, messages: Any, /) -> None:
        self._connection.send(messages)

    def recv(self) -> Any:
        return self._connection.recv()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def how_it_ended(self) -> str:
        self._process.join(timeout=1.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join(timeout=5.0)


Start = Callable[[str, Body, Any], Carrier]


class Told(queue.SimpleQueue[tuple["Worker | None", Any]]):
    """What all workers of a run say, each beside who says it; None: a nudge, nobody's word.

    `start` starts their processes.
    """

    def __init__(self, start: Start = Forked) -> None:
        super().__init__()
        self.start = start


class Worker:
    """One process of its own. Two threads serve its line, so that one that hangs holds up nobody."""

    def __init__(self, name: str, body: Body, spec: object, told: Told) -> None:
        """Start `body(outbox, inbox, spec)` in a new process; both must be picklable.

        What it says is put into `told` beside the worker; `Gone` comes last.
        """
        self.name = name
        self._carrier = told.start(name, body, spec)
        self.last_heard_s = time.monotonic()
        self.crash = ""  # its traceback, if it told one
        self.refusal = ""  # what is wrong with what it was given, if it ended of that
        self._told = told
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: object) -> None:
        """Queue a message; one to a dead worker is lost, as its process is."""
        self._outbox.put(message)

    def is_silent(self, timeout_s: float) -> bool:
        """Whether it has said nothing for longer than that."""
        return time.monotonic() - self.last_heard_s > timeout_s

    @property
    def pid(self) -> int | None:
        """Of its process, on its own machine; None: not known yet."""
        return self._carrier.pid

    @property
    def node(self) -> str:
        """See `Carrier`."""
        return self._carrier.node

    @property
    def awaits(self) -> str:
        """See `Carrier`."""
        return self._carrier.awaits

    @property
    def why_late(self) -> str:
        """What there is to add where it has not started in time."""
        return f": {self.awaits} has no place for it" if self.awaits else ""

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self._carrier.is_alive

    @property
    def how_it_ended(self) -> str:
        """A sentence about a dead worker."""
        if self.crash:
            return f"{self.name} failed: {self.crash.strip().splitlines()[-1]}"
        return f"{self.name} {self._carrier.how_it_ended}"

    def kill(self) -> None:
        """End the process now, and wait until it is gone."""
        self._outbox.put(None)
        self._carrier.kill()

    def _read(self) -> None:
        """A line that ends in the middle of a message ends: its process was killed while it spoke."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages = self._carrier.recv()
                self.last_heard_s = time.monotonic()
                for message in messages:
                    if isinstance(message, Crashed):
                        self.crash, self.refusal = message.traceback, message.refusal
                    elif not isinstance(message, Alive):
                        self._told.put((self, message))
        self._told.put((self, Gone()))

    def _write(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages = [self._outbox.get()]
                while not self._outbox.empty():
                    messages.append(self._outbox.get())
                if None in messages:  # it is killed
                    return
                self._carrier.send(messages)


class Pulse(NamedTuple):
    """What is known of a process: whether it has started, how long it may be silent, and what it is at."""

    worker: Worker
    is_ready: bool
    limit_s: float
    work: str = ""

    def to_json(self, now_s: float) -> dict[str, Any]:
        """`now_s` as time.monotonic() has it."""
        heard_s, awaits = max(0.0, now_s - self.worker.last_heard_s), self.worker.awaits
        return {
            "name": self.worker.name,
            "pid": self.worker.pid,
            "node": self.worker.node[:8],
            "heard_s": round(heard_s, 3),
            "limit_s": self.limit_s,
            "at": self.work if self.is_ready else f"waiting for {awaits}" if awaits else "starting",
        }


def take(told: Told, timeout_s: float) -> Iterator[tuple[Worker | None, Any]]:
    """What workers have said, after waiting for a first word for at most `timeout_s`."""
    try:
        yield told.get(timeout=timeout_s)
        while True:
            yield told.get_nowait()
    except queue.Empty:
        return


def cpu_s() -> float:
    """CPU seconds of this process and its living children so far."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Processes started inside never hear Ctrl-C and SIGTERM, which a terminal, `timeout` or a batch system
    tells all: they are the driver's business, which may have a checkpoint to save first.
    """
    resource_tracker.ensure_running()  # the first process would start it, and it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_termination() -> None:
    """By a handler, which programs that this process starts do not inherit as they would a blocked signal:
    those of an environment or a reward can be terminated.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside; they must be set before torch loads."""
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
