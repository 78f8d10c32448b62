"""Score groups with the reward tasks of a run: a group is scored once all tasks have scored it.

The processes of each task take groups out of the sample stream and fill in their rewards. The weighted sum
over all tasks is what the orchestrator and the trainer see.
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
from dora.curve import CurveAddress
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

NUM_ROWS = 10_000  # collected at once at most
MAX_FAILED_STARTS = 3  # in a row, before the run fails
MAX_IDLE_FAILURES = 3  # per worker, while no worker takes a group
MISSED_HEARTBEATS = 2.5  # of a worker whose call takes too long
MAX_NAMED = 3  # groups of a worker that a status display names
ONE_GROUP = BatchRequest()
UNLIMITED_ROWS = 1_000_000  # per batch, where only the number of tokens is limited

ScoringEvent = GroupScored | ScoringFailed


class RewardCollector:
    """A thread of the driver that waits in the stream for groups that all reward tasks have scored.

    It puts `GroupRewards` into the driver's messages, and `WorkerCrashed` once it fails; it ends with the
    storage.
    """

    def __init__(
        self, stream: Path, tasks: Sequence[str], messages: WorkerMessages, *, is_replaceable: bool = False
    ) -> None:
        """`is_replaceable`: a storage that ends is replaced, so that its end is no failure."""
        self._stream, self._tasks, self._messages = stream, tasks, messages
        self._is_replaceable = is_replaceable
        threading.Thread(target=self._run, name="reward collector", daemon=True).start()

    def _run(self) -> None:
        try:
            with StreamClient(transport.stream_endpoint(self._stream), DRIVER_TIMEOUT_S) as client:
                while True:
                    batch = client.get(COLLECTOR, BatchRequest(max_rows=NUM_ROWS), GET_TIMEOUT_S)
                    if not isinstance(batch, TimedOut):
                        for rewards in self._group_rewards(batch):
                            self._messages.put((None, rewards))
                        client.commit(batch)
        except Exception as error:
            if not (self._is_replaceable and isinstance(error, RunError)):
                self._messages.put((None, m.WorkerCrashed(traceback.format_exc())))

    def _group_rewards(self, batch: StreamBatch) -> Iterator[m.GroupRewards]:
        columns = {task: batch.column(reward_column(task)).values for task in self._tasks}
        group_rows: dict[GroupId, list[int]] = {}
        for row, group in enumerate(batch.groups):
            group_rows.setdefault(group, []).append(row)
        for group, rows in group_rows.items():
            yield m.GroupRewards(group, {task: tuple(c[rows].tolist()) for task, c in columns.items()})


@dataclass(frozen=True)
class RewardWorkersSpec:
    """`num_workers` processes called `title`, which run the task `task`.

    A call may take `timeout_s`, the value of the setting `timeout_key`. Between calls a worker sends a
    heartbeat at least every `heartbeat_timeout_s`; during a call it need not, as native code may keep the
    thread that sends heartbeats from running.
    """

    consumer: ConsumerSpec
    title: str
    task: str
    num_workers: int
    timeout_s: float
    timeout_key: str
    heartbeat_timeout_s: float


@dataclass
class _WorkerRecord:
    """A worker and its last report."""

    worker: Worker
    since_s: float  # of that report
    is_ready: bool = False
    client_id: str = ""  # of the sample stream
    groups: tuple[GroupId, ...] = ()  # being scored


class RewardWorkers:
    """The processes of one task. A worker that crashes, stops responding or hangs in a call is replaced.

    The groups of a worker that crashes or stops responding are retried once, because usually they are not the
    cause. A group fails if a second worker is lost with it, or if its call takes too long.
    """

    def __init__(
        self,
        spec: RewardWorkersSpec,
        start_timeout_s: float,
        messages: WorkerMessages,
        notice: Callable[[str], None],
        clear: Callable[[Sequence[GroupId]], None],
        evict: Callable[[str], None],
    ) -> None:
        """Start the workers, whose messages are put into `messages`.

        `clear` removes failed groups from the stream, before another worker takes them. `evict` releases the
        leases of a stream client whose process has ended.
        """
        self._spec, self._start_timeout_s = spec, start_timeout_s
        self._messages, self._notice, self._clear, self._evict = messages, notice, clear, evict
        self._was_ever_ready, self._num_failed_starts, self._num_idle_failures = False, 0, 0
        self._is_stream_full = False
        self._retried: set[GroupId] = set()  # groups that were in a lost worker before
        self._records = [self._start(index) for index in range(spec.num_workers)]

    @property
    def num_workers(self) -> int:
        return len(self._records)

    @property
    def not_started(self) -> list[str]:
        """Names of the workers that have not started yet."""
        return [f"the {record.worker.name}" for record in self._records if not record.is_ready]

    def has(self, worker: Worker | None) -> bool:
        """Whether this is one of the current workers."""
        return any(record.worker is worker for record in self._records)

    def on_message(
        self,
        worker: Worker,
        message: m.WorkerReady | m.TaskStarted | m.TaskFailed | m.StreamFull | m.WorkerExited,
    ) -> list[m.TaskFailed]:
        """Returns the groups that cannot be scored.

        Raises InputError or RunError if the run cannot continue.
        """
        index = next(index for index, record in enumerate(self._records) if record.worker is worker)
        record = self._records[index]
        record.since_s = time.monotonic()
        match message:
            case m.WorkerReady(client_id=client_id):
                record.is_ready = self._was_ever_ready = True
                record.client_id = client_id
                self._num_failed_starts = 0
            case m.TaskStarted(groups):
                record.groups = groups
                if groups:
                    self._num_idle_failures = 0
            case m.StreamFull(reason) if not self._is_stream_full:  # once, so that the run can still be saved
                self._is_stream_full = True
                raise RunError(f"{worker.name}: {reason}")
            case m.TaskFailed():
                return [message]
            case m.WorkerExited() if not self._is_stream_full:
                return self._on_exited(index)
        return []

    def check_deadlines(self, asleep_s: float) -> list[m.TaskFailed]:
        """Replace workers that have timed out; returns the groups that cannot be scored.

        Time during which the driver was suspended, `asleep_s`, does not count. Raises RunError if a worker
        does not start.
        """
        failed: list[m.TaskFailed] = []
        for index, record in enumerate(self._records):
            record.since_s += asleep_s
            record.worker.last_message_s += asleep_s
            waited_s = time.monotonic() - record.since_s
            if not record.is_ready and waited_s > self._start_timeout_s:
                limit = f"runtime.start_timeout_s = {self._start_timeout_s:g} s"
                raise RunError(
                    f"the {record.worker.name} did not start within {limit}{record.worker.start_delay_reason}"
                )
            if not record.is_ready or self._is_stream_full:
                continue
            is_overdue = bool(record.groups) and waited_s > self._spec.timeout_s
            may_time_out = is_overdue or not record.groups
            if may_time_out and record.worker.has_timed_out(self._heartbeat_timeout_s(record)):
                failed += self._on_timed_out(index)
            elif is_overdue:
                failed.append(self._on_call_timed_out(index))
        return failed

    def worker_states(self) -> list[WorkerState]:
        """The state of each worker, with the groups that it scores."""
        return [self._worker_state(record) for record in self._records]

    def forget(self, group: GroupId) -> None:
        """The group is scored, or has failed."""
        self._retried.discard(group)

    def on_storage_replaced(self, remote: CurveAddress | None) -> None:
        """Connect to a new storage. Workers on its machine do so themselves; others restart with `remote`."""
        self._spec = replace(self._spec, consumer=replace(self._spec.consumer, remote=remote))
        for index, record in enumerate(self._records):
            if remote is not None and (record.worker.node or not record.is_ready):
                self._replace(index, "the sample stream has moved")

    def kill(self) -> None:
        for record in self._records:
            record.worker.kill()

    def _start(self, index: int) -> _WorkerRecord:
        spec = self._spec
        name = f"{spec.title} {index}" if spec.num_workers > 1 else spec.title
        return _WorkerRecord(Worker(name, run_consumer, spec.consumer, self._messages), time.monotonic())

    def _worker_state(self, record: _WorkerRecord) -> WorkerState:
        if not record.is_ready:
            return WorkerState(record.worker, False, self._start_timeout_s)
        if not record.groups:
            return WorkerState(record.worker, True, self._spec.heartbeat_timeout_s)
        names = ", ".join(f"group {group}" for group in record.groups[:MAX_NAMED])
        more = f" and {len(record.groups) - MAX_NAMED} more" if len(record.groups) > MAX_NAMED else ""
        activity = f"{names}{more}, for {time.monotonic() - record.since_s:.1f} s"
        return WorkerState(record.worker, True, self._spec.timeout_s, activity)

    def _replace(self, index: int, reason: str) -> None:
        record = self._records[index]
        record.worker.kill()
        if record.client_id:
            self._evict(record.client_id)
        self._records[index] = self._start(index)
        self._notice(f"the {record.worker.name} is replaced: {reason}")

    def _on_exited(self, index: int) -> list[m.TaskFailed]:
        record = self._records[index]
        reason = record.worker.exit_reason
        if not record.is_ready:
            self._check_failed_starts(record.worker)
        elif not record.groups:
            self._check_idle_failures(reason)
        return self._on_lost(index, reason, f"{self._spec.task} ended its process: {reason}")

    def _check_failed_starts(self, worker: Worker) -> None:
        """Raises InputError or RunError if no worker has ever started, or too many restarts have failed."""
        self._num_failed_starts += 1
        if worker.input_error and not self._was_ever_ready:
            raise InputError(worker.input_error)
        if not self._was_ever_ready or self._num_failed_starts == MAX_FAILED_STARTS:
            raise RunError(worker.exit_reason)

    def _check_idle_failures(self, reason: str) -> None:
        """Raises RunError if workers keep failing before they take a group: restarts would not help."""
        self._num_idle_failures += 1
        if self._num_idle_failures > MAX_IDLE_FAILURES * self.num_workers:
            before = plural(self._num_idle_failures - 1, "worker")
            raise RunError(f"{reason}; {before} failed before it, and none of them was scoring a group")

    def _heartbeat_timeout_s(self, record: _WorkerRecord) -> float:
        """A call that takes too long is checked for the last few heartbeats only."""
        timeout_s = self._spec.heartbeat_timeout_s
        return min(timeout_s, MISSED_HEARTBEATS * HEARTBEAT_S) if record.groups else timeout_s

    def _on_timed_out(self, index: int) -> list[m.TaskFailed]:
        """Replace a worker that sends no heartbeats."""
        record, spec = self._records[index], self._spec
        if record.groups:
            limit = f"{spec.timeout_key} = {spec.timeout_s:g} s"
            reason = f"the {record.worker.name} sent no heartbeat, and {limit} is over"
        else:
            limit = f"runtime.heartbeat_timeout_s = {spec.heartbeat_timeout_s:g} s"
            reason = f"the {record.worker.name} sent no heartbeat for more than {limit}"
            self._check_idle_failures(reason)
        return self._on_lost(index, reason, f"{spec.task} blocked its process: {reason}")

    def _on_call_timed_out(self, index: int) -> m.TaskFailed:
        """Replace a worker that runs, but whose call takes too long."""
        groups, spec = self._records[index].groups, self._spec
        reason = f"{spec.task} took longer than {spec.timeout_key} = {spec.timeout_s:g}"
        self._clear(groups)
        self._replace(index, reason)
        return m.TaskFailed(groups, reason, reason)

    def _on_lost(self, index: int, reason: str, failure: str) -> list[m.TaskFailed]:
        """Replace a worker; its groups are retried once, and then fail with the reason `failure`."""
        groups = self._records[index].groups
        failed = tuple(group for group in groups if group in self._retried)
        self._retried.update(groups)
        if failed:
            self._clear(failed)
        self._replace(index, reason)
        return [m.TaskFailed(failed, failure, failure)] if failed else []


@dataclass(frozen=True)
class RewardTask:
    """A reward function, its number of processes, the size of their batches, and its weight in the sum."""

    reward: RewardSpec
    timeout_s: float
    timeout_key: str
    weight: float = 1.0
    num_workers: int = 1
    batch_request: BatchRequest = ONE_GROUP
    heartbeat_timeout_s: float = 5.0

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def is_external(self) -> bool:
        """Whether its rewards come through the service."""
        return self.reward.function == SERVICE

    def lease_s(self, is_multi_node: bool = False) -> float:
        """Lease time of a group.

        The driver or the storage notices the end of a worker and releases its leases, so they need not
        expire. On several nodes both could miss it: there a lease lasts as long as a call may take.
        """
        if self.is_external:
            return self.timeout_s / 2
        return self.timeout_s if is_multi_node else NO_TIMEOUT

    def external_rewards(self, stream: RunStream) -> ExternalRewards:
        """Leases the groups of an external task."""
        return ExternalRewards(self.name, self.timeout_s, self.timeout_key, stream.folder, self.reward.model)

    def workers_spec(self, stream: RunStream) -> RewardWorkersSpec:
        """Its processes, as consumers of a stream."""
        consumer = ConsumerSpec(
            reward_column(self.name),
            stream.folder,
            partial(RewardWorker, self.reward),
            self.batch_request,
            stream.storage.remote,
        )
        return RewardWorkersSpec(
            consumer,
            title="reward worker" if self.name == REWARD else self.name,
            task=self.name,
            num_workers=self.num_workers,
            timeout_s=self.timeout_s,
            timeout_key=self.timeout_key,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )


def reward_tasks(config: Config, columns: tuple[str, ...] | None = None) -> list[RewardTask]:
    """The task of the section [reward], and one for each [[reward_task]]; `columns` are the dataset's."""
    model, reward = Path(config.model.path), config.reward
    heartbeat_timeout_s = config.runtime.heartbeat_timeout_s
    tasks = []
    if reward.function is not None:
        task = RewardTask(
            RewardSpec(REWARD, reward.function, "reward.function", model, columns=columns),
            reward.timeout_s,
            "reward.timeout_s",
            num_workers=reward.num_workers,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        tasks.append(task)
    for section in config.reward_task:
        key = f"reward_task.{section.name}"
        num_rows = section.micro_batch_size or (
            UNLIMITED_ROWS if section.micro_batch_tokens else ONE_GROUP.max_rows
        )
        task = RewardTask(
            RewardSpec(section.name, section.factory, f"{key}.class", model, section.options, columns),
            section.timeout_s,
            f"{key}.timeout_s",
            weight=section.weight,
            num_workers=section.num_workers,
            batch_request=BatchRequest(num_rows, section.micro_batch_tokens),
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        tasks.append(task)
    return tasks


class RewardManager:
    """Scores submitted groups: each group ends with one `GroupScored` or `ScoringFailed`."""

    def __init__(
        self,
        tasks: Sequence[RewardTask],
        stream: RunStream,
        start_timeout_s: float,
        messages: WorkerMessages,
        notice: Callable[[str], None],
    ) -> None:
        """Start the workers of `tasks`, which the stream has as consumers.

        Their messages are put into `messages`; the reader of the queue passes them to `on_message`.
        """
        self._stream, self._weights = stream, {task.name: task.weight for task in tasks}
        self._pending: dict[GroupId, tuple[bytes, Sequence[Sequence[int]]]] = {}  # arguments of `submit`
        self._task_rewards: dict[GroupId, dict[str, tuple[float, ...]]] = {}
        self.first_failure = ""  # reason and traceback of the first group that could not be scored
        self.external = {task.name: task.external_rewards(stream) for task in tasks if task.is_external}
        self._workers = [
            RewardWorkers(
                task.workers_spec(stream), start_timeout_s, messages, notice, self._clear, stream.evict
            )
            for task in tasks
            if not task.is_external
        ]
        self._scorers: list[RewardWorkers | ExternalRewards] = [*self._workers, *self.external.values()]
        is_replaceable = stream.storage.is_replaceable
        self._collect = partial(
            RewardCollector, stream.folder, [*self._weights], messages, is_replaceable=is_replaceable
        )
        if tasks:
            self._collect()

    @property
    def not_started(self) -> list[str]:
        """Names of the workers that have not started yet."""
        return [name for workers in self._workers for name in workers.not_started]

    @property
    def num_workers(self) -> int:
        return sum(workers.num_workers for workers in self._workers)

    def pop_task_rewards(self, group: GroupId) -> dict[str, tuple[float, ...]]:
        """The rewards of each task for a group just scored; empty with a single task. Returned once."""
        return self._task_rewards.pop(group, {})

    def submit(self, group: GroupId, prompt_row: bytes, held_out: Sequence[Sequence[int]] = ()) -> None:
        """Have all tasks score a group; an event follows. Arguments as of `RunStream.request_scores`."""
        self._pending[group] = prompt_row, held_out
        self._request(group)

    def on_storage_replaced(self) -> None:
        """Let all tasks score the unfinished groups again; the new storage already has their rows."""
        for workers in self._workers:
            workers.on_storage_replaced(self._stream.storage.remote)
        for external in self.external.values():
            external.on_storage_replaced()
        if self._weights:
            self._collect()
        for group in self._pending:
            self._request(group)

    def on_message(self, worker: Worker | None, message: Any) -> list[ScoringEvent] | None:
        """Events that follow from a message; None if it is not addressed to this object.

        Raises InputError or RunError if the run cannot continue.
        """
        if isinstance(message, m.GroupRewards):
            return self._on_rewards(message)
        if worker is None and isinstance(message, m.WorkerCrashed):
            raise RunError(f"rewards cannot be collected any more:\n{message.traceback}".rstrip())
        for workers in self._workers:
            if worker is not None and workers.has(worker):
                return self._on_failed(workers.on_message(worker, message))
        return None

    def check_deadlines(self, asleep_s: float = 0.0) -> list[ScoringEvent]:
        """Fail groups whose scoring takes too long; time that the driver was suspended does not count.

        Raises RunError if a worker does not start.
        """
        return [
            event for scorer in self._scorers for event in self._on_failed(scorer.check_deadlines(asleep_s))
        ]

    def worker_states(self) -> list[WorkerState]:
        """The state of each process."""
        return [state for workers in self._workers for state in workers.worker_states()]

    def kill(self) -> None:
        """End the workers; the collector ends with the storage."""
        for workers in self._workers:
            workers.kill()
        for external in self.external.values():
            external.close()

    def _request(self, group: GroupId) -> None:
        self._stream.request_scores(group, *self._pending[group])
        for external in self.external.values():
            external.add(group)

    def _on_rewards(self, message: m.GroupRewards) -> list[ScoringEvent]:
        group = message.group
        if group not in self._pending:
            return []  # it has failed meanwhile
        weighted = [
            [self._weights[task] * reward for reward in rewards] for task, rewards in message.rewards.items()
        ]
        totals = tuple(map(sum, zip(*weighted, strict=True)))
        for total in totals:
            if not math.isfinite(total):
                return self._on_failed(
                    [m.TaskFailed((group,), f"the weighted sum of rewards is {total}", "")]
                )
        self._finish(group)
        if len(self._weights) > 1:
            self._task_rewards[group] = message.rewards
        return [GroupScored(group, totals)]

    def _on_failed(self, failed: Iterable[m.TaskFailed]) -> list[ScoringEvent]:
        events: list[ScoringEvent] = []
        for failure in failed:
            for group in failure.groups:
                if group in self._pending:  # else another task has failed it already
                    self.first_failure = self.first_failure or f"{failure.reason}\n{failure.detail}"
                    self._finish(group)
                    events.append(ScoringFailed(group, failure.reason))
        return events

    def _clear(self, groups: Iterable[GroupId]) -> None:
        """Remove failed groups from the stream; those scored meanwhile are the trainer's."""
        self._stream.clear([group for group in groups if group in self._pending])

    def _finish(self, group: GroupId) -> None:
        """Finish a group whose event is reported; the responses to held-out prompts are no longer needed."""
        self._pending.pop(group, None)
        for scorer in self._scorers:
            scorer.forget(group)
        if group.is_held_out:
            self._stream.clear([group])
