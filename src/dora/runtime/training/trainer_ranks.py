"""The trainer of a run: its processes, requests to them, and the events about it.

A restarted trainer loads the newest checkpoint and redoes the steps after it while engines keep generating.
An external trainer is not restarted, because the run cannot make it redo steps.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dora.core.actions import Train
from dora.core.events import DigestReported, Event, Published, StepFailed, TrainerLost, TrainerReplaced
from dora.core.types import GroupId
from dora.errors import RunError
from dora.journal.reader import JOURNAL_FILE, JournalLine, read_line
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import Worker, WorkerState
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.runtime.training.aux_pool import AuxPool
from dora.runtime.training.checkpoints import CheckpointManager
from dora.runtime.training.external import ExternalTrainer, run_placeholder
from dora.runtime.training.worker import RENDEZVOUS_FILE, run_follower, run_trainer
from dora.text import plural, step_number
from dora.trainer.checkpoint_folders import checkpoint_folders, find_damage, recover_replaced

MAX_STEP_FAILURES = 3  # of one training step before the run ends


class TrainerRanks:
    """The driver's side of the trainer: sends requests to rank 0 and turns messages of all ranks into events.

    The ranks, and the critic, fill one slot: if one of them is lost, all restart from the checkpoint.
    """

    def __init__(
        self,
        setup: RunSetup,
        folders: tuple[Path, Path],
        start: tuple[int, Path | None],
        supervisor: Supervisor,
        events: deque[Event],
        sample_book: SampleBook,
        checkpoints: CheckpointManager,
        on_published: Callable[[int, str], None],
        notice: Callable[[str], None],
        host: str | None = None,
    ) -> None:
        """`folders`: of the weights and of the stream. `start`: number of trained steps and their checkpoint.

        `on_published(version, digest)` is called before the event `Published` is appended to `events`.
        `host` is the address of this machine for ranks on other ones.
        """
        self._setup, self._folders, self._supervisor, self._notice = setup, folders, supervisor, notice
        self._host = host if setup.config.ray.trainer_nodes == "any" else None
        self._events, self._sample_book, self._checkpoints = events, sample_book, checkpoints
        self._on_published = on_published
        self._num_trained, checkpoint = start
        self._from_step = self._num_trained  # where the current trainer started
        self._digests: dict[int, str] = {}  # version -> digest, as last published
        self._step_failures: Counter[int] = Counter()
        timeout_s = setup.config.runtime.trainer_timeout_s
        self._role = Role("trainer", "runtime.trainer_timeout_s", timeout_s)
        self._slot = supervisor.add(self, self._role)
        self.can_restart = False  # set while the main loop runs: only then are the events of a loss handled
        self._is_restarting = False  # the orchestrator waits for `TrainerReplaced`
        self.is_in_step = False
        self._is_stored = True  # whether the last requested version goes to the weight store
        self._start(checkpoint)

    def _start(self, checkpoint: Path | None) -> None:
        """Start all processes, rank 0 first; for an external trainer, and without steps, a placeholder."""
        self._pending_since_s: float | None = None  # time of the oldest request without a reply
        self._num_pending = 0  # replies
        setup, slot, (weights, stream) = self._setup, self._slot, self._folders
        (weights / RENDEZVOUS_FILE).unlink(missing_ok=True)
        spec = setup.trainer_spec(weights, stream, checkpoint)
        if not setup.config.run.steps:
            spec = replace(spec, columns=(), num_ranks=1)
        if self._host is not None:
            spec = replace(spec, rank_address=f"{self._host}:{_free_port(self._host)}")
        if setup.config.service.trainer == "external":
            placeholder = ExternalTrainer(spec, setup.limits.batch_size, self._supervisor.messages)
            self.rank0 = self._supervisor.watch(slot, placeholder)
        else:
            name, target = "trainer", run_trainer
            if not setup.config.run.steps:
                name, target = "weight publisher", run_placeholder
            self.rank0 = self._supervisor.start(slot, name, target, spec)
        device = setup.devices.aux_device() if spec.columns else ""
        self._aux = AuxPool(spec, device, self._supervisor, slot, self._role, self._notice)
        for rank in range(1, spec.num_ranks):
            follower = replace(spec, rank=rank, device=setup.devices.trainer_device(rank))
            self._supervisor.start(slot, f"trainer rank {rank}", run_follower, follower)

    @property
    def ranks(self) -> list[Worker]:
        """All processes of the trainer, rank 0 first, aux workers last."""
        return [*self._slot.workers, *self._aux.workers]

    @property
    def is_ready(self) -> bool:
        """Whether all processes have started."""
        return self._slot.is_ready and self._aux.is_ready

    def worker_states(self) -> list[WorkerState]:
        """The state of each process."""
        return [*self._supervisor.states(self), *self._supervisor.states(self._aux)]

    def ignore_exit(self) -> None:
        """From now on an exit of the trainer is not a loss: everything is saved."""
        self._slot.is_draining = True

    def send(self, message: object) -> None:
        """Send a request to rank 0. Every request but `AccumulateGroup` is answered by one reply."""
        if not isinstance(message, m.AccumulateGroup):
            self._num_pending += 1
            if self._pending_since_s is None:
                self._pending_since_s = self._supervisor.clock.now_s
        self.is_in_step |= isinstance(message, m.TrainStep)
        if isinstance(message, m.PublishWeights):
            self._is_stored = message.is_stored
        self.rank0.send(message)
        self._aux.send(message)

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        """Turn a message into events. Raises RunError if the run cannot continue."""
        merged = self._aux.merge(message)
        if isinstance(self.rank0, ExternalTrainer):
            merged = self.rank0.on_message(merged)
        match merged:
            case None:
                return
            case m.WorkerReady():
                self._on_ready()
            case _:
                self._num_pending -= 1
                self._pending_since_s = self._supervisor.clock.now_s if self._num_pending else None
                self._on_reply(merged)

    def _on_reply(self, message: object) -> None:
        match message:
            case m.CheckpointSaved() | m.CheckpointFailed():
                self._checkpoints.on_message(message)
            case m.WeightsPublished(version, digest):
                self._check_digest(version, digest)
                if is_stored := self._is_stored:
                    self._on_published(version, digest)
                self._events.append(
                    Published(version, digest) if is_stored else DigestReported(version, digest)
                )
            case m.StepRejected():
                self.is_in_step = False
                self._on_step_failed(message)
            case m.StepCompleted(step):
                self.is_in_step = False
                if step >= self._num_trained:
                    self._num_trained, self._slot.made_progress = step + 1, True
                self._events.append(self._sample_book.record_step(message))

    def check_deadlines(self) -> None:
        """A trainer that takes too long for a request is lost. Raises RunError if it is not restarted."""
        since_s, timeout_s = self._pending_since_s, self._setup.config.runtime.step_timeout_s
        is_overdue = since_s is not None and self._supervisor.clock.now_s > since_s + timeout_s
        if is_overdue and self._slot.ready and not isinstance(self.rank0, ExternalTrainer):
            limit = f"runtime.step_timeout_s = {timeout_s:g} s"
            reason = f"trainer sent no reply within {limit}"
            self._supervisor.report_lost(self._slot, reason, is_timeout=True)

    def on_storage_replaced(self) -> None:
        """Adapt to a new storage of the stream, which numbers rows differently and has empty aux columns.

        Aux workers fill their columns again. A trainer whose ranks share row numbers, or whose critic has
        been updated meanwhile, is lost. Raises RunError if it cannot be restarted.
        """
        if not self.can_restart:
            return
        if len(self._slot.workers) == 1:
            self._aux.recompute_columns()
        elif self._slot.workers:
            reason = "its processes shared data in the storage of the sample stream, which was lost"
            self._supervisor.report_lost(self._slot, reason)

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """The next trainer redoes the steps since the checkpoint. Raises RunError if there is none."""
        if loss.is_drained:
            return
        is_restartable = self.can_restart and not isinstance(self.rank0, ExternalTrainer)
        if loss.restart_in_s is None or not is_restartable:
            slot.restart_at_s = None
            raise loss.error
        self._aux.end()
        self.is_in_step, self._pending_since_s, self._num_pending = False, None, 0
        self._checkpoints.discard_pending()
        self._notice(
            f"trainer lost ({loss.reason}): engines keep generating; restarting in {loss.restart_in_s:g} s"
        )
        self._events.append(TrainerLost(loss.reason))

    def restart(self, slot: Slot) -> None:
        """Start a trainer from the newest checkpoint that is not damaged."""
        folder = self._setup.out / "checkpoints"
        recover_replaced(folder)
        self._from_step, self._is_restarting, checkpoint = 0, True, None
        for step, path in checkpoint_folders(folder).items():
            if step > self._num_trained:
                continue
            if not (damage := find_damage(path)):
                self._from_step, checkpoint = step, path
                break
            self._notice(f"warning: {path} is not used: {damage}")
        self._start(checkpoint)

    def _on_ready(self) -> None:
        """Report a restarted trainer once all its processes are ready. An aux worker is not reported."""
        if not (self._is_restarting and self.is_ready):
            return
        self._is_restarting = False
        steps = range(self._from_step, self._num_trained)
        kept = plural(self._from_step, "trained step")
        self._notice(f"trainer restarted: {kept} kept, {len(steps)} redone")
        self._events.append(TrainerReplaced(self._from_step, _recorded_batches(self._setup.out, steps)))

    def _check_digest(self, version: int, digest: str) -> None:
        """Raises RunError if a checkpoint gives other weights than those that were saved in it."""
        published = self._digests.get(version, digest)
        if version == self._from_step and digest != published:
            raise RunError(
                f"the checkpoint of version {version} has weights with digest {digest}, but {published} was "
                "published. Remove the checkpoint and resume from the previous one: "
                f"{self._setup.config.resume_command} {self._setup.out}"
            )
        self._digests[version] = digest

    def _on_step_failed(self, message: m.StepRejected) -> None:
        """Repeat a failed step, which has changed nothing. Raises RunError after MAX_STEP_FAILURES."""
        self._step_failures[message.step] += 1
        failure = f"training step {step_number(message.step)} failed: {message.reason}"
        if self._step_failures[message.step] == MAX_STEP_FAILURES:
            raise RunError(f"{failure}; it failed {MAX_STEP_FAILURES} times, the weights are unchanged")
        self._notice(f"{failure}; the weights are unchanged, repeating the step")
        self._events.append(StepFailed(message.step, message.reason))


def _free_port(host: str) -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _recorded_batches(run: Path, steps: range) -> tuple[tuple[GroupId, ...], ...]:
    """The batches of steps as the journal has them, in order. Raises LookupError if one is missing."""
    batches: dict[int, tuple[GroupId, ...]] = {}
    path = run / JOURNAL_FILE
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if b'"kind": "train"' in line:  # few lines: all others are skipped unparsed
                train = read_line(path, number, line)
                assert isinstance(train, JournalLine)
                assert isinstance(train.record, Train)
                batches[train.record.step] = train.record.groups
    return tuple(batches[step] for step in steps)
