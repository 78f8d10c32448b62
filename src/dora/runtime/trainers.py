"""The trainer of a run as the driver sees it: its processes, their deadlines, and their successors.

These begin with the newest checkpoint, and redo the steps after it while engines generate. The stand-in of a
trainer outside has none: what has trained its steps is not here to redo them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from dora.core.events import Attested, Event, Published, StepFailed, TrainerLost, TrainerReplaced
from dora.core.wording import counted, nth
from dora.errors import RunError, SilentError
from dora.runtime import messages as m
from dora.runtime.checkpoints import Checkpoints
from dora.runtime.outside import OutsideTrainer
from dora.runtime.plan import Plan
from dora.runtime.process import Pulse, Told, Worker
from dora.runtime.ranks import silent_ranks, start_ranks
from dora.runtime.redo import recorded_batches
from dora.runtime.restarts import Restarts
from dora.runtime.stationed import StationedTrainer
from dora.runtime.telling import Teller
from dora.trainer.checkpoint import restore, whole_checkpoints

MAX_STEP_FAILURES = 3  # of one training step, before the run ends
_PLACE = 0  # a run has one trainer


class Trainers:
    """The trainer of the day is `now`; what it says becomes facts."""

    def __init__(
        self,
        plan: Plan,
        folders: tuple[Path, Path],
        start: tuple[int, Path | None],
        told: Told,
        facts: deque[Event],
        teller: Teller,
        checkpoints: Checkpoints,
        announce: Callable[[int, str], None],
        notice: Callable[[str], None],
    ) -> None:
        """`folders` are those of the weights and of the stream; `start` is how many steps the first one
        begins with, and the checkpoint of these. `announce` hears of a version before the fact is told.
        """
        self._plan, self._folders, self._told, self._notice = plan, folders, told, notice
        self._facts, self._teller, self._checkpoints, self._announce = facts, teller, checkpoints, announce
        self._num_trained, checkpoint = start
        self._from_step = self._num_trained
        self._digests: dict[int, str] = {}  # of each version, as last made
        self._step_failures: Counter[int] = Counter()
        self._restarts = Restarts(plan.config.runtime.max_restarts)
        self._may_replace = False  # once the orchestrator hears of it, and until it has stopped
        self._is_awaited = False  # the orchestrator waits for a successor
        self._is_done = False  # nobody needs it any more
        self.is_in_step = False
        self._is_stored = True  # the version that it was told to publish last
        self._begin(checkpoint)

    def _begin(self, checkpoint: Path | None) -> None:
        self._started_s, self._num_trained_before = time.monotonic(), self._num_trained
        self._ready: set[str] = set()
        self._owed_since_s: float | None = None  # when the first order was given that has no answer
        self._num_owed = 0
        self.ranks = start_ranks(self._plan, *self._folders, checkpoint, self._told, self._notice)
        self.now: Worker = self.ranks[0]

    @property
    def late(self) -> list[str]:
        """Those that have not started yet."""
        return [f"the {rank.name}" for rank in self.ranks if rank.name not in self._ready]

    @property
    def due_s(self) -> float | None:
        """When another one takes the place of a lost one (s, time.monotonic)."""
        return self._restarts.due_s.get(_PLACE)

    def pulses(self) -> list[Pulse]:
        timeout_s = self._plan.config.runtime.trainer_timeout_s
        return [Pulse(rank, rank.name in self._ready, timeout_s) for rank in self.ranks]

    def open(self, *, may_replace: bool) -> None:
        """From now on the orchestrator hears of a loss, or it does not any more."""
        self._may_replace = may_replace

    def excuse(self) -> None:
        """All is saved: whatever becomes of it now is no loss."""
        self._is_done = True

    def send(self, message: object) -> None:
        """An order that has an answer, or `Accumulate`, which has none."""
        if not isinstance(message, m.Accumulate):
            self._num_owed += 1
            if self._owed_since_s is None:
                self._owed_since_s = time.monotonic()
        self.is_in_step |= isinstance(message, m.TrainStep)
        if isinstance(message, m.PublishWeights):
            self._is_stored = message.is_stored
        self.now.send(message)

    def hear(self, rank: Worker, message: object) -> None:
        """Turn a word of one of `ranks` into facts. Raises RunError where the run cannot go on."""
        if isinstance(self.now, StationedTrainer):
            message = self.now.hear(rank, message)
        elif isinstance(self.now, OutsideTrainer):
            message = self.now.hear(message)
        match message:
            case None:
                return
            case m.Gone():
                return self._lose(rank.how_it_ended, rank.crash)
            case m.Ready():
                return self._is_ready(rank)
        self._num_owed -= 1
        self._owed_since_s = time.monotonic() if self._num_owed else None
        match message:
            case m.Saved() | m.SaveRefused():
                self._checkpoints.hear(message)
            case m.WeightsPublished(version, digest):
                self._made(version, digest)
                if is_stored := self._is_stored:
                    self._announce(version, digest)
                self._facts.append(Published(version, digest) if is_stored else Attested(version, digest))
            case m.StepRefused():
                self.is_in_step = False
                self._repeat(message)
            case m.StepDone(step):
                self.is_in_step = False
                self._num_trained = max(self._num_trained, step + 1)
                self._facts.append(self._teller.trained(message))

    def check(self, asleep_s: float) -> None:
        """Look at all deadlines, our own sleep left out; start another one whose time has come.

        Raises RunError where the run cannot go on.
        """
        runtime, now_s = self._plan.config.runtime, time.monotonic()
        self._started_s += asleep_s
        if self._owed_since_s is not None:
            self._owed_since_s += asleep_s
        if self._restarts.take(now_s):
            self._replace()
        for rank in silent_ranks(self.ranks, self._ready, runtime.trainer_timeout_s, asleep_s):
            limit = f"runtime.trainer_timeout_s = {runtime.trainer_timeout_s:g} s"
            self._lose(f"the {rank.name} was silent for more than {limit}", is_silent=True)
            return
        is_hung = self._owed_since_s is not None and now_s > self._owed_since_s + runtime.step_timeout_s
        if is_hung and self._ready and not isinstance(self.now, OutsideTrainer):
            limit = f"runtime.step_timeout_s = {runtime.step_timeout_s:g} s"
            self._lose(f"the trainer has answered no order for {limit}", is_silent=True)
        elif self._may_replace and self.late and now_s > self._started_s + runtime.start_timeout_s:
            self._lose(f"not ready within runtime.start_timeout_s = {runtime.start_timeout_s:g} s")

    def refill(self) -> None:
        """Another storage will have the rows under other numbers, and without what stations beside the
        trainer had filled in. Whoever cannot do with that begins anew. Raises RunError if nobody may.
        """
        if not (self._may_replace and self.ranks):
            return
        num_ranks = self._plan.config.trainer.num_ranks
        if num_ranks == 1 and isinstance(self.now, StationedTrainer) and self.now.can_refill:
            self.now.refill()
        elif len(self.ranks) > 1:
            self._lose("what its processes shared was in the storage that was lost")

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _is_ready(self, rank: Worker) -> None:
        """The orchestrator hears of a successor once all its ranks are there; of a new station, never."""
        self._ready.add(rank.name)
        if not self._is_awaited or self.late:
            return
        self._is_awaited = False
        steps = range(self._from_step, self._num_trained)
        done = counted(self._from_step, "step")
        self._notice(f"another trainer begins after {done}; {len(steps)} are redone")
        self._facts.append(TrainerReplaced(self._from_step, recorded_batches(self._plan.out, steps)))

    def _lose(self, why: str, crash: str = "", *, is_silent: bool = False) -> None:
        """It is gone, with what it was at. Raises RunError if it has no successor."""
        if self._is_done:
            return
        has_successor = self._may_replace and not isinstance(self.now, OutsideTrainer)
        now_s = time.monotonic()
        wait_s = None
        if has_successor:
            got_on = self._num_trained > self._num_trained_before  # by a step that nobody had trained
            wait_s = self._restarts.lost(_PLACE, _PLACE, now_s - self._started_s, now_s, got_on=got_on)
            if wait_s is None and self._restarts.most:
                why += f"; it was started again runtime.max_restarts = {self._restarts.most} times"
        if wait_s is None:
            kind = SilentError if is_silent else RunError
            raise kind(f"{cannot_go_on(why, self._plan)}\n{crash}".rstrip())
        self.kill()
        self.ranks, self.is_in_step, self._owed_since_s, self._num_owed = [], False, None, 0
        self._checkpoints.forget()
        self._notice(f"the trainer is lost ({why}); engines go on, and another one begins in {wait_s:g} s")
        self._facts.append(TrainerLost(why))

    def _replace(self) -> None:
        """Start another one, where the newest checkpoint is."""
        folder = self._plan.out / "checkpoints"
        restore(folder)
        found = {step: path for step, path in whole_checkpoints(folder).items() if step <= self._num_trained}
        self._from_step, self._is_awaited = max(found, default=0), True
        self._begin(found.get(self._from_step))

    def _made(self, version: int, digest: str) -> None:
        """Raises RunError if a checkpoint does not give the version back that it was written of."""
        before = self._digests.get(version, digest)
        if version == self._from_step and digest != before:
            raise RunError(
                f"the checkpoint of version {version} gives {digest}, and it was {before}; remove it, and "
                f"go on from the one before: dora train --resume {self._plan.out}"
            )
        self._digests[version] = digest

    def _repeat(self, message: m.StepRefused) -> None:
        """A step that failed changed nothing, so it is tried again, a few times."""
        self._step_failures[message.step] += 1
        failed = f"training step {nth(message.step)} failed: {message.reason}"
        if self._step_failures[message.step] == MAX_STEP_FAILURES:
            raise RunError(f"{failed}; it failed {MAX_STEP_FAILURES} times and changed nothing")
        self._notice(f"{failed}; it changed nothing and is repeated")
        self._facts.append(StepFailed(message.step, message.reason))


def cannot_go_on(what: str, plan: Plan) -> str:
    """Why the run ends when its trainer has, and how it goes on."""
    return f"{what}; the run cannot go on without it: dora train --resume {plan.out} does, with a new one"
