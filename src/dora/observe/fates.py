"""C2 and C3: every group admitted comes to exactly one end, and is trained in time.

Follows the dataset's cursor and each group from its admission to its end, by what the journal
says, and compares what was trained with the sample store.
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
from dora.core.records import GroupId, Limits, RequestId
from dora.core.wording import counted, nth
from dora.observe.samples import SampleRow


class Fates:
    """Reads the journal once, then `close`; findings are sentences, empty where a guarantee holds."""

    def __init__(
        self, limits: Limits, num_prompts: int | None, samples: dict[tuple[str, int], SampleRow]
    ) -> None:
        self.findings: list[str] = []  # against C2
        self.findings_late: list[str] = []  # against C3
        self.num_admitted = 0
        self.ends: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # of the groups in batches
        self._limits = limits
        self._num_prompts = num_prompts  # None: each is a new row
        self._samples = samples
        self._fetched: list[GroupId] = []
        self._known: set[GroupId] = set()  # the fetched, for looking up
        self._admitted: dict[GroupId, int] = {}  # -> version
        self._deadlines: dict[GroupId, int] = {}
        self._finished: set[RequestId] = set()
        self._rewards: dict[GroupId, tuple[float, ...]] = {}
        self._batches: list[tuple[GroupId, ...]] = []  # ordered, one per step
        self._num_trained_steps = 0
        self._num_ever_trained = 0  # by the trainers of this life
        self._is_repeat_due = False  # of the step that failed last
        self._redone: list[int] = []  # steps to be ordered again, with the batches they had
        self._end_of: dict[GroupId, str] = {}
        self._is_stopped = False

    def read(self, record: Event | Action) -> None:
        match record:
            case PromptsFetched():
                self._fetch(record)
            case Admit():
                self._admit(record)
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
                self._order(record)
            case Trained(step):
                self._check(
                    step == self._num_trained_steps < len(self._batches),
                    f"step {nth(step)} was trained, the step ordered and due was {self._due}",
                )
                self._num_trained_steps += 1
                self._num_ever_trained = max(self._num_ever_trained, self._num_trained_steps)
            case StepFailed(step):
                self._check(
                    step == self._num_trained_steps < len(self._batches) and not self._is_repeat_due,
                    f"step {nth(step)} failed, the step ordered and due was {self._due}",
                )
                self._is_repeat_due = True
            case Resumed():
                self._go_back(record)
                self._is_stopped, self._num_ever_trained = False, record.from_step
            case TrainerReplaced(from_step, redone):
                had = tuple(self._batches[from_step : self._num_ever_trained])
                self._check(redone == had, f"a new trainer after step {from_step} redoes other batches")
                self._go_back(record)
            case Stop():
                self._is_stopped = True
            case _:
                pass

    def _go_back(self, fact: Resumed | TrainerReplaced) -> None:
        """Steps after the checkpoint are void, and due again with the batches they had."""
        self._check(
            fact.from_step <= self._num_trained_steps,
            f"the run went on after {counted(fact.from_step, 'step')} and had trained "
            f"{self._num_trained_steps}",
        )
        self._num_trained_steps = fact.from_step
        self._redone = [*range(fact.from_step, len(self._batches))]
        self._is_repeat_due = False

    def close(self) -> None:
        """Judge what only the whole journal can tell."""
        trained = {g for batch in self._batches[: self._num_trained_steps] for g in batch}
        for group in self._admitted:
            end = "trained" if group in trained else self._end_of.get(group, "pending")
            self.ends["pending" if end == "in a batch" else end] += 1
            is_lost = self._is_stopped and end not in ("trained", "filtered", "failed")
            self._check(
                not is_lost, f"group {group} was admitted and has no end in a run that came to its own"
            )
        num_steps = self._limits.num_steps
        self._check(
            not self._is_stopped or self._num_trained_steps == num_steps,
            f"the run stopped after {self._num_trained_steps} of {counted(num_steps, 'step')}",
        )
        for step, batch in enumerate(self._batches):
            for group in batch:
                self._check_staleness(step, group)
                if step < self._num_trained_steps:
                    self._check_stored(step, group)
        self._check_trained_rows()

    @property
    def _due(self) -> int:
        """The step that may be trained next, as people are told of it."""
        return nth(self._num_trained_steps)

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.findings.append(sentence)

    def _fetch(self, fact: PromptsFetched) -> None:
        self._check(
            fact.first_index == len(self._fetched),
            f"prompts from position {fact.first_index} on were fetched, the next was {len(self._fetched)}",
        )
        for group in fact.groups:
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

    def _admit(self, order: Admit) -> None:
        group, index = order.group, order.index
        self._check(
            index == self.num_admitted, f"group {group} has index {index}, the next was {self.num_admitted}"
        )
        self.num_admitted += 1
        fetched = self._fetched[index] if 0 <= index < len(self._fetched) else None
        self._check(
            group == fetched, f"group {group} was admitted at index {index}, fetched there was {fetched}"
        )
        self._check(group not in self._admitted, f"group {group} was admitted twice")
        self._admitted[group], self._deadlines[group] = order.version, order.deadline
        last = order.version + self._limits.max_staleness
        if order.deadline > last:
            self.findings_late.append(
                f"group {group} of version {order.version} got the deadline {nth(order.deadline)}, "
                f"after {nth(last)}"
            )

    def _end(self, group: GroupId, how: str) -> None:
        self._check(group in self._admitted, f"group {group} is {how} without being admitted")
        before = self._end_of.get(group)
        self._check(before is None, f"group {group} is {how} and was already {before}")
        self._end_of[group] = how

    def _order(self, order: Train) -> None:
        step, groups = order.step, order.groups
        if self._is_repeat_due:
            self._is_repeat_due = False
            due = self._num_trained_steps
            batch = self._batches[due] if due < len(self._batches) else None
            is_same = (step, groups) == (due, batch)
            self._check(is_same, f"step {nth(step)} repeats a failed one with another number or other groups")
            return
        if self._redone:
            is_same = (step, groups) == (self._redone[0], self._batches[self._redone.pop(0)])
            self._check(is_same, f"step {nth(step)} redoes a void one with another number or other groups")
            return
        num = len(self._batches)
        self._check(step == num, f"step {nth(step)} was ordered, the next was {nth(num)}")
        size = self._limits.batch_size
        self._check(
            len(groups) == size,
            f"the batch of step {nth(step)} has {counted(len(groups), 'group')}, not {size}",
        )
        self._batches.append(groups)
        for group in groups:
            self._end(group, "in a batch")
            self._check_whole(group)

    def _check_staleness(self, step: int, group: GroupId) -> None:
        version = self._admitted.get(group)
        if version is None:
            return  # C2 names it
        staleness, bound = step - version, self._limits.max_staleness
        self.staleness[staleness] += 1
        if not 0 <= staleness <= bound:
            self.findings_late.append(
                f"group {group} of version {version} is in the batch of step {nth(step)}: "
                f"staleness {staleness}, bound {bound}"
            )
        elif step > (deadline := self._deadlines[group]):
            self.findings_late.append(
                f"group {group} is in the batch of step {nth(step)}, after its deadline {nth(deadline)}"
            )

    def _check_whole(self, group: GroupId) -> None:
        """A group comes into a batch with all its siblings finished and rewarded."""
        size = self._limits.group_size
        for sibling in range(size):
            request = RequestId(*group, sibling)
            self._check(request in self._finished, f"request {request} is in a batch and has not finished")
        num_rewards = len(self._rewards.get(group, ()))
        self._check(num_rewards == size, f"group {group} is in a batch with {num_rewards} of {size} rewards")

    def _check_stored(self, step: int, group: GroupId) -> None:
        """Every sibling of a trained group is stored with its reward and marked as trained."""
        for sibling, reward in enumerate(self._rewards.get(group, ())):
            name, row = f"request {RequestId(*group, sibling)}", self._samples.get((str(group), sibling))
            if row is None:
                self.findings.append(f"{name} was trained and is not in the sample store")
                continue
            self._check(
                row.state == "trained" and row.trained_step == step,
                f"{name} was trained in step {nth(step)}, its sample says {_end_of(row)}",
            )
            is_same = row.reward is not None and math.isclose(row.reward, reward)
            self._check(is_same, f"{name} was scored {reward}, its sample says {row.reward}")

    def _check_trained_rows(self) -> None:
        """No sample is trained that the journal does not know; finished ones have their sample."""
        step_of = {str(group): step for step, batch in enumerate(self._batches) for group in batch}
        for row in self._samples.values():
            if row.state == "trained" or row.trained_step is not None:
                known = row.sibling < self._limits.group_size and step_of.get(row.group) == row.trained_step
                self._check(
                    known,
                    f"sample {row.group}/{row.sibling} says {_end_of(row)}: the journal does not know of it",
                )
        trained = {str(g) for batch in self._batches[: self._num_trained_steps] for g in batch}
        for request in self._finished:
            is_lost = (str(request.group), request.sibling) not in self._samples
            if is_lost and str(request.group) not in trained:  # those of trained groups are named above
                self.findings.append(f"request {request} finished and is not in the sample store")


def _end_of(row: SampleRow) -> str:
    """What a sample says of its training."""
    step = row.trained_step
    return f"{row.state}, in step {nth(step)}" if isinstance(step, int) else row.state
