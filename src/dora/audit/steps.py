"""C2 for training steps: they run in order, one at a time, and repeat their batch after a failure."""

from __future__ import annotations

from dora.core.actions import Action, Publish, ReportDigest, Stop, Train
from dora.core.events import Event, Resumed, StepFailed, Trained, TrainerLost, TrainerReplaced
from dora.core.types import GroupId
from dora.text import plural, step_number


class StepAudit:
    """Follows events and actions in their order; appends a sentence to `findings` for each that breaks C2."""

    def __init__(self, findings: list[str], num_steps: int) -> None:
        self.batches: list[tuple[GroupId, ...]] = []  # of each step, as it was first started
        self.num_trained = 0  # steps in the weights of the present trainer
        self.training: int | None = None  # the running step
        self.is_first_attempt = True  # of the step that started last
        self.is_failed = False  # the last step has failed and is due again
        self.is_trainer_lost = False  # until its replacement is ready
        self.is_stopped = False
        self._max_trained = 0  # steps of any trainer since the run started or was resumed
        self._findings = findings
        self._num_steps = num_steps

    @property
    def is_redo(self) -> bool:
        """Whether a lost trainer has trained the next step before."""
        return self.num_trained < self._max_trained

    def observe(self, record: Event | Action) -> None:
        match record:
            case Train():
                self._on_train(record)
            case Trained(step):
                self._end_step(step, "was trained")
                self.num_trained += 1
                self._max_trained = max(self._max_trained, self.num_trained)
            case StepFailed(step):
                self._end_step(step, "failed")
                self.is_failed = True
            case Publish(version) | ReportDigest(version):
                is_ready = version == self.num_trained and not self.is_trainer_lost
                by = " by a lost trainer" if self.is_trainer_lost else ""
                num = plural(self.num_trained, "step")
                self._check(is_ready, f"version {version} is published after {num}{by}")
            case TrainerLost():
                self.training, self.is_failed, self.is_trainer_lost = None, False, True
            case TrainerReplaced(from_step, redone):
                is_same = redone == tuple(self.batches[from_step : self._max_trained])
                self._check(is_same, f"the trainer's replacement redoes other batches after step {from_step}")
                self._void_steps(from_step)
            case Resumed(from_step):
                self._void_steps(from_step)
                self.is_stopped, self._max_trained = False, from_step
                num_before, self._num_steps = self._num_steps, record.num_steps or self._num_steps
                self._check(self._num_steps >= num_before, "a resume has taken steps from the run")
            case Stop():
                self.is_stopped = True
            case _:
                pass

    def close(self) -> None:
        """A run that has stopped has trained all steps."""
        is_complete = not self.is_stopped or self.num_trained == self._num_steps
        num_steps = plural(self._num_steps, "step")
        self._check(is_complete, f"the run stopped after {self.num_trained} of {num_steps}")

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self._findings.append(f"C2: {sentence}")

    def _on_train(self, action: Train) -> None:
        step, groups, due = action.step, action.groups, self.num_trained
        number = step_number(step)
        self._check(not self.is_trainer_lost, f"step {number} starts without a trainer")
        self._check(self.training is None, f"step {number} starts during another step")
        self.is_first_attempt = due >= len(self.batches)
        if not self.is_first_attempt:
            is_same = (step, groups) == (due, self.batches[due])
            verb = "repeats a failed step" if self.is_failed else "redoes a voided step"
            self._check(is_same, f"step {number} {verb} with another number or other groups")
        else:
            self._check(step == due, f"step {number} was started, expected step {step_number(due)}")
            self.batches.append(groups)
        self.training, self.is_failed = step, False

    def _end_step(self, step: int, what: str) -> None:
        running = "no step" if self.training is None else f"step {step_number(self.training)}"
        self._check(
            step == self.training == self.num_trained,
            f"step {step_number(step)} {what}, expected step {step_number(self.num_trained)}; "
            f"{running} was running",
        )
        self.training = None

    def _void_steps(self, from_step: int) -> None:
        """Steps after the checkpoint are void and due again with the same batches."""
        most = self._max_trained
        self._check(
            from_step <= most,
            f"training resumed after {plural(from_step, 'step')}, of which {most} were trained",
        )
        self.num_trained = from_step
        self.training, self.is_failed, self.is_trainer_lost = None, False, False
