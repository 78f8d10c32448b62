"""Which version is due first, and what a trainer waits for: named after a while, and sped up at once.

While step n waits for a group at its deadline, that wait is `stall_s`, and engines that decode
some of the group's requests decode nothing else (rush), for fewer rows make faster tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dora.core.actions import Action, ReportStall, Rush
from dora.core.engines import Engine
from dora.core.records import GroupId, RequestId
from dora.core.state import State


def nearest_first(state: State, versions: Iterable[int]) -> list[int]:
    """Versions by the least deadline of their unscored groups, those without any last.

    Where the bound is fixed, an older version has the nearer deadline.
    """
    by_age = sorted(versions)
    if state.limits.aging is None or len(by_age) < 2:
        return by_age
    nearest: dict[int, int] = {}
    for deadline, version in state.unscored:
        nearest[version] = min(deadline, nearest.get(version, deadline))
    return sorted(by_age, key=lambda v: nearest.get(v, state.limits.num_steps))


def watch_stall(state: State) -> list[Action]:
    """Keep `stall_s`: the time in which an idle trainer waits for a group at its deadline."""
    group, now = _straggler(state), state.now_s
    orders: list[Action] = []
    if state.stall_group is not None and group != state.stall_group:
        state.stall_s += now - state.stall_since_s
        state.is_stall_reported = False
    if group is not None and group != state.stall_group:
        state.stall_since_s = now
    state.stall_group = group
    is_due = now >= state.stall_since_s + state.limits.stall_report_s  # the sum next_wakeup() names
    if group is not None and not state.is_stall_reported and is_due:
        state.is_stall_reported = True
        requests = tuple(sorted(state.groups[group].unfinished))
        orders.append(ReportStall(state.next_step, group, requests, state.stall_since_s))
    return orders


def rush(state: State) -> list[Action]:
    """Engines decode only what the trainer waits for, and all their rows again once it has come."""
    if state.stall_group is None and not state.is_rushing:
        return []
    is_rushing = state.limits.rush and state.stall_group is not None
    if is_rushing == state.is_rushing:
        engines = list(state.changed)
    else:
        engines = [e.id for e in state.engines.values() if e.rushing or is_rushing]
    state.is_rushing = is_rushing
    is_mixed = _mixture(state)
    orders: list[Action] = []
    for engine in [state.engines[e] for e in sorted(engines)]:
        requests = _urgent(state, engine) if is_rushing and is_mixed(engine) else ()
        if requests != engine.rushing:
            engine.rushing = requests
            orders.append(Rush(engine.id, requests))
    return orders


def _mixture(state: State) -> Callable[[Engine], bool]:
    """Whether an engine may decode both what the trainer waits for and something else, by versions alone."""
    terms, step = state.unscored, state.next_step
    if state.evaluation is not None or state.limits.breaks_c1:  # versions on engines are not those of groups
        late = [term.deadline <= step for term in terms]
        return lambda _: any(late) and (state.evaluation is not None or not all(late))
    return lambda engine: len({t.deadline <= step for t in terms if t.version in engine.running}) == 2


def _urgent(state: State, engine: Engine) -> tuple[RequestId, ...]:
    """Its requests that the trainer waits for; none if it has no others to hold back."""
    groups = [(request, state.groups.get(request.group)) for request in engine.requests]
    requests = tuple(sorted(r for r, group in groups if group and group.deadline <= state.next_step))
    return requests if len(requests) < len(engine.requests) else ()


def _straggler(state: State) -> GroupId | None:
    """The first open group that step n must contain, while the trainer has nothing to do."""
    idle = state.training is None and state.publishing is None and state.newest == state.next_step
    if not idle or state.is_trainer_lost or state.redo or state.next_step >= state.limits.num_steps:
        return None
    late = (next(iter(groups)) for t, groups in state.unscored.items() if t.deadline <= state.next_step)
    return min(late, key=lambda group: state.groups[group].index, default=None)
