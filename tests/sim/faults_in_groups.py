"""Deliberate faults in admission, the bound, batches, steps and the snapshot, and the message of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.fault_tools import Fault, after_handling, instead_of_handling

from dora.core import (
    admission,
    batching,
    bound,
    codec,
    event_handlers,
    invariants,
    orchestrator,
    stragglers,
    weight_sync,
)
from dora.core.actions import Action, Admit, Filter, Publish, Score, SkipPrompts, Train
from dora.core.bound import bound_holds, num_admissible
from dora.core.events import Event, Published, RequestFailed, RequestFinished, StepFailed
from dora.core.state import GroupRecord, RequestRecord, State
from dora.core.types import Limits

Bound = Callable[[Counter[int], int, int, Limits], bool]


def set_bound(patch: pytest.MonkeyPatch, holds: Bound) -> None:
    """Replace the bound everywhere in the core, its invariants included."""
    for module in (bound, batching, invariants):
        patch.setattr(module, "bound_holds", holds)


def set_num_admissible(patch: pytest.MonkeyPatch, count: Callable[[State, int], int]) -> None:
    for module in (admission, orchestrator, weight_sync):
        patch.setattr(module, "cached_num_admissible", count)


def there_is_no_bound(patch: pytest.MonkeyPatch) -> None:
    set_bound(patch, lambda num_open, next_step, num_committed, limits: True)
    set_num_admissible(patch, lambda state, version: 1000)


def the_bound_ignores_past_deadlines(patch: pytest.MonkeyPatch) -> None:
    def without_past(num_open: Counter[int], next_step: int, num_committed: int, limits: Limits) -> bool:
        future = Counter({deadline: n for deadline, n in num_open.items() if deadline >= next_step})
        return bound_holds(future, next_step, num_committed, limits)

    def count(state: State, version: int) -> int:
        return 1000 if state.limits.deadline(version) < state.next_step else num_admissible(state, version)

    set_bound(patch, without_past)
    set_num_admissible(patch, count)


def the_bound_ignores_committed_groups(patch: pytest.MonkeyPatch) -> None:
    set_bound(patch, lambda num_open, next_step, _, limits: bound_holds(num_open, next_step, 0, limits))
    set_num_admissible(patch, lambda state, version: num_admissible(state, version) + len(state.committed))


def deadlines_are_one_step_late(patch: pytest.MonkeyPatch) -> None:
    def deadline(self: Limits, version: int, lowered: int = 0) -> int:
        return min(version + self.max_staleness - lowered + 1, self.num_steps - 1)

    patch.setattr(Limits, "deadline", deadline)


def commits_ignore_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching, "_may_commit", lambda state: True)


def one_group_too_many_is_admitted(patch: pytest.MonkeyPatch) -> None:
    set_num_admissible(patch, lambda state, version: num_admissible(state, version) + 1)


def slack_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def without_slack(state: State, version: int) -> int:
        limits, state.limits = state.limits, replace(state.limits, slack=0)
        count = num_admissible(state, version)
        state.limits = limits
        return count

    set_num_admissible(patch, without_slack)


def two_versions_are_live_with_batches_per_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bound, "_quota", lambda state, version: 1000)


def groups_are_admitted_at_an_expiring_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_may_fill", lambda state, version: True)


def groups_are_admitted_at_a_version_that_no_engine_holds(patch: pytest.MonkeyPatch) -> None:
    original = admission.admit

    def admit(state: State) -> list[Action]:
        rows = state.admission_rows
        state.admission_rows = Counter({max(state.stored_versions, default=0): 100})
        actions = original(state)
        state.admission_rows = rows
        return actions

    patch.setattr(admission, "admit", admit)


def a_prompt_is_admitted_twice(patch: pytest.MonkeyPatch) -> None:
    original = admission.admit

    def admit(state: State) -> list[Action]:
        actions = original(state)
        last = actions[-1] if actions else None
        if isinstance(last, Admit):
            state.prompts.appendleft((last.index, last.group))
        return actions

    patch.setattr(admission, "admit", admit)


def a_prompt_is_skipped(patch: pytest.MonkeyPatch) -> None:
    original = admission.admit

    def admit(state: State) -> list[Action]:
        if len(state.prompts) > 1:
            state.prompts.popleft()
        return original(state)

    patch.setattr(admission, "admit", admit)


def the_newest_version_is_never_requested(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "update_demand", lambda state: None)


def a_finished_request_needs_no_decision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(orchestrator, "needs_no_decision", lambda state, event: isinstance(event, RequestFinished))


def the_cache_of_the_bound_is_never_cleared(patch: pytest.MonkeyPatch) -> None:
    class PermanentCache(dict[int, int]):
        def clear(self) -> None:
            pass

    original = State.__init__

    def init(self: State, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.admissible_cache = PermanentCache()

    patch.setattr(State, "__init__", init)


def a_filtered_group_stays_open(patch: pytest.MonkeyPatch) -> None:
    def close_nothing(state: State, group: GroupRecord) -> None:
        del state.groups[group.id]

    patch.setattr(event_handlers, "_end_group", close_nothing)


def a_filtered_group_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    after_handling(patch, lambda state, event, actions: [o for o in actions if not isinstance(o, Filter)])


def groups_are_scored_before_all_siblings_finished(patch: pytest.MonkeyPatch) -> None:
    def score_early(state: State, event: Event, actions: list[Action]) -> list[Action]:
        return [Score(event.request.group)] if isinstance(event, RequestFinished) else actions

    after_handling(patch, score_early)


def a_stall_is_reported_endlessly(patch: pytest.MonkeyPatch) -> None:
    original = stragglers.update_stall

    def update_stall(state: State) -> list[Action]:
        actions = original(state)
        state.is_stall_reported = False
        return actions

    patch.setattr(stragglers, "update_stall", update_stall)


def a_step_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    original = batching.train
    patch.setattr(batching, "train", lambda state: original(state) * 2)


def a_failed_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    after_handling(
        patch, lambda state, event, actions: [o for o in actions if not isinstance(event, StepFailed)]
    )


def a_failed_step_is_repeated_with_other_groups(patch: pytest.MonkeyPatch) -> None:
    def shuffle(state: State, event: Event, actions: list[Action]) -> list[Action]:
        return [Train(o.step, o.groups[::-1]) if isinstance(o, Train) else o for o in actions]

    after_handling(patch, shuffle)


def a_failed_step_counts_as_trained(patch: pytest.MonkeyPatch) -> None:
    def skip(state: State, event: StepFailed) -> list[Action]:
        state.training_step = None
        state.publishing_version = event.step + 1
        return [Publish(state.publishing_version)]

    instead_of_handling(patch, StepFailed, skip)


def a_published_version_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event, actions: list[Action]) -> list[Action]:
        if isinstance(event, Published) and event.version > 0:
            state.newest_published = event.version - 1
        return actions

    after_handling(patch, forget)


def snapshot_without(name: str, value: Any) -> Fault:
    """A fault: the written state has `value` in place of one field."""

    def forget(patch: pytest.MonkeyPatch) -> None:
        original = codec.state_to_json
        patch.setattr(codec, "state_to_json", lambda state: original(state) | {name: value})

    forget.__name__ = f"a_snapshot_forgets_{name}"
    return forget


def a_request_is_retried_without_end(patch: pytest.MonkeyPatch) -> None:
    def is_transient(state: State, event: RequestFailed) -> bool:
        return event.cause == "environment" and event.request not in state.migrations

    patch.setattr(event_handlers, "_may_retry", is_transient)


def no_request_is_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "_may_retry", lambda state, event: False)


def a_retried_request_changes_its_version(patch: pytest.MonkeyPatch) -> None:
    restart = State.restart_request

    def on_the_newest(state: State, request: RequestRecord, num_kept: int = 0) -> None:
        newest = max(state.stored_versions)
        if state.num_unfinished[newest]:
            state.unpin(request.version)
            state.pin(newest, 1)
            request.version = newest
        restart(state, request, num_kept)

    patch.setattr(State, "restart_request", on_the_newest)


def no_prompt_is_skipped_by_the_curriculum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "_update_curriculum", lambda state, event: None)


def a_skipped_prompt_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    after_handling(
        patch, lambda state, event, actions: [o for o in actions if not isinstance(o, SkipPrompts)]
    )


FAULTS: list[tuple[Fault, str]] = [
    (a_request_is_retried_without_end, "and its engine was not lost"),
    (no_request_is_retried, "although its request may be retried"),
    (a_retried_request_changes_its_version, "C1"),
    (there_is_no_bound, "C3"),
    (the_bound_ignores_past_deadlines, "C3"),
    (the_bound_ignores_committed_groups, "C3"),
    (deadlines_are_one_step_late, "C3"),
    (commits_ignore_the_bound, "C3"),
    (one_group_too_many_is_admitted, "C3"),
    (slack_is_ignored, "uses up the slack"),
    (two_versions_are_live_with_batches_per_version, "are still live"),
    (groups_are_admitted_at_an_expiring_version, "which expires in this step"),
    (groups_are_admitted_at_a_version_that_no_engine_holds, "which no engine holds"),
    (a_prompt_is_admitted_twice, "C2"),
    (a_prompt_is_skipped, "has index"),
    (no_prompt_is_skipped_by_the_curriculum, "the curriculum skipped no group"),
    (a_skipped_prompt_is_not_reported, "the curriculum skipped no group"),
    (snapshot_without("skipped_until", []), "the curriculum skipped no group"),
    (the_newest_version_is_never_requested, "deadlock"),
    (a_finished_request_needs_no_decision, "deadlock"),
    (the_cache_of_the_bound_is_never_cleared, "admissible_cache is"),
    (a_filtered_group_stays_open, "open groups are miscounted"),
    (a_filtered_group_is_not_reported, "C3"),
    (groups_are_scored_before_all_siblings_finished, "C2"),
    (a_stall_is_reported_endlessly, "deadlock"),
    (a_step_is_trained_twice, "starts during another step"),
    (a_failed_step_is_forgotten, "deadlock"),
    (a_failed_step_is_repeated_with_other_groups, "C2"),
    (a_failed_step_counts_as_trained, "is published after"),
    (a_published_version_is_forgotten, "deadlock"),
    (snapshot_without("migrations", []), "ProtocolError"),
    (snapshot_without("num_fetching", 0), "ProtocolError"),
    (snapshot_without("committed", []), "ProtocolError"),
    (snapshot_without("admission_version", None), "a resumed orchestrator"),
]
