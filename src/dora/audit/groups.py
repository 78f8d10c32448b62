"""C2 and C3: every admitted group has exactly one outcome and is trained within its deadline.

The check follows the dataset cursor and each group from its admission to its outcome, and compares what was
trained with the sample store.
"""

from __future__ import annotations

import math
from collections import Counter

from dora.core.actions import Action, Admit, Fail, Filter, Stop, Train
from dora.core.events import (
    Event,
    GroupScored,
    PromptsFetched,
    RequestFinished,
    Resumed,
    StepFailed,
    Trained,
    TrainerReplaced,
)
from dora.core.types import GroupId, Limits, RequestId
from dora.journal.extensions import extended_limits
from dora.journal.reader import SampleRow
from dora.text import plural, step_number

IN_BATCH = "in a batch"


class GroupAudit:
    """Reads a journal once, then `close`; findings are sentences, empty where a guarantee holds."""

    def __init__(
        self, limits: Limits, num_prompts: int | None, samples: dict[tuple[str, int], SampleRow]
    ) -> None:
        """`num_prompts` is the number of dataset rows, None for a growing dataset."""
        self.findings: list[str] = []  # against C2
        self.staleness_findings: list[str] = []  # against C3
        self.num_admitted = 0
        self.outcomes: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # of the groups in batches
        self._limits = limits
        self._num_prompts = num_prompts
        self._samples = samples
        self._fetched: list[GroupId] = []
        self._known: set[GroupId] = set()  # the fetched groups again
        self._admitted: dict[GroupId, int] = {}  # -> version
        self._deadlines: dict[GroupId, int] = {}
        self._finished: set[RequestId] = set()
        self._rewards: dict[GroupId, tuple[float, ...]] = {}
        self._outcome_of: dict[GroupId, str] = {}
        self._batches: list[tuple[GroupId, ...]] = []  # of `Train`, by step
        self._num_trained_steps = 0
        self._max_trained_steps = 0  # since the run started or resumed
        self._is_repeat_due = False  # the last step failed
        self._redone: list[int] = []  # steps to be trained again with the same batches
        self._is_stopped = False

    def observe(self, record: Event | Action) -> None:
        match record:
            case PromptsFetched():
                self._on_fetched(record)
            case Admit():
                self._on_admit(record)
            case RequestFinished(_, request):
                self._check(request not in self._finished, f"request {request} finished twice")
                self._finished.add(request)
            case GroupScored(group, rewards):
                self._rewards[group] = rewards
            case Filter(group, _):
                self._end(group, "filtered")
            case Fail(group, _):
                self._end(group, "failed")
            case Train():
                self._on_train(record)
            case Trained(step):
                self._check(
                    step == self._num_trained_steps < len(self._batches),
                    f"step {step_number(step)} was trained, expected step {self._due_step}",
                )
                self._num_trained_steps += 1
                self._max_trained_steps = max(self._max_trained_steps, self._num_trained_steps)
            case StepFailed(step):
                self._check(
                    step == self._num_trained_steps < len(self._batches) and not self._is_repeat_due,
                    f"step {step_number(step)} failed, expected step {self._due_step}",
                )
                self._is_repeat_due = True
            case Resumed():
                self._void_steps(record)
                self._is_stopped, self._max_trained_steps = False, record.from_step
                num_before = self._limits.num_steps
                self._limits = extended_limits(self._limits, record)
                self._check(self._limits.num_steps >= num_before, "a resume has taken steps from the run")
            case TrainerReplaced(from_step, redone):
                trained = tuple(self._batches[from_step : self._max_trained_steps])
                self._check(
                    redone == trained,
                    f"the trainer's replacement redoes other batches after step {from_step}",
                )
                self._void_steps(record)
            case Stop():
                self._is_stopped = True
            case _:
                pass

    def close(self) -> None:
        """Check rules that need the whole journal, such as groups without an outcome."""
        trained = {g for batch in self._batches[: self._num_trained_steps] for g in batch}
        for group in self._admitted:
            outcome = "trained" if group in trained else self._outcome_of.get(group, "pending")
            self.outcomes["pending" if outcome == IN_BATCH else outcome] += 1
            is_lost = self._is_stopped and outcome not in ("trained", "filtered", "failed")
            self._check(not is_lost, f"group {group} was admitted and has no outcome in a finished run")
        num_steps = self._limits.num_steps
        self._check(
            not self._is_stopped or self._num_trained_steps == num_steps,
            f"the run stopped after {self._num_trained_steps} of {plural(num_steps, 'step')}",
        )
        for step, batch in enumerate(self._batches):
            for group in batch:
                self._check_staleness(step, group)
                if step < self._num_trained_steps:
                    self._check_stored(step, group)
        self._check_trained_rows()

    @property
    def _due_step(self) -> int:
        """The number of the step to be trained next."""
        return step_number(self._num_trained_steps)

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.findings.append(sentence)

    # --- admission

    def _on_fetched(self, event: PromptsFetched) -> None:
        self._check(
            event.first_index == len(self._fetched),
            f"prompts were fetched from position {event.first_index}, expected {len(self._fetched)}",
        )
        for group in event.groups:
            position = len(self._fetched)
            epoch, end = 0, position + 1
            if self._num_prompts is not None:
                epoch, end = position // self._num_prompts, self._num_prompts
            self._check(
                group.epoch == epoch and 0 <= group.row < end and group not in self._known,
                f"position {position} of the dataset is group {group}: "
                f"expected a new row of epoch {epoch} below {end}",
            )
            self._fetched.append(group)
            self._known.add(group)

    def _on_admit(self, action: Admit) -> None:
        group, index = action.group, action.index
        self._check(
            index == self.num_admitted, f"group {group} has index {index}, expected {self.num_admitted}"
        )
        self.num_admitted += 1
        fetched = self._fetched[index] if 0 <= index < len(self._fetched) else None
        self._check(
            group == fetched,
            f"group {group} was admitted at index {index}, but group {fetched} was fetched there",
        )
        self._check(group not in self._admitted, f"group {group} was admitted twice")
        self._admitted[group], self._deadlines[group] = action.version, action.deadline
        last = action.version + self._limits.max_staleness
        if action.deadline > last:
            self.staleness_findings.append(
                f"group {group} of version {action.version} has the deadline {step_number(action.deadline)}, "
                f"the bound allows {step_number(last)}"
            )

    def _end(self, group: GroupId, outcome: str) -> None:
        self._check(group in self._admitted, f"group {group} is {outcome} without being admitted")
        before = self._outcome_of.get(group)
        self._check(before is None, f"group {group} is {outcome} and was already {before}")
        self._outcome_of[group] = outcome

    # --- training

    def _on_train(self, action: Train) -> None:
        step, groups = action.step, action.groups
        number = step_number(step)
        if self._is_repeat_due:
            self._is_repeat_due = False
            due = self._num_trained_steps
            batch = self._batches[due] if due < len(self._batches) else None
            is_same = (step, groups) == (due, batch)
            self._check(is_same, f"step {number} repeats a failed step with another number or other groups")
            return
        if self._redone:
            is_same = (step, groups) == (self._redone[0], self._batches[self._redone.pop(0)])
            self._check(is_same, f"step {number} redoes a voided step with another number or other groups")
            return
        num, size = len(self._batches), self._limits.batch_size
        self._check(step == num, f"step {number} was started, expected step {step_number(num)}")
        self._check(
            len(groups) == size,
            f"the batch of step {number} has {plural(len(groups), 'group')}, not {size}",
        )
        self._batches.append(groups)
        for group in groups:
            self._end(group, IN_BATCH)
            self._check_complete(group)

    def _void_steps(self, event: Resumed | TrainerReplaced) -> None:
        """Steps after the checkpoint are void and due again with the same batches."""
        self._check(
            event.from_step <= self._num_trained_steps,
            f"training resumed after {plural(event.from_step, 'step')}, expected {self._num_trained_steps}",
        )
        self._num_trained_steps = event.from_step
        self._redone = [*range(event.from_step, len(self._batches))]
        self._is_repeat_due = False

    def _check_complete(self, group: GroupId) -> None:
        """All siblings of a group in a batch have finished and been scored."""
        size = self._limits.group_size
        for sibling in range(size):
            request = RequestId(*group, sibling)
            self._check(request in self._finished, f"request {request} is in a batch and has not finished")
        num_rewards = len(self._rewards.get(group, ()))
        self._check(num_rewards == size, f"group {group} is in a batch with {num_rewards} of {size} rewards")

    def _check_staleness(self, step: int, group: GroupId) -> None:
        version, number = self._admitted.get(group), step_number(step)
        if version is None:
            return  # a finding against C2
        staleness, bound = step - version, self._limits.max_staleness
        self.staleness[staleness] += 1
        if not 0 <= staleness <= bound:
            self.staleness_findings.append(
                f"group {group} of version {version} is in the batch of step {number}: "
                f"staleness {staleness}, bound {bound}"
            )
        elif step > (deadline := self._deadlines[group]):
            self.staleness_findings.append(
                f"group {group} is in the batch of step {number}, after its deadline {step_number(deadline)}"
            )

    # --- the sample store

    def _check_stored(self, step: int, group: GroupId) -> None:
        """Every sibling of a trained group is stored with its reward and marked as trained."""
        for sibling, reward in enumerate(self._rewards.get(group, ())):
            name, row = f"request {RequestId(*group, sibling)}", self._samples.get((str(group), sibling))
            if row is None:
                self.findings.append(f"{name} was trained and is not in the sample store")
                continue
            self._check(
                row.state == "trained" and row.trained_step == step,
                f"{name} was trained in step {step_number(step)}, its sample is marked "
                f"{_describe_state(row)}",
            )
            is_same = row.reward is not None and math.isclose(row.reward, reward)
            self._check(is_same, f"{name} was scored {reward}, its sample stores {row.reward}")

    def _check_trained_rows(self) -> None:
        """Every sample marked as trained is in the journal; every finished request has its sample."""
        step_of = {str(group): step for step, batch in enumerate(self._batches) for group in batch}
        for row in self._samples.values():
            if row.state == "trained" or row.trained_step is not None:
                known = row.sibling < self._limits.group_size and step_of.get(row.group) == row.trained_step
                self._check(
                    known,
                    f"sample {row.group}/{row.sibling} is marked {_describe_state(row)}, but the journal "
                    "has no such "
                    "training step",
                )
        trained = {str(g) for batch in self._batches[: self._num_trained_steps] for g in batch}
        for request in self._finished:
            is_lost = (str(request.group), request.sibling) not in self._samples
            if is_lost and str(request.group) not in trained:  # `_check_stored` reports trained groups
                self.findings.append(f"request {request} finished and is not in the sample store")


def _describe_state(row: SampleRow) -> str:
    step = row.trained_step
    return f"{row.state}, in step {step_number(step)}" if isinstance(step, int) else row.state
