"""The driver's side of a trainer's auxiliary workers: sends them their part of the trainer's requests.

A lost aux worker is restarted and receives the pending groups again, because a committed group must not fail.
A critic has state that only a checkpoint holds, so it fills the trainer's slot: its loss is the trainer's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
)
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import Worker
from dora.runtime.training.aux_workers import run_aux_worker

WORKER_NAMES = {"reference": "reference worker", "proximal": "proximal worker", "values": "critic"}


class AuxPool:
    """The aux workers of one trainer. A step completes once the critic is updated, too."""

    def __init__(
        self,
        spec: TrainerSpec,
        device: str,
        supervisor: Supervisor,
        trainer: Slot,
        role: Role,
        notice: Callable[[str], None],
    ) -> None:
        """`device` is that of the aux workers, `trainer` the slot of the trainer, `role` its role."""
        self._specs = {column: AuxWorkerSpec(column, spec, device) for column in spec.columns}
        self._supervisor, self._trainer, self._notice = supervisor, trainer, notice
        self._critic: Worker | None = None
        self._slots: dict[str, Slot] = {}  # by column; without the critic
        self._committed: dict[int, dict[GroupId, AccumulateGroup]] = defaultdict(dict)  # by step
        self._filled: dict[str, set[GroupId]] = defaultdict(set)  # column -> groups of these steps
        self._published: WeightsPublished | None = None  # the newest version
        self._critic_updated: CriticUpdated | None = None
        self._step_completed: StepCompleted | None = None
        role = replace(role, restarts_at_once=True)
        for column in spec.columns:
            if column == "values":
                self._critic = self._start(column, trainer)
            else:
                self._slots[column] = supervisor.add(self, role)
                self._start(column, self._slots[column])

    @property
    def workers(self) -> list[Worker]:
        """The workers, without the critic."""
        return [worker for slot in self._slots.values() for worker in slot.workers]

    @property
    def is_ready(self) -> bool:
        """Whether all have started."""
        return all(slot.is_ready for slot in self._slots.values())

    def send(self, message: object) -> None:
        """Send a request of the trainer to the aux workers, if it concerns them."""
        if not self._specs:
            return
        match message:
            case AccumulateGroup(step, group):
                self._commit(step, [group])
            case TrainStep(step, groups):
                self._commit(step, groups)  # groups of a step that is redone are not sent one by one
                self._send_to_all(message)
            case SaveCheckpoint():
                self._send_to_all(message)

    def merge(self, message: object) -> object | None:
        """What the driver handles after a message of a trainer or aux process; None: nothing yet."""
        match message:
            case ColumnFilled(column, group):
                self._filled[column].add(group)
                return None
            case WeightsPublished():
                self._published = message
                self._forget_before(message.version)
                self._send_to_all(message)
                return message
            case CriticUpdated():
                self._critic_updated = message  # kept while the trainer repeats a failed step
                return self._merged_step()
            case StepCompleted() if self._critic is not None:
                self._step_completed = message
                return self._merged_step()
            case StepCompleted(step):
                self._forget_before(step + 1)
                return message
            case _:
                return message

    def recompute_columns(self) -> None:
        """Restart the workers to fill their columns in a new, empty storage of the stream."""
        self._filled.clear()
        for slot in self._slots.values():
            self._supervisor.end(slot)
            self.restart(slot)

    def end(self) -> None:
        """Kill the workers for good: the trainer is lost."""
        for slot in self._slots.values():
            self._supervisor.remove(slot)
        self._slots.clear()

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        if isinstance(message, ColumnFilled):
            slot.made_progress = True
        self._trainer.owner.on_message(slot, worker, message)

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """If no restarts are left, the trainer is lost, too, because it waits for the column."""
        if loss.restart_in_s is None:
            self._supervisor.report_lost(self._trainer, loss.reason, loss.worker)
        else:
            delay = f" in {loss.restart_in_s:g} s" if loss.restart_in_s else ""
            self._notice(f"{loss.reason}: restarting it{delay}")

    def restart(self, slot: Slot) -> None:
        """Start a new worker, and send it the newest version and the groups without the column."""
        column = next(column for column, own in self._slots.items() if own is slot)
        worker = self._start(column, slot)
        if self._published is not None:
            worker.send(self._published)
        for commits in self._committed.values():
            for group, commit in commits.items():
                if group not in self._filled[column]:
                    worker.send(commit)

    def _start(self, column: str, slot: Slot) -> Worker:
        return self._supervisor.start(slot, WORKER_NAMES[column], run_aux_worker, self._specs[column])

    def _merged_step(self) -> StepCompleted | None:
        """The completed step with the metrics of trainer and critic; None until both have reported."""
        updated, completed = self._critic_updated, self._step_completed
        if updated is None or completed is None:
            return None
        self._critic_updated = self._step_completed = None
        return replace(completed, metrics=completed.metrics | updated.metrics)

    def _commit(self, step: int, groups: Sequence[GroupId]) -> None:
        for group in groups:
            if group not in self._committed[step]:
                self._committed[step][group] = AccumulateGroup(step, group)
                self._send_to_all(self._committed[step][group])

    def _forget_before(self, step: int) -> None:
        """Forget the groups of steps before `step`, which are complete."""
        for completed in [each for each in self._committed if each < step]:
            for group in self._committed.pop(completed):
                for filled in self._filled.values():
                    filled.discard(group)

    def _send_to_all(self, message: object) -> None:
        for worker in [*self.workers, *([] if self._critic is None else [self._critic])]:
            worker.send(message)
