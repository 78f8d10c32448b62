"""The workers of one task, as the driver sees them: replaced when they die, ended when a call hangs.

A group whose worker dies is handed to another one, once: most such deaths have nothing to do with it. One
that a second worker dies of, or that takes too long, has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dora.core.records import GroupId
from dora.errors import InputError, RunError
from dora.runtime import messages as m
from dora.runtime.consumer import ConsumerSpec, run_consumer
from dora.runtime.process import Told, Worker

MAX_FAILED_STARTS = 3  # in a row, before the run ends
MAX_IDLE_DEATHS = 3  # for each worker, while none of them takes a group


@dataclass(frozen=True)
class CrewSpec:
    """`num_workers` processes called `title`, which do the same; `what` is it that fails or takes too long.

    No call takes longer than `timeout_s`, which is the setting `timeout_key`.
    """

    consumer: ConsumerSpec
    title: str
    what: str
    num_workers: int
    timeout_s: float
    timeout_key: str


@dataclass
class _Post:
    """What is known of a worker."""

    worker: Worker
    since_s: float
    is_ready: bool = False
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
    ) -> None:
        """What they say is put into `told`; `drop` hears of groups that fail, before others take them."""
        self._spec, self._start_timeout_s = spec, start_timeout_s
        self._told, self._notice, self._drop = told, notice, drop
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
            case m.Ready():
                post.is_ready = self._was_ever_ready = True
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
        """End whose call takes too long, our own sleep left out. Raises RunError if one does not start."""
        found = []
        for place, post in enumerate(self._posts):
            post.since_s += asleep_s
            waited_s = time.monotonic() - post.since_s
            if not post.is_ready and waited_s > self._start_timeout_s:
                limit = f"runtime.start_timeout_s = {self._start_timeout_s:g} s"
                raise RunError(f"the {post.worker.name} did not start within {limit}")
            is_late = post.is_ready and bool(post.groups) and waited_s > self._spec.timeout_s
            if is_late and not self._is_over:
                limit = f"{self._spec.timeout_key} = {self._spec.timeout_s:g}"
                reason = f"{self._spec.what} took longer than {limit}"
                self._drop(post.groups)
                self._replace(place, reason)
                found.append(m.Unable(post.groups, reason, reason))
        return found

    def forget(self, group: GroupId) -> None:
        """The group has its result, or has failed."""
        self._struck.discard(group)

    def kill(self) -> None:
        for post in self._posts:
            post.worker.kill()

    def _start(self, place: int) -> _Post:
        spec = self._spec
        name = f"{spec.title} {place}" if spec.num_workers > 1 else spec.title
        return _Post(Worker(name, run_consumer, spec.consumer, self._told), time.monotonic())

    def _replace(self, place: int, why: str) -> None:
        worker = self._posts[place].worker
        worker.kill()
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
        again = tuple(group for group in post.groups if group in self._struck)
        self._struck |= {*post.groups}
        if again:
            self._drop(again)
        self._replace(place, how)
        reason = f"{self._spec.what} ended its process: {how}"
        return [m.Unable(again, reason, reason)] if again else []
