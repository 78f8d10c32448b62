"""The workers of one task, as the driver sees them: replaced when they die, fall silent or hang in a call.

A group whose worker dies or is silent is handed to another one, once: mostly it has nothing to do with it.
What a second worker is lost with has failed, and so has what takes too long in a process that is well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dora.core.records import GroupId
from dora.errors import InputError, RunError
from dora.runtime import messages as m
from dora.runtime.consumer import ConsumerSpec, run_consumer
from dora.runtime.process import BEAT_S, Pulse, Told, Worker

MAX_FAILED_STARTS = 3  # in a row, before the run ends
MAX_IDLE_DEATHS = 3  # for each worker, while none of them takes a group
MISSED_BEATS = 2.5
MAX_NAMED = 3  # groups that a worker is at


@dataclass(frozen=True)
class CrewSpec:
    """`num_workers` processes called `title`, which do the same; `what` is it that fails or takes too long.

    No call takes longer than `timeout_s`, which is the setting `timeout_key`; between calls no worker is
    silent for longer than `heartbeat_timeout_s`. During a call it may be: code that is not Python's need not
    let the thread that beats have its turn.
    """

    consumer: ConsumerSpec
    title: str
    what: str
    num_workers: int
    timeout_s: float
    timeout_key: str
    heartbeat_timeout_s: float


@dataclass
class _Post:
    """What is known of a worker."""

    worker: Worker
    since_s: float
    is_ready: bool = False
    client: str = ""  # of the sample stream
    groups: tuple[GroupId, ...] = ()


class Crew:
    """Starts and watches them; `hear` and `check_deadlines` tell which groups they could not do."""

    def __init__(
        self,
        spec: CrewSpec,
        start_timeout_s: float,
        told: Told,
        notice: Callable[[str], None],
        drop: Callable[[Sequence[GroupId]], None],
        bury: Callable[[str], None],
    ) -> None:
        """What they say is put into `told`. `drop` hears of groups that fail, before others take them, and
        `bury` of the stream's clients that have ended.
        """
        self._spec, self._start_timeout_s = spec, start_timeout_s
        self._told, self._notice, self._drop, self._bury = told, notice, drop, bury
        self._was_ever_ready, self._num_failed_starts, self._num_idle_deaths = False, 0, 0
        self._is_over = False  # there is no room for what they make
        self._struck: set[GroupId] = set()  # a worker has died in it
        self._posts = [self._start(place) for place in range(spec.num_workers)]

    @property
    def num_workers(self) -> int:
        return len(self._posts)

    @property
    def late(self) -> list[str]:
        """Those that have not started yet."""
        return [f"the {post.worker.name}" for post in self._posts if not post.is_ready]

    def has(self, worker: Worker | None) -> bool:
        """Whether it is one of them, and was not replaced."""
        return any(post.worker is worker for post in self._posts)

    def hear(
        self, worker: Worker, message: m.Ready | m.Working | m.Unable | m.NoRoom | m.Gone
    ) -> list[m.Unable]:
        """Take note of a worker's word. Raises InputError or RunError if it cannot start or go on."""
        place = next(place for place, post in enumerate(self._posts) if post.worker is worker)
        post = self._posts[place]
        post.since_s = time.monotonic()
        match message:
            case m.Ready(client=client):
                post.is_ready = self._was_ever_ready = True
                post.client = client
                self._num_failed_starts = 0
            case m.Working(groups):
                post.groups = groups
                if groups:
                    self._num_idle_deaths = 0
            case m.NoRoom(reason) if not self._is_over:  # once: then what was trained is saved
                self._is_over = True
                raise RunError(f"{worker.name}: {reason}")
            case m.Unable():
                return [message]
            case m.Gone() if not self._is_over:
                return self._died(place)
        return []

    def check_deadlines(self, asleep_s: float) -> list[m.Unable]:
        """End who is silent or whose call takes too long, our own sleep left out.

        Raises RunError if one does not start.
        """
        found: list[m.Unable] = []
        for place, post in enumerate(self._posts):
            post.since_s += asleep_s
            post.worker.last_heard_s += asleep_s
            waited_s = time.monotonic() - post.since_s
            if not post.is_ready and waited_s > self._start_timeout_s:
                limit = f"runtime.start_timeout_s = {self._start_timeout_s:g} s"
                raise RunError(f"the {post.worker.name} did not start within {limit}{post.worker.why_late}")
            if not post.is_ready or self._is_over:
                continue
            is_late = bool(post.groups) and waited_s > self._spec.timeout_s
            if (is_late or not post.groups) and post.worker.is_silent(self._silence_s(post)):
                found += self._fell_silent(place)
            elif is_late:
                limit = f"{self._spec.timeout_key} = {self._spec.timeout_s:g}"
                reason = f"{self._spec.what} took longer than {limit}"
                self._drop(post.groups)
                self._replace(place, reason)
                found.append(m.Unable(post.groups, reason, reason))
        return found

    def pulses(self) -> list[Pulse]:
        """What is known of each worker: at which groups it is, and how long a call may still take."""
        return [self._pulse(post) for post in self._posts]

    def forget(self, group: GroupId) -> None:
        """The group has its result, or has failed."""
        self._struck.discard(group)

    def move(self, far: tuple[str, str] | None) -> None:
        """Another storage is there. Who is on its machine finds it; others begin anew, and are told."""
        self._spec = replace(self._spec, consumer=replace(self._spec.consumer, far=far))
        for place, post in enumerate(self._posts):
            if far is not None and (post.worker.node or not post.is_ready):
                self._replace(place, "the sample stream is elsewhere")

    def kill(self) -> None:
        for post in self._posts:
            post.worker.kill()

    def _start(self, place: int) -> _Post:
        spec = self._spec
        name = f"{spec.title} {place}" if spec.num_workers > 1 else spec.title
        return _Post(Worker(name, run_consumer, spec.consumer, self._told), time.monotonic())

    def _pulse(self, post: _Post) -> Pulse:
        if not post.is_ready:
            return Pulse(post.worker, False, self._start_timeout_s)
        if not post.groups:
            return Pulse(post.worker, True, self._spec.heartbeat_timeout_s)
        names = ", ".join(f"group {group}" for group in post.groups[:MAX_NAMED])
        more = f" and {len(post.groups) - MAX_NAMED} more" if len(post.groups) > MAX_NAMED else ""
        work = f"{names}{more}, for {time.monotonic() - post.since_s:.1f} s"
        return Pulse(post.worker, True, self._spec.timeout_s, work)

    def _replace(self, place: int, why: str) -> None:
        post = self._posts[place]
        worker = post.worker
        worker.kill()
        if post.client:
            self._bury(post.client)
        self._posts[place] = self._start(place)
        self._notice(f"the {worker.name} is replaced: {why}")

    def _check_start(self, worker: Worker) -> None:
        """Once one of them could start, another that dies of it is given a few more tries."""
        self._num_failed_starts += 1
        if worker.refusal and not self._was_ever_ready:
            raise InputError(worker.refusal)
        if not self._was_ever_ready or self._num_failed_starts == MAX_FAILED_STARTS:
            raise RunError(worker.how_it_ended)

    def _check_idle(self, how: str) -> None:
        """One that is ready and dies before it takes a group would do so for ever."""
        self._num_idle_deaths += 1
        if self._num_idle_deaths > MAX_IDLE_DEATHS * self.num_workers:
            num = self._num_idle_deaths
            raise RunError(f"{how}, as the {num - 1} before it, and none of them had a group to judge")

    def _died(self, place: int) -> list[m.Unable]:
        """It is replaced."""
        post = self._posts[place]
        how = post.worker.how_it_ended
        if not post.is_ready:
            self._check_start(post.worker)
        elif not post.groups:
            self._check_idle(how)
        return self._lost(place, how, f"{self._spec.what} ended its process: {how}")

    def _silence_s(self, post: _Post) -> float:
        """After what time without a word it is called silent; when a call is late, a few beats are enough."""
        limit_s = self._spec.heartbeat_timeout_s
        return min(limit_s, MISSED_BEATS * BEAT_S) if post.groups else limit_s

    def _fell_silent(self, place: int) -> list[m.Unable]:
        """It is ended and replaced."""
        post, spec = self._posts[place], self._spec
        if post.groups:
            how = f"the {post.worker.name} was silent when {spec.timeout_key} = {spec.timeout_s:g} was over"
        else:
            limit = f"runtime.heartbeat_timeout_s = {spec.heartbeat_timeout_s:g}"
            how = f"the {post.worker.name} was silent for more than {limit}"
            self._check_idle(how)
        return self._lost(place, how, f"{spec.what} stopped its process: {how}")

    def _lost(self, place: int, how: str, reason: str) -> list[m.Unable]:
        """What it was at is another's to do; what a second one was lost with has failed."""
        post = self._posts[place]
        again = tuple(group for group in post.groups if group in self._struck)
        self._struck |= {*post.groups}
        if again:
            self._drop(again)
        self._replace(place, how)
        return [m.Unable(again, reason, reason)] if again else []
