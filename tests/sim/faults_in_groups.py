"""Deliberate faults in admission, the bound, batches, steps and the snapshot, and the message of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.sim.fault_tools import (
    Function,
    Replacement,
    add_fault,
    after_handling,
    forget_in_snapshot,
    instead_of_handling,
    replaces,
)

from dora.core import (
    admission,
    batching,
    bound,
    event_handlers,
    invariants,
    orchestrator,
    stragglers,
    weight_sync,
)
from dora.core.actions import Action, Admit, Filter, Publish, Score, SkipPrompts, Train
from dora.core.bound import bound_holds, num_admissible
from dora.core.events import Event, Published, RequestFailed, RequestFinished, StepFailed
from dora.core.orchestrator import Orchestrator
from dora.core.state import GroupRecord, RequestRecord, State
from dora.core.types import Limits


def replace_bound(holds: Function) -> list[Replacement]:
    """Replace the bound everywhere in the core, its invariants included."""
    return [(module, "bound_holds", holds) for module in (bound, batching, invariants)]


def replace_num_admissible(count: Function) -> list[Replacement]:
    return [(module, "cached_num_admissible", count) for module in (admission, orchestrator, weight_sync)]


def bound_without_past(num_open: Counter[int], next_step: int, num_committed: int, limits: Limits) -> bool:
    future = Counter({deadline: n for deadline, n in num_open.items() if deadline >= next_step})
    return bound_holds(future, next_step, num_committed, limits)


def num_admissible_without_past(state: State, version: int) -> int:
    return 1000 if state.limits.deadline(version) < state.next_step else num_admissible(state, version)


def num_admissible_without_slack(state: State, version: int) -> int:
    limits, state.limits = state.limits, replace(state.limits, slack=0)
    count = num_admissible(state, version)
    state.limits = limits
    return count


add_fault(
    "there_is_no_bound",
    "C3",
    *replace_bound(lambda num_open, next_step, num_committed, limits: True),
    *replace_num_admissible(lambda state, version: 1000),
)
add_fault(
    "the_bound_ignores_past_deadlines",
    "C3",
    *replace_bound(bound_without_past),
    *replace_num_admissible(num_admissible_without_past),
)
add_fault(
    "the_bound_ignores_committed_groups",
    "C3",
    *replace_bound(lambda num_open, next_step, _, limits: bound_holds(num_open, next_step, 0, limits)),
    *replace_num_admissible(lambda state, version: num_admissible(state, version) + len(state.committed)),
)
add_fault(
    "one_group_too_many_is_admitted",
    "C3",
    *replace_num_admissible(lambda state, version: num_admissible(state, version) + 1),
)
add_fault("slack_is_ignored", "uses up the slack", *replace_num_admissible(num_admissible_without_slack))
add_fault("commits_ignore_the_bound", "C3", (batching, "_may_commit", lambda state: True))
add_fault(
    "two_versions_are_live_with_batches_per_version",
    "are still live",
    (bound, "_quota", lambda state, version: 1000),
)
add_fault(
    "groups_are_admitted_at_an_expiring_version",
    "which expires in this step",
    (admission, "_may_fill", lambda state, version: True),
)
add_fault(
    "the_newest_version_is_never_requested", "deadlock", (weight_sync, "update_demand", lambda state: None)
)
add_fault(
    "a_finished_request_needs_no_decision",
    "deadlock",
    (Orchestrator, "_needs_no_decision", lambda core, event: isinstance(event, RequestFinished)),
)
add_fault(
    "no_request_is_retried",
    "although its request may be retried",
    (event_handlers, "_may_retry", lambda state, event: False),
)
add_fault(
    "no_prompt_is_skipped_by_the_curriculum",
    "the curriculum skipped no group",
    (event_handlers, "_update_curriculum", lambda state, event: None),
)
forget_in_snapshot("skipped_until", [], "the curriculum skipped no group")
forget_in_snapshot("migrations", [], "ProtocolError")
forget_in_snapshot("num_fetching", 0, "ProtocolError")
forget_in_snapshot("committed", [], "ProtocolError")
forget_in_snapshot("admission_version", None, "a resumed orchestrator")


@replaces("C3", Limits, "deadline")
def deadlines_are_one_step_late(original: Function, self: Limits, version: int, lowered: int = 0) -> int:
    return min(version + self.max_staleness - lowered + 1, self.num_steps - 1)


@replaces("which no engine holds", admission, "admit")
def groups_are_admitted_at_a_version_that_no_engine_holds(original: Function, state: State) -> Any:
    rows = state.admission_rows
    state.admission_rows = Counter({max(state.stored_versions, default=0): 100})
    actions = original(state)
    state.admission_rows = rows
    return actions


@replaces("C2", admission, "admit")
def a_prompt_is_admitted_twice(original: Function, state: State) -> list[Action]:
    actions: list[Action] = original(state)
    last = actions[-1] if actions else None
    if isinstance(last, Admit):
        state.prompts.appendleft((last.index, last.group))
    return actions


@replaces("has index", admission, "admit")
def a_prompt_is_skipped(original: Function, state: State) -> Any:
    if len(state.prompts) > 1:
        state.prompts.popleft()
    return original(state)


class PermanentCache(dict[int, int]):
    def clear(self) -> None:
        pass


@replaces("admissible_cache is", State, "__init__")
def the_cache_of_the_bound_is_never_cleared(
    original: Function, self: State, *args: Any, **kwargs: Any
) -> None:
    original(self, *args, **kwargs)
    self.admissible_cache = PermanentCache()


@replaces("open groups are miscounted", event_handlers, "_end_group")
def a_filtered_group_stays_open(original: Function, state: State, group: GroupRecord) -> None:
    del state.groups[group.id]


@after_handling("C3")
def a_filtered_group_is_not_reported(state: State, event: Event, actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Filter)]


@after_handling("the curriculum skipped no group")
def a_skipped_prompt_is_not_reported(state: State, event: Event, actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, SkipPrompts)]


@after_handling("C2", RequestFinished)
def groups_are_scored_before_all_siblings_finished(
    state: State, event: RequestFinished, actions: list[Action]
) -> list[Action]:
    return [Score(event.request.group)]


@replaces("deadlock", stragglers, "update_stall")
def a_stall_is_reported_endlessly(original: Function, state: State) -> Any:
    actions = original(state)
    state.is_stall_reported = False
    return actions


@replaces("starts during another step", batching, "train")
def a_step_is_trained_twice(original: Function, state: State) -> Any:
    return original(state) * 2


@after_handling("deadlock", StepFailed)
def a_failed_step_is_forgotten(state: State, event: StepFailed, actions: list[Action]) -> list[Action]:
    return []


@after_handling("C2")
def a_failed_step_is_repeated_with_other_groups(
    state: State, event: Event, actions: list[Action]
) -> list[Action]:
    return [Train(o.step, o.groups[::-1]) if isinstance(o, Train) else o for o in actions]


@instead_of_handling("is published after", StepFailed)
def a_failed_step_counts_as_trained(state: State, event: StepFailed) -> list[Action]:
    state.training_step = None
    state.publishing_version = event.step + 1
    return [Publish(state.publishing_version)]


@after_handling("deadlock", Published)
def a_published_version_is_forgotten(state: State, event: Published, actions: list[Action]) -> None:
    if event.version > 0:
        state.newest_published = event.version - 1


@replaces("and its engine was not lost", event_handlers, "_may_retry")
def a_request_is_retried_without_end(original: Function, state: State, event: RequestFailed) -> bool:
    return event.cause == "environment" and event.request not in state.migrations


@replaces("C1", State, "restart_request")
def a_retried_request_changes_its_version(
    original: Function, state: State, request: RequestRecord, num_kept: int = 0
) -> None:
    newest = max(state.stored_versions)
    if state.num_unfinished[newest]:
        state.unpin(request.version)
        state.pin(newest, 1)
        request.version = newest
    original(state, request, num_kept)
