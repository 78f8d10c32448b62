"""The storage of the sample stream as a process of its own, as the driver sees it; another one replaces it.

On Ray it is an actor on the driver's node. It begins empty each time, and the driver tells it what
`samples.sqlite` has.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from dora.config import Config
from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.ground import Ground
from dora.runtime.plan import Plan
from dora.runtime.process import Inbox, Outbox, Pulse, Start, Told, Worker, take
from dora.runtime.restarts import Restarts
from dora.runtime.rewarding import RewardTask
from dora.stream.feed import Feed
from dora.stream.storage import InThread, Storage, StorageSpec, far_of

POLL_S = 0.2
_PLACE = 0  # a run has one storage


def run_storage(outbox: Outbox, inbox: Inbox, spec: StorageSpec) -> None:
    """Serve the stream until the process is ended; `inbox` ends it with the driver."""
    server = spec.open()
    outbox.beat()
    outbox.send(m.Serving(far_of(server)))
    server.run()


def make_feed(
    plan: Plan, folder: Path, tasks: Sequence[RewardTask], ground: Ground, notice: Callable[[str], None]
) -> Feed:
    """The stream of a run. On Ray its storage is a process, which has a place as all others."""
    config, is_spread = plan.config, ground.host is not None
    leases = {task.name: task.lease_s(is_spread) for task in tasks}
    num_answers = plan.evaluation.num_answers if plan.evaluation else 0
    serve: Callable[[StorageSpec], Storage] = InThread
    if config.runtime.kind == "ray":
        serve = partial(InProcess, config=config, start=ground.start, notice=notice)
    return Feed(folder, plan.limits.group_size, plan.columns, leases, num_answers, ground.host, serve)


class InProcess:
    """A `Storage`: its process of the day, which speaks to this object alone."""

    has_successors = True

    def __init__(
        self, spec: StorageSpec, config: Config, start: Start, notice: Callable[[str], None]
    ) -> None:
        """Return once it is there. Raises RunError if it does not come."""
        runtime = config.runtime
        self._spec, self._notice, self._told = spec, notice, Told(start)
        self.timeout_s, self._start_timeout_s = runtime.heartbeat_timeout_s, runtime.start_timeout_s
        self._restarts = Restarts(runtime.max_restarts)
        self._begin()
        while not self.is_new(POLL_S):
            pass

    def _begin(self) -> None:
        self.far: tuple[str, str] | None = None
        self.is_there, self._is_lost = False, False
        self._started_s = time.monotonic()
        self._worker = Worker("storage", run_storage, self._spec, self._told)

    @property
    def due_s(self) -> float | None:
        """When another one takes the place of a lost one (s, time.monotonic)."""
        return self._restarts.due_s.get(_PLACE)

    def pulse(self) -> Pulse:
        """What is known of its process."""
        return Pulse(self._worker, self.is_there, self.timeout_s if self.is_there else self._start_timeout_s)

    def is_new(self, wait_s: float = 0.0, asleep_s: float = 0.0) -> bool:
        """Whether one is there since the last look, and so has nothing. Looks at deadlines, our own sleep
        left out, and starts another one when its time has come. Raises RunError if there is to be none.
        """
        self._started_s += asleep_s
        self._worker.last_heard_s += asleep_s
        was_there = self.is_there
        for worker, message in take(self._told, wait_s):
            if worker is not self._worker or self._is_lost:
                continue
            if isinstance(message, m.Serving):
                self.far, self.is_there = message.far, True
            elif isinstance(message, m.Gone):
                self.lose(self._worker.how_it_ended)
        now_s = time.monotonic()
        if self.is_there and self._worker.is_silent(self.timeout_s):
            limit = f"runtime.heartbeat_timeout_s = {self.timeout_s:g} s"
            self.lose(f"the storage was silent for more than {limit}")
        elif not (self.is_there or self._is_lost) and now_s > self._started_s + self._start_timeout_s:
            self.lose(
                f"the storage did not start within runtime.start_timeout_s = {self._start_timeout_s:g} s"
            )
        if self._restarts.take(now_s):
            self._begin()
        return self.is_there and not was_there

    def lose(self, why: str) -> None:
        """It is gone, or does not answer. Raises RunError once it was replaced too often.

        Who finds out later finds nothing new.
        """
        if self._is_lost:
            return
        self._end()
        self.is_there, self._is_lost = False, True
        now_s = time.monotonic()
        wait_s = self._restarts.lost(_PLACE, _PLACE, now_s - self._started_s, now_s)
        if wait_s is None:
            most = f"started again runtime.max_restarts = {self._restarts.most} times"
            raise RunError(
                f"the sample stream has no storage any more: {why}; it was {most}; go on with --resume"
            )
        self._notice(f"the storage of the sample stream is lost ({why}); another one begins in {wait_s:g} s")

    def close(self) -> None:
        self._worker.kill()

    def _end(self) -> None:
        """At once, also one that is stopped: Ray takes seconds, and its clients would wait for so long."""
        if self._worker.is_alive and self._worker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._worker.pid, signal.SIGKILL)
        self._worker.kill()
