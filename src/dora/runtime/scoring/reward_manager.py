"""Waits in the stream for groups that all reward tasks have judged, and tells the driver of each.

A thread of the driver's process with a client of its own; it ends with the storage.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dora.config.schema import Config
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId
from dora.errors import InputError, RunError
from dora.runtime.process import messages as m
from dora.runtime.process.stream_workers import GET_TIMEOUT_S, ConsumerSpec, run_consumer
from dora.runtime.process.worker_process import HEARTBEAT_S, Worker, WorkerMessages, WorkerState
from dora.runtime.scoring.external import SERVICE, ExternalRewards
from dora.runtime.scoring.reward_worker import REWARD, RewardSpec, RewardWorker
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.metadata import NO_TIMEOUT, BatchRequest
from dora.stream.run_stream import COLLECTOR, DRIVER_TIMEOUT_S, RunStream, reward_column
from dora.stream.schema import StreamBatch, TimedOut
from dora.text import plural

NUM_ROWS = 10_000  # at once, of what is there


class Collector:
    """Puts `Judgement`s into the driver's queue, and `Crashed` if it cannot."""

    def __init__(
        self, stream: Path, tasks: Sequence[str], told: WorkerMessages, *, is_replaced: bool = False
    ) -> None:
        """It `is_replaced` where another storage takes the place of one that ends."""
        self._stream, self._tasks, self._told, self._is_replaced = stream, tasks, told, is_replaced
        threading.Thread(target=self._run, name="collector", daemon=True).start()

    def _run(self) -> None:
        try:
            with StreamClient(transport.stream_endpoint(self._stream), DRIVER_TIMEOUT_S) as client:
                while True:
                    batch = client.get(COLLECTOR, BatchRequest(max_rows=NUM_ROWS), GET_TIMEOUT_S)
                    if not isinstance(batch, TimedOut):
                        for judgement in self._judgements(batch):
                            self._told.put((None, judgement))
                        client.commit(batch)
        except Exception as error:
            if not (self._is_replaced and isinstance(error, RunError)):
                self._told.put((None, m.WorkerCrashed(traceback.format_exc())))

    def _judgements(self, batch: StreamBatch) -> Iterator[m.GroupRewards]:
        columns = {task: batch.column(reward_column(task)).values for task in self._tasks}
        found: dict[GroupId, list[int]] = {}
        for row, group in enumerate(batch.groups):
            found.setdefault(group, []).append(row)
        for group, rows in found.items():
            yield m.GroupRewards(group, {task: tuple(c[rows].tolist()) for task, c in columns.items()})


# === dora.runtime.scoring.reward_manager: The workers of one task, as the driver sees them: replaced when they die, fall silent or hang in a call.
#
# A group whose worker dies or is silent is handed to another one, once: mostly it has nothing to do with it.
# What a second worker is lost with has failed, and so has what takes too long in a process that is well.

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


class RewardWorkers:
    """Starts and watches them; `hear` and `check_deadlines` tell which groups they could not do."""

    def __init__(
        self,
        spec: CrewSpec,
        start_timeout_s: float,
        told: WorkerMessages,
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
        self,
        worker: Worker,
        message: m.WorkerReady | m.TaskStarted | m.TaskFailed | m.StreamFull | m.WorkerExited,
    ) -> list[m.TaskFailed]:
        """Take note of a worker's word. Raises InputError or RunError if it cannot start or go on."""
        place = next(place for place, post in enumerate(self._posts) if post.worker is worker)
        post = self._posts[place]
        post.since_s = time.monotonic()
        match message:
            case m.WorkerReady(client_id=client):
                post.is_ready = self._was_ever_ready = True
                post.client = client
                self._num_failed_starts = 0
            case m.TaskStarted(groups):
                post.groups = groups
                if groups:
                    self._num_idle_deaths = 0
            case m.StreamFull(reason) if not self._is_over:  # once: then what was trained is saved
                self._is_over = True
                raise RunError(f"{worker.name}: {reason}")
            case m.TaskFailed():
                return [message]
            case m.WorkerExited() if not self._is_over:
                return self._died(place)
        return []

    def check_deadlines(self, asleep_s: float) -> list[m.TaskFailed]:
        """End who is silent or whose call takes too long, our own sleep left out.

        Raises RunError if one does not start.
        """
        found: list[m.TaskFailed] = []
        for place, post in enumerate(self._posts):
            post.since_s += asleep_s
            post.worker.last_message_s += asleep_s
            waited_s = time.monotonic() - post.since_s
            if not post.is_ready and waited_s > self._start_timeout_s:
                limit = f"runtime.start_timeout_s = {self._start_timeout_s:g} s"
                raise RunError(
                    f"the {post.worker.name} did not start within {limit}{post.worker.start_delay_reason}"
                )
            if not post.is_ready or self._is_over:
                continue
            is_late = bool(post.groups) and waited_s > self._spec.timeout_s
            if (is_late or not post.groups) and post.worker.has_timed_out(self._silence_s(post)):
                found += self._fell_silent(place)
            elif is_late:
                limit = f"{self._spec.timeout_key} = {self._spec.timeout_s:g}"
                reason = f"{self._spec.what} took longer than {limit}"
                self._drop(post.groups)
                self._replace(place, reason)
                found.append(m.TaskFailed(post.groups, reason, reason))
        return found

    def pulses(self) -> list[WorkerState]:
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

    def _pulse(self, post: _Post) -> WorkerState:
        if not post.is_ready:
            return WorkerState(post.worker, False, self._start_timeout_s)
        if not post.groups:
            return WorkerState(post.worker, True, self._spec.heartbeat_timeout_s)
        names = ", ".join(f"group {group}" for group in post.groups[:MAX_NAMED])
        more = f" and {len(post.groups) - MAX_NAMED} more" if len(post.groups) > MAX_NAMED else ""
        work = f"{names}{more}, for {time.monotonic() - post.since_s:.1f} s"
        return WorkerState(post.worker, True, self._spec.timeout_s, work)

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
        if worker.input_error and not self._was_ever_ready:
            raise InputError(worker.input_error)
        if not self._was_ever_ready or self._num_failed_starts == MAX_FAILED_STARTS:
            raise RunError(worker.exit_reason)

    def _check_idle(self, how: str) -> None:
        """One that is ready and dies before it takes a group would do so for ever."""
        self._num_idle_deaths += 1
        if self._num_idle_deaths > MAX_IDLE_DEATHS * self.num_workers:
            num = self._num_idle_deaths
            raise RunError(f"{how}, as the {num - 1} before it, and none of them had a group to judge")

    def _died(self, place: int) -> list[m.TaskFailed]:
        """It is replaced."""
        post = self._posts[place]
        how = post.worker.exit_reason
        if not post.is_ready:
            self._check_start(post.worker)
        elif not post.groups:
            self._check_idle(how)
        return self._lost(place, how, f"{self._spec.what} ended its process: {how}")

    def _silence_s(self, post: _Post) -> float:
        """After what time without a word it is called silent; when a call is late, a few beats are enough."""
        limit_s = self._spec.heartbeat_timeout_s
        return min(limit_s, MISSED_BEATS * HEARTBEAT_S) if post.groups else limit_s

    def _fell_silent(self, place: int) -> list[m.TaskFailed]:
        """It is ended and replaced."""
        post, spec = self._posts[place], self._spec
        if post.groups:
            how = f"the {post.worker.name} was silent when {spec.timeout_key} = {spec.timeout_s:g} was over"
        else:
            limit = f"runtime.heartbeat_timeout_s = {spec.heartbeat_timeout_s:g}"
            how = f"the {post.worker.name} was silent for more than {limit}"
            self._check_idle(how)
        return self._lost(place, how, f"{spec.what} stopped its process: {how}")

    def _lost(self, place: int, how: str, reason: str) -> list[m.TaskFailed]:
        """What it was at is another's to do; what a second one was lost with has failed."""
        post = self._posts[place]
        again = tuple(group for group in post.groups if group in self._struck)
        self._struck |= {*post.groups}
        if again:
            self._drop(again)
        self._replace(place, how)
        return [m.TaskFailed(again, reason, reason)] if again else []


# === dora.runtime.scoring.reward_manager: The reward tasks of a run: a group is judged once all of them have judged it, and fails if one cannot.
#
# Each task is a crew of workers that take groups out of the stream. Its reward counts `weight` times in
# the total, which is all that the orchestrator and the trainer see.

Fact = GroupScored | ScoringFailed
A_GROUP = BatchRequest()
MANY = 1_000_000  # rows at once, where tokens alone are the limit


@dataclass(frozen=True)
class RewardTask:
    """A judge, how many of it there are, what they take at once, and what their rewards count."""

    judge: RewardSpec
    timeout_s: float
    timeout_key: str
    weight: float = 1.0
    num_workers: int = 1
    want: BatchRequest = A_GROUP
    heartbeat_timeout_s: float = 5.0

    @property
    def name(self) -> str:
        return self.judge.name

    @property
    def is_outside(self) -> bool:
        """Whether its rewards come through the service."""
        return self.judge.function == SERVICE

    def lease_s(self, is_spread: bool = False) -> float:
        """How long somebody may have a group before another gets it. A crew's worker: for ever, as its death
        is seen or told; where a run `is_spread`, no longer than a call may take, in case it is not.
        """
        if self.is_outside:
            return self.timeout_s / 2
        return self.timeout_s if is_spread else NO_TIMEOUT

    def outside_judge(self, feed: RunStream) -> ExternalRewards:
        """Who lends its groups, from the stream of a feed."""
        return ExternalRewards(self.name, self.timeout_s, self.timeout_key, feed.folder, self.judge.model)

    def crew_spec(self, feed: RunStream) -> CrewSpec:
        """Its workers, at the stream of a feed."""
        return CrewSpec(
            ConsumerSpec(
                reward_column(self.name),
                feed.folder,
                partial(RewardWorker, self.judge),
                self.want,
                feed.storage.remote,
            ),
            title="rewarder" if self.name == REWARD else self.name,
            what=self.name,
            num_workers=self.num_workers,
            timeout_s=self.timeout_s,
            timeout_key=self.timeout_key,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )


def reward_tasks(config: Config, columns: tuple[str, ...] | None = None) -> list[RewardTask]:
    """The task of the section [reward], and one for each [[reward_task]]; `columns` are those of the dataset."""
    model, reward = Path(config.model.path), config.reward
    beats_s = config.runtime.heartbeat_timeout_s
    tasks = []
    if reward.function is not None:
        judge = RewardSpec(REWARD, reward.function, "reward.function", model, columns=columns)
        tasks.append(
            RewardTask(
                judge,
                reward.timeout_s,
                "reward.timeout_s",
                num_workers=reward.num_workers,
                heartbeat_timeout_s=beats_s,
            )
        )
    for task in config.reward_task:
        key = f"reward_task.{task.name}"
        judge = RewardSpec(task.name, task.factory, f"{key}.class", model, task.options, columns)
        num_rows = task.micro_batch_size or (MANY if task.micro_batch_tokens else A_GROUP.max_rows)
        tasks.append(
            RewardTask(
                judge,
                task.timeout_s,
                f"{key}.timeout_s",
                weight=task.weight,
                num_workers=task.num_workers,
                want=BatchRequest(num_rows, task.micro_batch_tokens),
                heartbeat_timeout_s=beats_s,
            )
        )
    return tasks


class RewardManager:
    """Groups in, `GroupScored` or `GroupUnscorable` out, once for each."""

    def __init__(
        self,
        tasks: Sequence[RewardTask],
        feed: RunStream,
        start_timeout_s: float,
        told: WorkerMessages,
        notice: Callable[[str], None],
    ) -> None:
        """The feed knows the tasks. What is said is put into `told`; who reads it lets us `hear`."""
        self._feed, self._weights = feed, {task.name: task.weight for task in tasks}
        self._awaited: dict[GroupId, tuple[bytes, Sequence[Sequence[int]]]] = {}  # as they were asked
        self._by_task: dict[GroupId, dict[str, tuple[float, ...]]] = {}
        self.first_failure = ""  # reason and traceback of the first group that could not be judged
        self.outside = {task.name: task.outside_judge(feed) for task in tasks if task.is_outside}
        self._crews = [
            RewardWorkers(task.crew_spec(feed), start_timeout_s, told, notice, self._drop, feed.evict)
            for task in tasks
            if not task.is_outside
        ]
        self._judges: list[RewardWorkers | ExternalRewards] = [*self._crews, *self.outside.values()]
        is_replaced = feed.storage.is_replaceable
        self._collect = partial(Collector, feed.folder, [*self._weights], told, is_replaced=is_replaced)
        if tasks:
            self._collect()

    @property
    def late(self) -> list[str]:
        """The workers that have not started yet."""
        return [name for crew in self._crews for name in crew.late]

    @property
    def headcount(self) -> str:
        """How many processes judge, in words."""
        return plural(sum(crew.num_workers for crew in self._crews), "rewarder")

    def by_task(self, group: GroupId) -> dict[str, tuple[float, ...]]:
        """What the rewards of a group that was just scored sum up, if there are several tasks; said once."""
        return self._by_task.pop(group, {})

    def submit(self, group: GroupId, question: bytes, held_out: Sequence[Sequence[int]] = ()) -> None:
        """As `RunStream.request_scores`; a fact will follow."""
        self._awaited[group] = question, held_out
        self._ask(group)

    def ask_again(self) -> None:
        """Another storage has the rows: what was not judged by all tasks is judged by all again."""
        for crew in self._crews:
            crew.move(self._feed.storage.remote)
        for judge in self.outside.values():
            judge.reconnect()
        if self._weights:
            self._collect()
        for group in self._awaited:
            self._ask(group)

    def hear(self, worker: Worker | None, message: Any) -> list[Fact] | None:
        """Facts that follow from a message; None if it is none of ours. Raises InputError and RunError."""
        if isinstance(message, m.GroupRewards):
            return self._judged(message)
        if worker is None and isinstance(message, m.WorkerCrashed):
            raise RunError(f"rewards cannot be collected any more:\n{message.traceback}".rstrip())
        for crew in self._crews:
            if worker is not None and crew.has(worker):
                return self._failed(crew.hear(worker, message))
        return None

    def check_deadlines(self, asleep_s: float = 0.0) -> list[Fact]:
        """Fail groups whose judge takes too long, time that the driver slept itself left out.

        Raises RunError if a worker does not start.
        """
        return [fact for judges in self._judges for fact in self._failed(judges.check_deadlines(asleep_s))]

    def pulses(self) -> list[WorkerState]:
        """What is known of each process that judges."""
        return [pulse for crew in self._crews for pulse in crew.pulses()]

    def kill(self) -> None:
        """End the workers; the collector ends with the storage."""
        for crew in self._crews:
            crew.kill()
        for judge in self.outside.values():
            judge.close()

    def _ask(self, group: GroupId) -> None:
        self._feed.request_scores(group, *self._awaited[group])
        for judge in self.outside.values():
            judge.ask(group)

    def _judged(self, message: m.GroupRewards) -> list[Fact]:
        group = message.group
        if group not in self._awaited:
            return []  # it has failed in the meantime
        parts = [
            [self._weights[task] * reward for reward in rewards] for task, rewards in message.rewards.items()
        ]
        totals = tuple(map(sum, zip(*parts, strict=True)))
        for total in totals:
            if not math.isfinite(total):
                return self._failed([m.TaskFailed((group,), f"the weighted sum of rewards is {total}", "")])
        self._settle(group)
        if len(self._weights) > 1:
            self._by_task[group] = message.rewards
        return [GroupScored(group, totals)]

    def _failed(self, unable: Iterable[m.TaskFailed]) -> list[Fact]:
        facts: list[Fact] = []
        for word in unable:
            for group in word.groups:
                if group in self._awaited:  # and no late word of another task
                    self.first_failure = self.first_failure or f"{word.reason}\n{word.detail}"
                    self._settle(group)
                    facts.append(ScoringFailed(group, word.reason))
        return facts

    def _drop(self, groups: Iterable[GroupId]) -> None:
        """Take out of the stream what has failed; what somebody judges once more is the trainer's by now."""
        self._feed.clear([group for group in groups if group in self._awaited])

    def _settle(self, group: GroupId) -> None:
        """The core has this group's fact; what is held out nobody else needs."""
        self._awaited.pop(group, None)
        for judges in self._judges:
            judges.forget(group)
        if group.is_held_out:
            self._feed.clear([group])
