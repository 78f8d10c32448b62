"""Deliberate faults in admission, the bound, batches, steps and the snapshot, and how each shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.breaking import Fault, after_hearing, instead_of_hearing

from dora.core import admission, batching, bound, calm, deadlines, hearing, invariants, snapshot, versions
from dora.core.actions import Action, Admit, Filter, Publish, Score, Train
from dora.core.bound import bound_holds, num_admissible
from dora.core.events import Event, Published, RequestFinished, StepFailed
from dora.core.group import Group
from dora.core.records import Limits
from dora.core.state import State

Bound = Callable[[Counter[int], int, int, Limits], bool]
EVERYWHERE = (bound, batching, invariants)


def set_bound(patch: pytest.MonkeyPatch, holds: Bound) -> None:
    """Everywhere in the core, its own invariants included."""
    for module in EVERYWHERE:
        patch.setattr(module, "bound_holds", holds)


def set_admissible(patch: pytest.MonkeyPatch, count: Callable[[State, int], int]) -> None:
    for module in (admission, calm, versions):
        patch.setattr(module, "admissible", count)


def there_is_no_bound(patch: pytest.MonkeyPatch) -> None:
    set_bound(patch, lambda opened, next_step, num_committed, limits: True)
    set_admissible(patch, lambda state, version: 1000)


def the_bound_forgets_deadlines_that_have_passed(patch: pytest.MonkeyPatch) -> None:
    def from_n_on(opened: Counter[int], next_step: int, num_committed: int, limits: Limits) -> bool:
        ahead = Counter({deadline: count for deadline, count in opened.items() if deadline >= next_step})
        return bound_holds(ahead, next_step, num_committed, limits)

    def count(state: State, version: int) -> int:
        return 1000 if state.limits.deadline(version) < state.next_step else num_admissible(state, version)

    set_bound(patch, from_n_on)
    set_admissible(patch, count)


def the_bound_forgets_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    set_bound(patch, lambda opened, next_step, _, limits: bound_holds(opened, next_step, 0, limits))
    set_admissible(patch, lambda state, version: num_admissible(state, version) + len(state.committed))


def a_deadline_is_one_step_late(patch: pytest.MonkeyPatch) -> None:
    def deadline(self: Limits, version: int, lowered: int = 0) -> int:
        return min(version + self.max_staleness - lowered + 1, self.num_steps - 1)

    patch.setattr(Limits, "deadline", deadline)


def commits_ignore_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching, "_may_commit", lambda state: True)


def one_group_too_many_is_admitted(patch: pytest.MonkeyPatch) -> None:
    set_admissible(patch, lambda state, version: num_admissible(state, version) + 1)


def slack_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def eager(state: State, version: int) -> int:
        patient, state.limits = state.limits, replace(state.limits, slack=0)
        count = num_admissible(state, version)
        state.limits = patient
        return count

    set_admissible(patch, eager)


def two_versions_live_under_the_drain_policy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bound, "_quota", lambda state, version: 1000)


def an_expiring_version_is_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_may_fill", lambda state, version: True)


def groups_are_admitted_at_a_version_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    right = admission.admit

    def admit(state: State) -> list[Action]:
        fresh_rows = state.fresh_rows
        state.fresh_rows = Counter({max(state.store, default=0): 100})
        orders = right(state)
        state.fresh_rows = fresh_rows
        return orders

    patch.setattr(admission, "admit", admit)


def a_prompt_is_admitted_twice(patch: pytest.MonkeyPatch) -> None:
    right = admission.admit

    def admit(state: State) -> list[Action]:
        orders = right(state)
        last = orders[-1] if orders else None
        if isinstance(last, Admit):
            state.prompts.appendleft((last.index, last.group))
        return orders

    patch.setattr(admission, "admit", admit)


def a_prompt_is_skipped(patch: pytest.MonkeyPatch) -> None:
    right = admission.admit

    def admit(state: State) -> list[Action]:
        if len(state.prompts) > 1:
            state.prompts.popleft()
        return right(state)

    patch.setattr(admission, "admit", admit)


def the_newest_version_is_never_asked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "listen", lambda state: None)


def every_end_of_an_answer_is_calm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calm, "is_calm", lambda state, event: isinstance(event, RequestFinished))


def the_bound_is_not_counted_again(patch: pytest.MonkeyPatch) -> None:
    class Kept(dict[int, int]):
        def clear(self) -> None:
            pass

    right = State.__init__

    def begin(self: State, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.admissible = Kept()

    patch.setattr(State, "__init__", begin)


def a_filtered_group_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    def end(state: State, group: Group) -> None:
        del state.groups[group.id]

    patch.setattr(hearing, "_end", end)


def a_filtered_group_is_not_named(patch: pytest.MonkeyPatch) -> None:
    after_hearing(patch, lambda state, event, orders: [o for o in orders if not isinstance(o, Filter)])


def groups_are_scored_before_all_siblings_finished(patch: pytest.MonkeyPatch) -> None:
    def score(state: State, event: Event, orders: list[Action]) -> list[Action]:
        return [Score(event.request.group)] if isinstance(event, RequestFinished) else orders

    after_hearing(patch, score)


def a_stall_is_reported_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = deadlines.watch_stall

    def watch_stall(state: State) -> list[Action]:
        orders = right(state)
        state.is_stall_reported = False
        return orders

    patch.setattr(deadlines, "watch_stall", watch_stall)


def a_step_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = batching.train
    patch.setattr(batching, "train", lambda state: right(state) * 2)


def a_failed_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    after_hearing(
        patch, lambda state, event, orders: [o for o in orders if not isinstance(event, StepFailed)]
    )


def a_failed_step_is_repeated_with_other_groups(patch: pytest.MonkeyPatch) -> None:
    def shuffle(state: State, event: Event, orders: list[Action]) -> list[Action]:
        return [Train(o.step, o.groups[::-1]) if isinstance(o, Train) else o for o in orders]

    after_hearing(patch, shuffle)


def a_failed_step_counts_as_trained(patch: pytest.MonkeyPatch) -> None:
    def skip(state: State, event: StepFailed) -> list[Action]:
        state.training = None
        state.publishing = event.step + 1
        return [Publish(state.publishing)]

    instead_of_hearing(patch, StepFailed, skip)


def a_published_version_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, orders: list[Action]) -> list[Action]:
        if isinstance(event, Published) and event.version > 0:
            state.newest = event.version - 1
        return orders

    after_hearing(patch, forget)


def snapshot_without(name: str, value: Any) -> Fault:
    """A fault: what is written of the state has `value` in place of one field."""

    def forget(patch: pytest.MonkeyPatch) -> None:
        right = snapshot.to_json
        patch.setattr(snapshot, "to_json", lambda state: right(state) | {name: value})

    forget.__name__ = f"a_snapshot_forgets_{name}"
    return forget


FAULTS: list[tuple[Fault, str]] = [
    (there_is_no_bound, "C3"),
    (the_bound_forgets_deadlines_that_have_passed, "C3"),
    (the_bound_forgets_what_is_committed, "C3"),
    (a_deadline_is_one_step_late, "C3"),
    (commits_ignore_the_bound, "C3"),
    (one_group_too_many_is_admitted, "C3"),
    (slack_is_forgotten, "uses up the slack"),
    (two_versions_live_under_the_drain_policy, "only one may live"),
    (an_expiring_version_is_filled, "is about to expire"),
    (groups_are_admitted_at_a_version_nobody_holds, "at a version nobody holds"),
    (a_prompt_is_admitted_twice, "C2"),
    (a_prompt_is_skipped, "C2: dataset gap"),
    (the_newest_version_is_never_asked_for, "deadlock"),
    (every_end_of_an_answer_is_calm, "deadlock"),
    (the_bound_is_not_counted_again, "the bound is said to admit"),
    (a_filtered_group_keeps_its_place, "open groups are miscounted"),
    (a_filtered_group_is_not_named, "C3"),
    (groups_are_scored_before_all_siblings_finished, "C2"),
    (a_stall_is_reported_for_ever, "deadlock"),
    (a_step_is_trained_twice, "begins during another"),
    (a_failed_step_is_forgotten, "deadlock"),
    (a_failed_step_is_repeated_with_other_groups, "C2"),
    (a_failed_step_counts_as_trained, "is published untrained"),
    (a_published_version_is_forgotten, "deadlock"),
    (snapshot_without("moves", []), "ProtocolError"),
    (snapshot_without("num_fetching", 0), "ProtocolError"),
    (snapshot_without("committed", []), "ProtocolError"),
    (snapshot_without("current", None), "a resumed orchestrator"),
]
