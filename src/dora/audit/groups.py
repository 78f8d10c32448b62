"""C2 and C3: every admitted group has exactly one outcome and is trained within its deadline.

The check follows the dataset cursor and each group from its admission to its outcome, and compares what was
trained with the sample store.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from dora.audit.steps import StepAudit
from dora.core.actions import Action, Admit, Fail, Filter, Score, SkipPrompts, Train
from dora.core.events import Event, GroupScored, PromptsFetched, RequestFinished
from dora.core.types import GroupId, Limits, RequestId
from dora.journal.reader import SampleKey, SampleRow
from dora.text import plural, step_number

IN_BATCH = "in a batch"


class GroupAudit:
    """Follows events and actions in their order, then `close`; appends a sentence to `findings` for each that
    breaks C2 or C3.
    """

    def __init__(
        self,
        findings: list[str],
        limits: Limits,
        num_prompts: int | None,
        steps: StepAudit,
        samples: Mapping[SampleKey, SampleRow] | None,
        source_rows: Sequence[int] | None = None,
    ) -> None:
        """`num_prompts` and `source_rows`: see `GuaranteeAudit`. Without `samples` only the journal is
        checked. `steps` follows each record first.
        """
        self.num_admitted = 0
        self.outcomes: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # of the groups in batches
        self.admitted: dict[GroupId, int] = {}  # -> version
        self.deadlines: dict[GroupId, int] = {}
        self.finished: set[RequestId] = set()
        self._findings = findings
        self._limits = limits
        # First row of each source, and one past the last row; None: the dataset grows.
        self._bounds = None if num_prompts is None else [0, *accumulate(source_rows or [num_prompts])]
        self._num_fetched: Counter[int] = Counter()  # of each source
        self._steps = steps
        self._samples = samples
        self._num_positions = 0  # of the dataset, fetched so far
        self._admissible: list[tuple[int, GroupId]] = []  # fetched and not skipped, with their positions
        self._known: set[GroupId] = set()  # all fetched groups
        self._due_skips: tuple[GroupId, ...] = ()  # of the last fetch
        self._skipping_epochs: defaultdict[int, set[int]] = defaultdict(set)  # row -> of easy or hard groups
        self._rewards: dict[GroupId, tuple[float, ...]] = {}
        self._outcome_of: dict[GroupId, str] = {}

    def observe(self, record: Event | Action) -> None:
        match record:
            case PromptsFetched():
                self._on_fetched(record)
            case SkipPrompts(groups):
                self._check_skips(groups)
            case Admit():
                self._on_admit(record)
            case RequestFinished(_, request):
                self._check(request not in self.finished, f"request {request} finished twice")
                self.finished.add(request)
            case Score(group) if not group.is_held_out:
                self._check_finished(group, "is scored")
            case GroupScored(group, rewards):
                self._rewards[group] = rewards
                rule, pass_threshold = self._limits.curriculum, self._limits.pass_threshold
                if rule and not group.is_held_out and rule.skips_after(rewards, pass_threshold):
                    self._skipping_epochs[group.row].add(group.epoch)
            case Filter(group, _):
                self._end(group, "filtered")
            case Fail(group, _):
                self._end(group, "failed")
            case Train(_, groups) if self._steps.is_first_attempt:
                self._check_batch(len(self._steps.batches) - 1, groups)
            case _:
                pass

    def close(self) -> None:
        """Check rules that need the whole journal, such as groups without an outcome.

        A run that gets more steps goes on and is closed again.
        """
        self.outcomes.clear()
        trained = self._steps.batches[: self._steps.num_trained]
        is_trained = {group for batch in trained for group in batch}
        for group in self.admitted:
            outcome = "trained" if group in is_trained else self._outcome_of.get(group, "pending")
            self.outcomes["pending" if outcome == IN_BATCH else outcome] += 1
            is_lost = self._steps.is_stopped and outcome not in ("trained", "filtered", "failed")
            self._check(not is_lost, f"group {group} was admitted and has no outcome in a finished run")
        if self._steps.is_stopped:
            self._check_skips(())
        if self._samples is not None:
            for step, batch in enumerate(trained):
                for group in batch:
                    self._check_stored(step, group, self._samples)
            self._check_trained_rows(self._samples, is_trained)

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self._findings.append(f"C2: {sentence}")

    # --- admission

    def _on_fetched(self, event: PromptsFetched) -> None:
        self._check(
            event.first_index == self._num_positions,
            f"prompts were fetched from position {event.first_index}, expected {self._num_positions}",
        )
        self._check_skips(())
        for position, group in enumerate(event.groups, self._num_positions):
            epoch, end = 0, position + 1
            if self._bounds is not None:  # each source has epochs of its own
                end = self._bounds[-1]
                source = bisect_right(self._bounds, group.row, hi=len(self._bounds) - 1) - 1
                epoch = self._num_fetched[source] // (self._bounds[source + 1] - self._bounds[source])
                self._num_fetched[source] += 1
            self._check(
                group.epoch == epoch and 0 <= group.row < end and group not in self._known,
                f"position {position} of the dataset is group {group}: "
                f"expected a new row of epoch {epoch} below {end}",
            )
            if self._is_skipped(group):
                self._due_skips += (group,)
            else:
                self._admissible.append((position, group))
            self._known.add(group)
        self._num_positions += len(event.groups)

    def _check_skips(self, groups: tuple[GroupId, ...]) -> None:
        """The skips of the last fetch are these, and reported before what comes after it."""
        self._check(groups == self._due_skips, _describe_skips(groups, self._due_skips))
        self._due_skips = ()

    def _is_skipped(self, group: GroupId) -> bool:
        """Whether the curriculum skips a prompt that is fetched now."""
        rule = self._limits.curriculum
        if rule is None:
            return False
        first = group.epoch - rule.skip_epochs
        return any(first <= epoch < group.epoch for epoch in self._skipping_epochs[group.row])

    def _on_admit(self, action: Admit) -> None:
        group, index = action.group, action.index
        self._check_skips(())
        is_fetched = self.num_admitted < len(self._admissible)
        position, fetched = self._admissible[self.num_admitted] if is_fetched else (None, None)
        self.num_admitted += 1
        self._check(index == position, f"group {group} has index {index}, expected {position}")
        self._check(
            group == fetched,
            f"group {group} was admitted at index {index}, but group {fetched} was fetched there",
        )
        self._check(group not in self.admitted, f"group {group} was admitted twice")
        self.admitted[group], self.deadlines[group] = action.version, action.deadline
        last = action.version + self._limits.max_staleness
        if action.deadline > last:
            self._findings.append(
                f"C3: group {group} of version {action.version} has the deadline "
                f"{step_number(action.deadline)}, the bound allows {step_number(last)}"
            )

    def _end(self, group: GroupId, outcome: str) -> None:
        self._check(group in self.admitted, f"group {group} is {outcome} without being admitted")
        before = self._outcome_of.get(group)
        self._check(before is None, f"group {group} is {outcome} and was already {before}")
        self._outcome_of[group] = outcome

    # --- training

    def _check_batch(self, step: int, groups: tuple[GroupId, ...]) -> None:
        size, number = self._limits.batch_size, step_number(step)
        self._check(
            len(groups) == size, f"the batch of step {number} has {plural(len(groups), 'group')}, not {size}"
        )
        for group in groups:
            self._end(group, IN_BATCH)
            self._check_finished(group, "is in a batch")
            num_rewards = len(self._rewards.get(group, ()))
            self._check(
                num_rewards == self._limits.group_size,
                f"group {group} is in a batch with {num_rewards} of {self._limits.group_size} rewards",
            )
            self._check_staleness(step, group)

    def _check_finished(self, group: GroupId, what: str) -> None:
        """All siblings of the group have finished."""
        for sibling in range(self._limits.group_size):
            request = RequestId(*group, sibling)
            self._check(request in self.finished, f"request {request} {what} and has not finished")

    def _check_staleness(self, step: int, group: GroupId) -> None:
        version, number = self.admitted.get(group), step_number(step)
        if version is None:
            return  # a finding against C2
        staleness, bound = step - version, self._limits.max_staleness
        self.staleness[staleness] += 1
        if not 0 <= staleness <= bound:
            self._findings.append(
                f"C3: group {group} of version {version} is in the batch of step {number}: "
                f"staleness {staleness}, bound {bound}"
            )
        elif step > (deadline := self.deadlines[group]):
            self._findings.append(
                f"C3: group {group} is in the batch of step {number}, after its deadline "
                f"{step_number(deadline)}"
            )

    # --- the sample store

    def _check_stored(self, step: int, group: GroupId, samples: Mapping[SampleKey, SampleRow]) -> None:
        """Every sibling of a trained group is stored with its reward and marked as trained."""
        for sibling, reward in enumerate(self._rewards.get(group, ())):
            name, row = f"request {RequestId(*group, sibling)}", samples.get((str(group), sibling))
            if row is None:
                self._check(False, f"{name} was trained and is not in the sample store")
                continue
            self._check(
                row.state == "trained" and row.trained_step == step,
                f"{name} was trained in step {step_number(step)}, its sample is marked "
                f"{_describe_state(row)}",
            )
            is_same = row.reward is not None and math.isclose(row.reward, reward)
            self._check(is_same, f"{name} was scored {reward}, its sample stores {row.reward}")

    def _check_trained_rows(self, samples: Mapping[SampleKey, SampleRow], is_trained: set[GroupId]) -> None:
        """Every sample marked as trained is in the journal; every finished request has its sample."""
        step_of = {str(group): step for step, batch in enumerate(self._steps.batches) for group in batch}
        for row in samples.values():
            if row.state == "trained" or row.trained_step is not None:
                known = row.sibling < self._limits.group_size and step_of.get(row.group) == row.trained_step
                self._check(
                    known,
                    f"sample {row.group}/{row.sibling} is marked {_describe_state(row)}, but the journal "
                    "has no such training step",
                )
        for request in self.finished:
            is_stored = (str(request.group), request.sibling) in samples or request.group in is_trained
            self._check(is_stored, f"request {request} finished and is not in the sample store")


def _describe_skips(groups: Sequence[GroupId], expected: Sequence[GroupId]) -> str:
    names = [", ".join(map(str, some)) or "no group" for some in (groups, expected)]
    return f"the curriculum skipped {names[0]}, expected {names[1]}"


def _describe_state(row: SampleRow) -> str:
    step = row.trained_step
    return f"{row.state}, in step {step_number(step)}" if isinstance(step, int) else row.state
