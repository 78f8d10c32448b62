"""The driver's side of a trainer's auxiliary workers: sends them their part of the trainer's requests.

A lost aux worker is restarted and receives the pending groups again, because a committed group must not fail.
A critic has state that only a checkpoint holds, so the loss of a critic is the loss of the trainer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from dora.core.types import GroupId
from dora.runtime.process.messages import (
    AccumulateGroup,
    AuxWorkerSpec,
    ColumnFilled,
    CriticUpdated,
    SaveCheckpoint,
    StepCompleted,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
    WorkerExited,
)
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.training.aux_workers import run_aux_worker
from dora.runtime.training.worker import run_trainer

WORKER_NAMES = {"reference": "reference worker", "proximal": "proximal worker", "values": "critic"}
MAX_RESTARTS = 3  # of the worker of a column; the trainer is lost with the next one


class TrainerWithAuxWorkers(Worker):
    """A trainer some of whose columns come from aux workers. A step completes once the critic is updated too.

    `processes` are all processes, the trainer first.
    """

    def __init__(
        self, spec: TrainerSpec, device: str, messages: WorkerMessages, notice: Callable[[str], None]
    ) -> None:
        """`device` is that of the aux workers. `notice` prints a line."""
        self._specs = {column: AuxWorkerSpec(column, spec, device) for column in spec.columns}
        self._worker_messages, self._notice = messages, notice
        self._aux_workers = {column: self._start(column) for column in spec.columns}
        super().__init__("trainer", run_trainer, spec, messages)
        self.processes: list[Worker] = [self, *self._aux_workers.values()]
        self._num_restarts: Counter[str] = Counter()  # by column
        self._committed: dict[int, dict[GroupId, AccumulateGroup]] = defaultdict(dict)  # by step
        self._filled: dict[str, set[GroupId]] = defaultdict(set)  # column -> groups of these steps
        self._published: WeightsPublished | None = None  # the newest version
        self._critic_updated: CriticUpdated | None = None
        self._step_completed: StepCompleted | None = None

    def send(self, message: object) -> None:
        """Send a request to the trainer, and to the aux workers if it concerns them."""
        super().send(message)
        match message:
            case AccumulateGroup(step, group):
                self._commit(step, [group])
            case TrainStep(step, groups):
                self._commit(step, groups)  # groups of a step that is redone are not sent one by one
                self._send_to_aux(message)
            case SaveCheckpoint():
                self._send_to_aux(message)

    def on_message(self, worker: Worker, message: object) -> object | None:
        """Handle a message of one of `processes`; returns the message that the supervisor must handle, or
        None.
        """
        match message:
            case ColumnFilled(column, group):
                self._filled[column].add(group)
                return None
            case WorkerExited():
                if self._restart(worker):
                    return None
                self.kill()  # it would wait for columns, and for the critic's part of a checkpoint
                return message
            case WeightsPublished():
                self._published = message
                self._forget_before(message.version)
                self._send_to_aux(message)
                return message
            case CriticUpdated():
                self._critic_updated = message  # kept while the trainer repeats a failed step
                return self._merged_step()
            case StepCompleted() if "values" in self._specs:
                self._step_completed = message
                return self._merged_step()
            case StepCompleted(step):
                self._forget_before(step + 1)
                return message
            case _:
                return message

    def _merged_step(self) -> StepCompleted | None:
        """The completed step with the metrics of trainer and critic; None until both have reported."""
        updated, completed = self._critic_updated, self._step_completed
        if updated is None or completed is None:
            return None
        self._critic_updated = self._step_completed = None
        return replace(completed, metrics=completed.metrics | updated.metrics)

    def can_restart(self, worker: Worker) -> bool:
        """Whether `worker` is an aux worker that can be restarted without the trainer."""
        column = self._column_of(worker)
        return column is not None and column != "values" and self._num_restarts[column] < MAX_RESTARTS

    @property
    def can_recompute_columns(self) -> bool:
        """Whether all columns can be recomputed. Values cannot, because the critic has been updated since."""
        return "values" not in self._specs

    def recompute_columns(self) -> None:
        """Restart all aux workers to fill their columns in a new, empty storage of the stream."""
        self._filled.clear()
        for column, worker in [*self._aux_workers.items()]:
            worker.kill()
            self._replace(column, worker)

    def _column_of(self, worker: Worker) -> str | None:
        return next((column for column, own in self._aux_workers.items() if own is worker), None)

    def _start(self, column: str) -> Worker:
        return Worker(WORKER_NAMES[column], run_aux_worker, self._specs[column], self._worker_messages)

    def _commit(self, step: int, groups: Sequence[GroupId]) -> None:
        for group in groups:
            if group not in self._committed[step]:
                self._committed[step][group] = AccumulateGroup(step, group)
                self._send_to_aux(self._committed[step][group])

    def _forget_before(self, step: int) -> None:
        """Forget the groups of steps before `step`, which are complete."""
        for completed in [each for each in self._committed if each < step]:
            for group in self._committed.pop(completed):
                for filled in self._filled.values():
                    filled.discard(group)

    def _restart(self, worker: Worker) -> bool:
        """Restart a lost aux worker, if that is possible."""
        column = self._column_of(worker)
        if column is None or not self.can_restart(worker):
            return False
        self._num_restarts[column] += 1
        self._notice(f"{worker.exit_reason}: restarting it")
        self._replace(column, worker)
        return True

    def _replace(self, column: str, worker: Worker) -> None:
        """Start a new worker, and send it the newest version and the groups without the column."""
        new = self._aux_workers[column] = self._start(column)
        self.processes[self.processes.index(worker)] = new
        if self._published is not None:
            new.send(self._published)
        for commits in self._committed.values():
            for group, commit in commits.items():
                if group not in self._filled[column]:
                    new.send(commit)

    def _send_to_aux(self, message: object) -> None:
        for worker in self._aux_workers.values():
            worker.send(message)
