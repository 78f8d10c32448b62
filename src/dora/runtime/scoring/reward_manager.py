"""Score groups with the reward tasks of a run: a group is scored once all tasks have scored it.

The processes of each task take groups out of the sample stream and send their rewards to the driver. The
weighted sum over all tasks is what the orchestrator and the trainer see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dora.config.schema import Config
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import HEARTBEAT_S, Worker, WorkerState
from dora.runtime.sample_book import TaskRewards
from dora.runtime.scoring.external import SERVICE, ExternalRewards
from dora.runtime.scoring.reward_worker import REPORT_INTERVAL_S, REWARD, run_reward_worker
from dora.stream.metadata import NO_TIMEOUT, BatchRequest
from dora.stream.run_stream import RunStream
from dora.stream.sample_db import FinishedSample, HeldOutResponse

MAX_SILENCE_S = 2.5 * HEARTBEAT_S  # of a worker whose call takes too long
MAX_NAMED = 3  # groups of a worker that a status display names
ONE_GROUP = BatchRequest()
UNLIMITED_ROWS = 1_000_000  # per batch, where only the number of tokens is limited

ScoringEvent = GroupScored | ScoringFailed


@dataclass
class _Call:
    """What the worker of a slot does, by its last report."""

    since_s: float = 0.0  # of that report
    client_id: str = ""  # of the sample stream
    groups: tuple[GroupId, ...] = ()  # being scored


class RewardWorkers:
    """The processes of one task. The groups of a lost worker are retried once, because usually they are not
    the cause. A group fails if a second worker is lost with it, or if its call takes too long. If the call
    scored several groups, the next worker scores one at a time, so that only the cause fails.
    """

    def __init__(
        self,
        task: RewardTask,
        stream: RunStream,
        supervisor: Supervisor,
        pending: Container[GroupId],
        complete: Callable[[str, GroupId, tuple[float, ...]], None],
        report: Callable[[m.TaskFailed], None],
        notice: Callable[[str], None],
    ) -> None:
        """Start the workers. `pending` has the groups that wait for rewards.

        `complete` gets the task's rewards of a group, `report` groups that cannot be scored.
        """
        self._task, self._stream, self._supervisor, self._notice = task, stream, supervisor, notice
        self._pending, self._complete, self._report = pending, complete, report
        self._retried: set[GroupId] = set()  # groups that were in a lost worker before
        self._one_by_one: set[Slot] = set()  # whose worker gets one group at a time
        role = Role(f"{task.title}s", heartbeat_timeout_s=task.heartbeat_timeout_s, restarts_at_once=True)
        self._calls = {supervisor.add(self, role, number): _Call() for number in range(task.num_workers)}
        for slot in self._calls:
            self.restart(slot)

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        call = self._calls[slot]
        call.since_s = self._supervisor.clock.now_s
        match message:
            case m.WorkerReady(client_id=client_id):
                if call.client_id:  # of a lost connection, whose leases the worker could not end
                    self._stream.evict(call.client_id)
                call.client_id = client_id
            case m.TaskStarted(groups):
                call.groups, slot.has_task = groups, bool(groups)
                # A worker that ends after its result, but before the commit, gets the same group again.
                slot.made_progress |= any(group in self._pending for group in groups)
            case m.TaskCompleted(values):
                call.groups, slot.has_task = (), False
                for group, rewards in values.items():
                    self._complete(self._task.name, group, rewards)
            case m.TaskFailed():
                self._report(message)

    def check_deadlines(self) -> None:
        """Replace workers whose call takes too long."""
        task = self._task
        for slot, call in self._calls.items():
            limit_s = task.timeout_s + REPORT_INTERVAL_S
            if not call.groups or self._supervisor.clock.now_s - call.since_s <= limit_s:
                continue
            if self._supervisor.silence_s(slot.worker) > min(task.heartbeat_timeout_s, MAX_SILENCE_S):
                limit = f"{task.timeout_key} = {task.timeout_s:g} s"
                reason = f"{slot.name} sent no heartbeat, and {limit} is over"
                self._supervisor.report_lost(slot, reason, is_timeout=True)
            else:
                self._on_call_timed_out(slot)

    def worker_states(self) -> list[WorkerState]:
        """The state of each worker, with the groups that it scores."""
        states = self._supervisor.states(self)
        calls = {slot.worker: call for slot, call in self._calls.items() if slot.workers}
        return [self._with_activity(state, calls[state.worker]) for state in states]

    def forget(self, group: GroupId) -> None:
        """The group is scored, or has failed."""
        self._retried.discard(group)

    def on_storage_replaced(self) -> None:
        """Connect to a new storage. Workers on its machine do so themselves; others are replaced."""
        if self._stream.storage.remote is None:
            return
        for slot in self._calls:
            if slot.workers and (slot.worker.process.node or not slot.is_ready):
                self._replace(slot, "the sample stream has moved")

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """The groups are retried once, and then fail. Raises InputError or RunError without restarts left."""
        if loss.restart_in_s is None:
            raise loss.error
        groups = self._release(slot)
        cause = "blocked" if loss.is_timeout else "ended"
        delay = f" in {loss.restart_in_s:g} s" if loss.restart_in_s else ""
        self._notice(f"the {loss.worker.name} is replaced{delay}: {loss.reason}")
        is_alone = self._note_lost_call(slot, groups)
        failed = tuple(group for group in groups if is_alone and group in self._retried)
        self._retried.update(groups)
        if failed:
            failure = f"{self._task.name} {cause} its process: {loss.reason}"
            self._clear(failed)
            self._report(m.TaskFailed(failed, failure, failure))

    def restart(self, slot: Slot) -> None:
        task, stream = self._task, self._stream
        name = f"{task.title} {slot.number}" if task.num_workers > 1 else task.title
        self._calls[slot] = _Call()
        batch_request = ONE_GROUP if slot in self._one_by_one else task.batch_request
        spec = m.RewardWorkerSpec(task.reward, stream.folder, batch_request, stream.storage.remote)
        self._supervisor.start(slot, name, run_reward_worker, spec)

    def end(self) -> None:
        """Kill the workers."""
        for slot in self._calls:
            self._supervisor.end(slot)

    def _with_activity(self, state: WorkerState, call: _Call) -> WorkerState:
        if not (state.is_ready and call.groups):
            return state
        names = ", ".join(f"group {group}" for group in call.groups[:MAX_NAMED])
        more = f" and {len(call.groups) - MAX_NAMED} more" if len(call.groups) > MAX_NAMED else ""
        activity = f"{names}{more}, for {self._supervisor.clock.now_s - call.since_s:.1f} s"
        return state._replace(timeout_s=self._task.timeout_s, activity=activity)

    def _release(self, slot: Slot) -> tuple[GroupId, ...]:
        """End the leases of a worker that has exited; returns its groups."""
        call, self._calls[slot] = self._calls[slot], _Call()
        if call.client_id:
            self._stream.evict(call.client_id)
        return call.groups

    def _replace(self, slot: Slot, reason: str) -> None:
        """Replace a worker because of `reason`, which does not count against runtime.max_restarts."""
        name = slot.name
        self._supervisor.end(slot)
        self._release(slot)
        self.restart(slot)
        self._notice(f"the {name} is replaced: {reason}")

    def _on_call_timed_out(self, slot: Slot) -> None:
        """Replace a worker that runs, but whose call takes too long."""
        groups, task = self._calls[slot].groups, self._task
        reason = f"{task.name} took longer than {task.timeout_key} = {task.timeout_s:g}"
        is_alone = self._note_lost_call(slot, groups)
        if is_alone:
            self._clear(groups)
        self._replace(slot, reason)
        if is_alone:
            self._report(m.TaskFailed(groups, reason, reason))

    def _note_lost_call(self, slot: Slot, groups: Sequence[GroupId]) -> bool:
        """Whether the lost call scored a single group; else the slot's next worker gets one at a time."""
        if len(groups) > 1:
            self._one_by_one.add(slot)
        elif groups:  # the cause, also where it was in the lost calls of other workers
            for other in self._one_by_one - {slot}:
                for worker in other.workers:
                    worker.send(self._task.batch_request)
            self._one_by_one.clear()
        return len(groups) == 1

    def _clear(self, groups: Iterable[GroupId]) -> None:
        """Remove failed groups from the stream. The trainer reads those that were scored meanwhile."""
        self._stream.clear([group for group in groups if group in self._pending])


@dataclass(frozen=True)
class RewardTask:
    """A reward function, its number of processes, the size of their batches, and its weight in the sum.

    A call may take `timeout_s`, the value of the setting `timeout_key`. Between calls a worker sends a
    heartbeat at least every `heartbeat_timeout_s`; during a call it need not, as native code may keep the
    thread that sends heartbeats from running.
    """

    reward: m.RewardSpec
    timeout_s: float
    timeout_key: str
    weight: float = 1.0
    num_workers: int = 1
    batch_request: BatchRequest = ONE_GROUP
    heartbeat_timeout_s: float = 15.0

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def title(self) -> str:
        """What its processes are called."""
        return "reward worker" if self.name == REWARD else self.name

    @property
    def is_external(self) -> bool:
        """Whether its rewards come through the service; then it has neither processes nor a consumer."""
        return self.reward.function == SERVICE

    def lease_s(self, is_multi_node: bool = False) -> float:
        """Lease time of a group.

        The driver or the storage notices the end of a worker and releases its leases, so they need not
        expire. On several nodes both could miss it: there a lease lasts as long as a call may take.
        """
        return self.timeout_s if is_multi_node else NO_TIMEOUT


def reward_tasks(
    config: Config, columns: tuple[str, ...] | None = None, missing: Mapping[str, str] | None = None
) -> list[RewardTask]:
    """The task of the section [reward], and one for each [[reward_task]].

    `columns` are those of all datasets, `missing` as in `m.RewardSpec`.
    """
    given = columns, missing or {}
    model, reward = Path(config.model.path), config.reward
    heartbeat_timeout_s = config.runtime.heartbeat_timeout_s
    tasks = []
    if reward.function is not None:
        task = RewardTask(
            m.RewardSpec(REWARD, reward.function, "reward.function", model, {}, *given),
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
            m.RewardSpec(section.name, section.factory, f"{key}.class", model, section.options, *given),
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
        supervisor: Supervisor,
        responses: Callable[[GroupId], Sequence[FinishedSample]],
        report: Callable[[ScoringEvent, TaskRewards], None],
        notice: Callable[[str], None],
    ) -> None:
        """Start the workers of `tasks`, which the stream has as consumers.

        `responses` gives those of a group. `report` gets each event, and the rewards of a scored group by
        task if there are several tasks. `notice` gets the first failure of each task in full.
        """
        self._report, self._notice = report, notice
        self._stream, self._weights = stream, {task.name: task.weight for task in tasks}
        self._pending: dict[GroupId, tuple[bytes, Sequence[HeldOutResponse]]] = {}  # arguments of `submit`
        self._completed: dict[GroupId, dict[str, tuple[float, ...]]] = {}  # by task, of pending groups
        self.first_failure = ""  # reason and traceback of the first group that could not be scored
        self._failed_tasks: set[str] = set()
        self.external = {
            task.name: ExternalRewards(
                task.name, task.timeout_s, task.timeout_key, supervisor.clock, responses
            )
            for task in tasks
            if task.is_external
        }
        self._workers = [
            RewardWorkers(
                task,
                stream,
                supervisor,
                self._pending,
                self._on_completed,
                partial(self._on_failed, task.name),
                notice,
            )
            for task in tasks
            if not task.is_external
        ]

    def submit(self, group: GroupId, prompt_row: bytes, held_out: Sequence[HeldOutResponse] = ()) -> None:
        """Have all tasks score a group; an event follows. Arguments as of `RunStream.request_scores`."""
        self._pending[group] = prompt_row, held_out
        for external in self.external.values():
            external.add(group, prompt_row)
        if self._workers:
            self._stream.request_scores(group, prompt_row, held_out)

    def on_storage_replaced(self) -> None:
        """Let the workers score the unfinished groups again; the new storage already has their rows."""
        for workers in self._workers:
            workers.on_storage_replaced()
        for group in self._pending if self._workers else ():
            self._stream.request_scores(group, *self._pending[group])

    def check_deadlines(self) -> None:
        """Record the rewards of external tasks, and fail groups whose scoring takes too long.

        Raises RunError if the stream has ended.
        """
        self._stream.storage.check()
        for workers in self._workers:
            workers.check_deadlines()
        for task, external in self.external.items():
            for group, rewards in external.pop_accepted():
                self._on_completed(task, group, rewards)
            for failed in external.check_deadlines():
                self._on_failed(task, failed)

    def worker_states(self) -> list[WorkerState]:
        """The state of each process."""
        return [state for workers in self._workers for state in workers.worker_states()]

    def close(self) -> None:
        """End the workers."""
        for workers in self._workers:
            workers.end()

    def _on_completed(self, task: str, group: GroupId, rewards: tuple[float, ...]) -> None:
        """A group is scored once it has the rewards of all tasks."""
        if group not in self._pending:
            return  # another task has failed the group meanwhile, or a lost worker has scored it already
        completed = self._completed.setdefault(group, {})
        completed.setdefault(task, rewards)
        if len(completed) < len(self._weights):
            return
        task_rewards = {task: completed[task] for task in self._weights}
        weighted = [
            [self._weights[task] * reward for reward in rewards] for task, rewards in task_rewards.items()
        ]
        totals = tuple(map(sum, zip(*weighted, strict=True)))
        for total in totals:
            if not math.isfinite(total):
                reason = f"the weighted sum of rewards is {total}"
                return self._on_failed(task, m.TaskFailed((group,), reason, ""))
        self._finish(group)
        self._report(GroupScored(group, totals), task_rewards if len(self._weights) > 1 else {})

    def _on_failed(self, task: str, failure: m.TaskFailed) -> None:
        detail = "" if failure.detail == failure.reason else failure.detail
        for group in failure.groups:
            if group in self._pending:  # else another task has failed the group already
                text = f"{failure.reason}\n{detail}".rstrip()
                self.first_failure = self.first_failure or text
                if detail and task not in self._failed_tasks:  # the reason alone is printed for each group
                    self._failed_tasks.add(task)
                    self._notice(f"first failure of {task}, group {group}: {text}")
                self._finish(group)
                self._report(ScoringFailed(group, failure.reason), {})

    def _finish(self, group: GroupId) -> None:
        """Finish a group whose event is reported; the responses to held-out prompts are no longer needed."""
        self._pending.pop(group, None)
        self._completed.pop(group, None)
        for workers in self._workers:
            workers.forget(group)
        for external in self.external.values():
            external.forget(group)
        if group.is_held_out and self._workers:
            self._stream.clear([group])
