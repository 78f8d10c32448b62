"""Supervise the trainer of a run: start its processes, check their deadlines, restart it after a loss.

A restarted trainer loads the newest checkpoint and redoes the steps after it while engines keep generating.
An external trainer is not restarted, because the run cannot make it redo steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dora.core.actions import Train
from dora.core.events import DigestReported, Event, Published, StepFailed, TrainerLost, TrainerReplaced
from dora.core.types import GroupId
from dora.errors import RunError, WorkerTimeoutError
from dora.journal.reader import JOURNAL_FILE, read_line
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import RestartPolicy, Worker, WorkerMessages, WorkerState
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.runtime.training.aux_pool import TrainerWithAuxWorkers
from dora.runtime.training.checkpoints import CheckpointManager
from dora.runtime.training.external import ExternalTrainer
from dora.runtime.training.worker import RENDEZVOUS_FILE, run_follower, run_trainer
from dora.text import plural, step_number
from dora.trainer.checkpoint import complete_checkpoints, recover_replaced

MAX_STEP_FAILURES = 3  # of one training step before the run ends
_SLOT = 0  # of the restart policy: a run has one trainer


class TrainerSupervisor:
    """The driver's side of the trainer: sends requests to `rank0` and turns messages of all `ranks` into
    events.

    `ranks` are all processes of the trainer, aux workers included, rank 0 first.
    """

    def __init__(
        self,
        setup: RunSetup,
        folders: tuple[Path, Path],
        start: tuple[int, Path | None],
        messages: WorkerMessages,
        events: deque[Event],
        sample_book: SampleBook,
        checkpoints: CheckpointManager,
        on_published: Callable[[int, str], None],
        notice: Callable[[str], None],
    ) -> None:
        """`folders`: of the weights and of the stream. `start`: number of trained steps and their checkpoint.

        `on_published(version, digest)` is called before the event `Published` is appended to `events`.
        """
        self._setup, self._folders, self._messages, self._notice = setup, folders, messages, notice
        self._events, self._sample_book, self._checkpoints = events, sample_book, checkpoints
        self._on_published = on_published
        self._num_trained, checkpoint = start
        self._from_step = self._num_trained  # where the current trainer started
        self._digests: dict[int, str] = {}  # version -> digest, as last published
        self._step_failures: Counter[int] = Counter()
        self._restarts = RestartPolicy(setup.config.runtime.max_restarts)
        self.can_restart = False  # while the orchestrator runs, which handles the events of a loss
        self._is_restarting = False  # the orchestrator waits for `TrainerReplaced`
        self._ignores_exit = False
        self.is_in_step = False
        self._is_stored = True  # whether the last requested version goes to the weight store
        self._start(checkpoint)

    def _start(self, checkpoint: Path | None) -> None:
        self._started_s, self._num_trained_at_start = time.monotonic(), self._num_trained
        self._ready: set[str] = set()
        self._pending_since_s: float | None = None  # time of the oldest request without a reply
        self._num_pending = 0  # replies
        self.ranks = start_ranks(self._setup, *self._folders, checkpoint, self._messages, self._notice)
        self.rank0: Worker = self.ranks[0]

    @property
    def not_started(self) -> list[str]:
        """Names of the processes that have not started yet."""
        return [rank.name for rank in self.ranks if rank.name not in self._ready]

    @property
    def restart_at_s(self) -> float | None:
        """When a lost trainer is restarted (s, time.monotonic)."""
        return self._restarts.due_s.get(_SLOT)

    def worker_states(self) -> list[WorkerState]:
        """The state of each process."""
        timeout_s = self._setup.config.runtime.trainer_timeout_s
        return [WorkerState(rank, rank.name in self._ready, timeout_s) for rank in self.ranks]

    def ignore_exit(self) -> None:
        """From now on an exit of the trainer is not a loss: everything is saved."""
        self._ignores_exit = True

    def send(self, message: object) -> None:
        """Send a request to rank 0. Every request but `AccumulateGroup` is answered by one reply."""
        if not isinstance(message, m.AccumulateGroup):
            self._num_pending += 1
            if self._pending_since_s is None:
                self._pending_since_s = time.monotonic()
        self.is_in_step |= isinstance(message, m.TrainStep)
        if isinstance(message, m.PublishWeights):
            self._is_stored = message.is_stored
        self.rank0.send(message)

    def on_message(self, rank: Worker, message: object) -> None:
        """Turn a message of one of `ranks` into events. Raises RunError if the run cannot continue."""
        if isinstance(self.rank0, TrainerWithAuxWorkers):
            message = self.rank0.on_message(rank, message)
        elif isinstance(self.rank0, ExternalTrainer):
            message = self.rank0.on_message(message)
        match message:
            case None:
                return
            case m.WorkerExited():
                self._on_lost(rank.exit_reason, rank.traceback)
            case m.WorkerReady():
                self._on_ready(rank)
            case _:
                self._num_pending -= 1
                self._pending_since_s = time.monotonic() if self._num_pending else None
                self._on_reply(message)

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
                self._num_trained = max(self._num_trained, step + 1)
                self._events.append(self._sample_book.record_step(message))

    def check_deadlines(self, driver_asleep_s: float) -> None:
        """Restart a lost trainer once its delay is over; treat one that missed a deadline as lost.

        Time for which the driver itself was suspended does not count. Raises RunError if the run cannot
        continue.
        """
        now_s = time.monotonic()
        self._started_s += driver_asleep_s
        if self._pending_since_s is not None:
            self._pending_since_s += driver_asleep_s
        if self._restarts.pop_due(now_s):
            self._restart()
        if (missed := self._missed_deadline(now_s, driver_asleep_s)) is not None:
            self._on_lost(missed, is_timeout=True)
        elif self._is_start_overdue(now_s):
            limit = f"runtime.start_timeout_s = {self._setup.config.runtime.start_timeout_s:g} s"
            self._on_lost(f"{', '.join(self.not_started)} not ready within {limit}")

    def _missed_deadline(self, now_s: float, driver_asleep_s: float) -> str | None:
        """Which deadline of a started trainer is over, as the reason of its loss."""
        runtime = self._setup.config.runtime
        if timed_out := self._timed_out_ranks(driver_asleep_s):
            limit = f"runtime.trainer_timeout_s = {runtime.trainer_timeout_s:g} s"
            return f"{timed_out[0].name} sent no heartbeat for more than {limit}"
        since_s = self._pending_since_s
        is_overdue = since_s is not None and now_s > since_s + runtime.step_timeout_s
        if is_overdue and self._ready and not isinstance(self.rank0, ExternalTrainer):
            return f"trainer sent no reply within runtime.step_timeout_s = {runtime.step_timeout_s:g} s"
        return None

    def _timed_out_ranks(self, driver_asleep_s: float) -> list[Worker]:
        """Ranks without a heartbeat. Restartable aux workers are killed instead, which restarts them."""
        timeout_s = self._setup.config.runtime.trainer_timeout_s
        timed_out = []
        for rank in self.ranks:
            rank.last_message_s += driver_asleep_s
            if rank.name not in self._ready or not rank.has_timed_out(timeout_s):
                continue
            if isinstance(self.rank0, TrainerWithAuxWorkers) and self.rank0.can_restart(rank):
                rank.last_message_s = time.monotonic()  # so that it is killed once
                rank.kill()
            else:
                timed_out.append(rank)
        return timed_out

    def _is_start_overdue(self, now_s: float) -> bool:
        start_timeout_s = self._setup.config.runtime.start_timeout_s
        return self.can_restart and bool(self.not_started) and now_s > self._started_s + start_timeout_s

    def on_storage_replaced(self) -> None:
        """Adapt to a new storage of the stream, which numbers rows differently and has empty aux columns.

        Aux workers fill their columns again. A trainer whose ranks share row numbers, or whose critic has
        been updated meanwhile, is lost. Raises RunError if it cannot be restarted.
        """
        if not (self.can_restart and self.ranks):
            return
        trainer, num_ranks = self.rank0, self._setup.config.trainer.num_ranks
        if num_ranks == 1 and isinstance(trainer, TrainerWithAuxWorkers) and trainer.can_recompute_columns:
            trainer.recompute_columns()
        elif len(self.ranks) > 1:
            self._on_lost("its processes shared data in the storage of the sample stream, which was lost")

    def kill(self) -> None:
        """Kill all processes."""
        for rank in self.ranks:
            rank.kill()

    def _on_ready(self, rank: Worker) -> None:
        """Report a restarted trainer once all its ranks are ready; a restarted aux worker is not reported."""
        self._ready.add(rank.name)
        if not self._is_restarting or self.not_started:
            return
        self._is_restarting = False
        steps = range(self._from_step, self._num_trained)
        kept = plural(self._from_step, "trained step")
        self._notice(f"trainer restarted: {kept} kept, {len(steps)} redone")
        self._events.append(TrainerReplaced(self._from_step, _recorded_batches(self._setup.out, steps)))

    def _on_lost(self, reason: str, traceback: str = "", *, is_timeout: bool = False) -> None:
        """Kill the remaining processes of the trainer and schedule its restart. Raises RunError without
        restarts left.
        """
        if self._ignores_exit:
            return
        is_restartable = self.can_restart and not isinstance(self.rank0, ExternalTrainer)
        delay_s = self._schedule_restart() if is_restartable else None
        if delay_s is None:
            max_restarts = self._restarts.max_restarts
            if is_restartable and max_restarts:
                reason += f"; it was restarted runtime.max_restarts = {max_restarts} times"
            error = WorkerTimeoutError if is_timeout else RunError
            raise error(
                f"{reason}; the run cannot continue without its trainer. Resume the run: "
                f"dora train --resume {self._setup.out}\n{traceback}".rstrip()
            )
        self.kill()
        self.ranks, self.is_in_step, self._pending_since_s, self._num_pending = [], False, None, 0
        self._checkpoints.discard_pending()
        self._notice(f"trainer lost ({reason}): engines keep generating; restarting in {delay_s:g} s")
        self._events.append(TrainerLost(reason))

    def _schedule_restart(self) -> float | None:
        """Seconds until the restart; None if the trainer was restarted too often."""
        now_s = time.monotonic()
        uptime_s, made_progress = now_s - self._started_s, self._num_trained > self._num_trained_at_start
        return self._restarts.on_lost(_SLOT, _SLOT, uptime_s, now_s, made_progress=made_progress)

    def _restart(self) -> None:
        """Start a trainer from the newest checkpoint."""
        folder = self._setup.out / "checkpoints"
        recover_replaced(folder)
        checkpoints = complete_checkpoints(folder).items()
        found = {step: path for step, path in checkpoints if step <= self._num_trained}
        self._from_step, self._is_restarting = max(found, default=0), True
        self._start(found.get(self._from_step))

    def _check_digest(self, version: int, digest: str) -> None:
        """Raises RunError if a checkpoint gives other weights than those that were saved in it."""
        published = self._digests.get(version, digest)
        if version == self._from_step and digest != published:
            raise RunError(
                f"the checkpoint of version {version} has weights with digest {digest}, but {published} was "
                "published. Remove the checkpoint and resume from the previous one: "
                f"dora train --resume {self._setup.out}"
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


def start_ranks(
    setup: RunSetup,
    weights: Path,
    stream: Path,
    checkpoint: Path | None,
    messages: WorkerMessages,
    notice: Callable[[str], None],
) -> list[Worker]:
    """Start all processes of a trainer, rank 0 first; for an external trainer, its placeholder.

    Processes of an earlier trainer must have exited.
    """
    (weights / RENDEZVOUS_FILE).unlink(missing_ok=True)
    spec = setup.trainer_spec(weights, stream, checkpoint)
    if setup.config.service.trainer == "external":
        return [ExternalTrainer(spec, setup.limits.batch_size, messages)]
    if spec.columns:
        ranks = TrainerWithAuxWorkers(spec, setup.devices.aux_device(), messages, notice).processes
    else:
        ranks = [Worker("trainer", run_trainer, spec, messages)]
    for rank in range(1, spec.num_ranks):
        follower = replace(spec, rank=rank, device=setup.devices.trainer_device(rank))
        ranks.append(Worker(f"trainer rank {rank}", run_follower, follower, messages))
    return ranks


def _recorded_batches(run: Path, steps: range) -> tuple[tuple[GroupId, ...], ...]:
    """The batches of steps as the journal has them, in order. Raises LookupError if one is missing."""
    batches: dict[int, tuple[GroupId, ...]] = {}
    path = run / JOURNAL_FILE
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if b'"kind": "train"' in line:  # few lines: all others are skipped unparsed
                action = read_line(path, number, line).record
                assert isinstance(action, Train)
                batches[action.step] = action.groups
    return tuple(batches[step] for step in steps)
