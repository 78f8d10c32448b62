"""The swarm is worth its time: each rule of the core, broken on purpose, is caught by some seed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import pytest

from dora.core import admission, batching, hearing, invariants, placement, versions
from dora.core.actions import Action, Admit, Filter, Score
from dora.core.events import EngineLost, Event, RequestFinished
from dora.core.records import Limits, RequestId
from dora.core.state import Engine, Group, State, bound_holds
from dora.sim import swarm

NUM_SEEDS = 100
MAX_EVENTS = 5_000
Fault = Callable[[pytest.MonkeyPatch], None]


def set_bound(patch: pytest.MonkeyPatch, bound: Callable[[Counter[int], int, int, Limits], bool]) -> None:
    """Everywhere in the core, its own invariants included."""
    for module in (admission, batching, invariants):
        patch.setattr(module, "bound_holds", bound)


def before_hearing(patch: pytest.MonkeyPatch, change: Callable[[State, Event], None]) -> None:
    right = hearing.hear

    def hear(state: State, event: Event) -> list[Action]:
        change(state, event)
        return right(state, event)

    patch.setattr(hearing, "hear", hear)


def after_hearing(
    patch: pytest.MonkeyPatch, change: Callable[[State, Event, list[Action]], list[Action]]
) -> None:
    right = hearing.hear
    patch.setattr(hearing, "hear", lambda state, event: change(state, event, right(state, event)))


def there_is_no_bound(patch: pytest.MonkeyPatch) -> None:
    set_bound(patch, lambda opened, next_step, num_committed, limits: True)


def the_bound_forgets_deadlines_that_have_passed(patch: pytest.MonkeyPatch) -> None:
    def from_n_on(opened: Counter[int], next_step: int, num_committed: int, limits: Limits) -> bool:
        ahead = Counter({deadline: count for deadline, count in opened.items() if deadline >= next_step})
        return bound_holds(ahead, next_step, num_committed, limits)

    set_bound(patch, from_n_on)


def the_bound_forgets_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    set_bound(
        patch, lambda opened, next_step, num_committed, limits: bound_holds(opened, next_step, 0, limits)
    )


def a_deadline_is_one_step_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "deadline", lambda self, v: min(v + self.max_staleness + 1, self.num_steps - 1))


def commits_ignore_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching, "_may_commit", lambda state: True)


def groups_are_admitted_at_a_version_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "admission_version", lambda state: state.newest)
    patch.setattr(admission, "_free_rows", lambda state, version: 1)


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


def versions_are_dropped_under_running_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_may_drop", lambda state, engine, version: True)


def slots_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def load_into(state: State, engine: Engine, version: int) -> list[Action]:
        slots, engine.slots = engine.slots, 1000
        try:
            return right(state, engine, version)
        finally:
            engine.slots = slots

    right = versions._load_into
    patch.setattr(versions, "_load_into", load_into)


def pinned_versions_are_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "is_pinned", lambda self, version: False)


def orphans_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_orphans", lambda state: [])


def requests_of_a_lost_engine_are_lost(patch: pytest.MonkeyPatch) -> None:
    def forget(state: State, event: Event) -> None:
        if isinstance(event, EngineLost):
            for request in list(state.engines[event.engine].requests):
                del state.engines[event.engine].requests[request]

    before_hearing(patch, forget)


def requests_of_a_lost_engine_take_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    def move(state: State, event: Event, orders: list[Action]) -> list[Action]:
        newest = state.newest
        if isinstance(event, EngineLost) and newest is not None:
            for request_id in [r for waiting in state.waiting.values() for r in waiting]:
                request = state.requests[request_id]
                state.waiting[request.version].remove(request_id)
                state.waiting.setdefault(newest, deque()).append(request_id)
                state.unfinished.subtract([request.version])
                state.unfinished.update([newest])
                request.version = newest
        return orders

    after_hearing(patch, move)


def requests_are_placed_twice(patch: pytest.MonkeyPatch) -> None:
    right = placement._assign

    def assign(state: State, request: RequestId, engine: Engine, version: int) -> None:
        right(state, request, engine, version)
        if state.requests[request].num_tokens == 0:
            state.requests[request].num_tokens = 1
            state.waiting[version].append(request)

    patch.setattr(placement, "_assign", assign)


def aborts_free_their_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    right = hearing._fail

    def fail(state: State, group: Group, reason: str) -> list[Action]:
        orders = right(state, group, reason)
        for engine in state.engines.values():
            for version in engine.aborting.values():
                engine.running[version] -= 1
            engine.aborting.clear()
        return orders

    patch.setattr(hearing, "_fail", fail)


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
    right = batching.watch_stall

    def watch_stall(state: State, now: float) -> list[Action]:
        orders = right(state, now)
        state.is_stall_reported = False
        return orders

    patch.setattr(batching, "watch_stall", watch_stall)


def a_step_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = batching.train
    patch.setattr(batching, "train", lambda state: right(state) * 2)


FAULTS: list[tuple[Fault, str]] = [
    (there_is_no_bound, "C3"),
    (the_bound_forgets_deadlines_that_have_passed, "C3"),
    (the_bound_forgets_what_is_committed, "C3"),
    (a_deadline_is_one_step_late, "C3"),
    (commits_ignore_the_bound, "C3"),
    (groups_are_admitted_at_a_version_nobody_holds, "at a version nobody holds"),
    (a_prompt_is_admitted_twice, "C2"),
    (a_prompt_is_skipped, "C2: dataset gap"),
    (versions_are_dropped_under_running_requests, "which holds"),
    (slots_are_not_counted, "slots"),
    (pinned_versions_are_retired, "and not in the store"),
    (orphans_are_not_loaded, "deadlock"),
    (requests_of_a_lost_engine_are_lost, "a request has no owner, or two"),
    (requests_of_a_lost_engine_take_the_newest_version, "changes its version"),
    (requests_are_placed_twice, "a request has no owner, or two"),
    (aborts_free_their_rows_at_once, "the abort was ordered"),
    (a_filtered_group_keeps_its_place, "open groups are miscounted"),
    (a_filtered_group_is_not_named, "C2"),
    (groups_are_scored_before_all_siblings_finished, "the group was given to the rewarder"),
    (a_stall_is_reported_for_ever, "deadlock"),
    (a_step_is_trained_twice, "ProtocolError"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_broken_rule_is_caught(monkeypatch: pytest.MonkeyPatch, fault: Fault, words: str) -> None:
    monkeypatch.setattr(swarm, "MAX_EVENTS", MAX_EVENTS)
    fault(monkeypatch)
    assert any(words in swarm.run_world(seed).verdict for seed in range(NUM_SEEDS))
