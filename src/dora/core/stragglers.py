"""Stragglers: reported while the trainer waits for them, decoded alone, and migrated off slow engines.

A stall is the time in which the idle trainer waits for a group at its deadline. Engines that run requests of
such groups decode only these, since fewer rows decode faster. An engine's lag is a power of two relative to
the fastest engine, so that random differences do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log2

from dora.core import migration
from dora.core.actions import Action, DecodeOnly, Migrate, ReportStall
from dora.core.length_prediction import predict_remaining_tokens
from dora.core.state import EngineRecord, State
from dora.core.types import GroupId, RequestId

LAG_HYSTERESIS = 0.25  # of a doubling, beyond which the lag changes
MIN_SPEEDUP = 2.0  # of a straggler's remaining time, to migrate it
BetterEngines = dict[
    tuple[int, int], EngineRecord
]  # (slow engine, version) -> destination for its stragglers


def update_stall(state: State) -> list[Action]:
    """Measure how long the idle trainer waits for a group at its deadline; report the group after a while."""
    group, now = _stalling_group(state), state.now_s
    if state.stall_group is not None and group != state.stall_group:
        state.stall_s += now - state.stall_since_s
        state.is_stall_reported = False
    if group is not None and group != state.stall_group:
        state.stall_since_s = now
    state.stall_group = group
    is_due = now >= state.stall_since_s + state.limits.stall_report_s  # the sum that next_wakeup() returns
    if group is None or state.is_stall_reported or not is_due:
        return []
    state.is_stall_reported = True
    requests = tuple(sorted(state.groups[group].unfinished))
    return [ReportStall(state.next_step, group, requests, state.stall_since_s)]


def decode_stragglers_only(state: State) -> list[Action]:
    """During a stall, let engines decode only the requests that the trainer waits for; afterwards, all."""
    if state.stall_group is None and not state.is_decoding_stragglers_only:
        return []
    is_on = state.limits.prioritize_stragglers and state.stall_group is not None
    if is_on == state.is_decoding_stragglers_only:
        engines = list(state.dirty_engines)
    else:
        engines = [e.id for e in state.engines.values() if e.decode_only or is_on]
    state.is_decoding_stragglers_only = is_on
    may_be_mixed = _mixed_engines(state)
    actions: list[Action] = []
    for engine in [state.engines[e] for e in sorted(engines)]:
        requests = _stragglers_to_prioritize(state, engine) if is_on and may_be_mixed(engine) else ()
        if requests != engine.decode_only:
            engine.decode_only = requests
            actions.append(DecodeOnly(engine.id, requests))
    return actions


def update_lags(state: State) -> None:
    """Recompute every engine's lag; an engine without a measurement does not lag."""
    if state.limits.is_static:
        return
    fastest = max((e.row_tokens_per_s for e in state.engines.values()), default=0.0)
    for engine in state.engines.values():
        rate = engine.row_tokens_per_s
        doublings = log2(fastest / rate) if rate > 0 else 0.0
        is_same = engine.lag - LAG_HYSTERESIS <= doublings < engine.lag + 1 + LAG_HYSTERESIS
        if not is_same:
            engine.lag = int(doublings)
            state.mark_dirty(engine)


def migrate_stragglers(state: State) -> list[Migrate]:
    """Migrate stragglers off slow engines, as soon as a row on a faster one is free."""
    has_migrations = state.limits.has_migrations
    better = _better_engines(state) if state.stall_group is not None and has_migrations else {}
    actions: list[Migrate] = []
    for request in _overdue_requests(state, better) if better else ():
        record = state.requests[request]
        assert record.engine is not None, f"request {request} was found on an engine"
        destination = better.get((record.engine, record.version))
        source = None if destination is None else _slow_source(state, request)
        if source and destination and _is_sooner(state, request, source, destination):
            actions.append(migration.start_migration(state, request, source, destination, "slow"))
            state.mark_dirty(destination)
            better = _better_engines(state)
    return actions


def versions_without_fast_engine(state: State) -> list[int]:
    """The version of the stalling group, if only slow engines hold it or are about to load it."""
    group = state.groups.get(state.stall_group) if state.stall_group is not None else None
    if group is None or not group.unfinished or group.version not in state.stored_versions:
        return []
    slow, version = state.slow_engines.keys(), group.version
    candidates = (state.holders.get(version, {}), state.pending_holders.get(version, {}))
    return [version] if all(engines.keys() <= slow for engines in candidates) else []


def _stalling_group(state: State) -> GroupId | None:
    """The first open group that step n must contain, while the trainer is idle."""
    is_idle = (
        state.training_step is None
        and state.publishing_version is None
        and state.newest_published == state.next_step
    )
    if (
        not is_idle
        or state.is_trainer_lost
        or state.redo_batches
        or state.next_step >= state.limits.num_steps
    ):
        return None
    overdue = (next(iter(groups)) for c, groups in state.unscored.items() if c.deadline <= state.next_step)
    return min(overdue, key=lambda group: state.groups[group].index, default=None)


def _mixed_engines(state: State) -> Callable[[EngineRecord], bool]:
    """A cheap test, by versions alone: may an engine run both stragglers and other requests?"""
    cohorts, step = state.unscored, state.next_step
    if state.evaluation is not None or state.limits.breaks_c1:  # a running version may not be its group's
        is_overdue = [cohort.deadline <= step for cohort in cohorts]
        is_mixed = any(is_overdue) and (state.evaluation is not None or not all(is_overdue))
        return lambda _: is_mixed
    return lambda e: len({c.deadline <= step for c in cohorts if c.version in e.rows_by_version}) == 2


def _stragglers_to_prioritize(state: State, engine: EngineRecord) -> tuple[RequestId, ...]:
    """The engine's requests that the trainer waits for; none if it runs no others."""
    groups = [(request, state.groups.get(request.group)) for request in engine.requests]
    requests = tuple(sorted(r for r, group in groups if group and group.deadline <= state.next_step))
    return requests if len(requests) < len(engine.requests) else ()


def _better_engines(state: State) -> BetterEngines:
    """For slow engines and overdue versions, an engine that is MIN_SPEEDUP times faster; usually none."""
    if not state.slow_engines:
        return {}
    better: BetterEngines = {}
    for version in {cohort.version for cohort in state.unscored if cohort.deadline <= state.next_step}:
        if (best := _best_engine(state, version)) is not None:
            max_rate = (best.row_tokens_per_s or 1.0) / MIN_SPEEDUP
            if max_rate > _slowest_rate(state):
                slow = (state.engines[e] for e in state.slow_engines)
                beaten = (e for e in slow if e.lag > best.lag and e.row_tokens_per_s < max_rate)
                better |= {(e.id, version): best for e in beaten if version in e.rows_by_version}
    return better


def _slowest_rate(state: State) -> float:
    """Cached rate of the slowest slow engine, in tokens/s per row."""
    if state.slowest_rate is None:
        rates = (state.engines[e].row_tokens_per_s for e in state.slow_engines)
        state.slowest_rate = min(rates, default=inf)
    return state.slowest_rate


def _best_engine(state: State, version: int) -> EngineRecord | None:
    """The least lagging engine with a free row for running requests of `version`."""
    if (available := state.available_engines.get(version)) is None:
        return None
    first = available.first()
    if first is not None and state.can_receive(state.engines[first], version):
        return state.engines[first]
    fit = [e for e in available if state.can_receive(state.engines[e], version)]
    best = min(fit, key=lambda e: (state.row_entries[e].priorities[version], e), default=None)
    return None if best is None else state.engines[best]


def _overdue_requests(state: State, better: BetterEngines) -> list[RequestId]:
    """Stragglers on these slow engines, nearest deadlines and oldest prompts first."""
    requests = (r for e in {e: None for e, _ in better} for r in state.engines[e].requests)
    groups = ((r, state.groups.get(r.group)) for r in requests)
    overdue = [(g.deadline, g.index, r) for r, g in groups if g is not None and g.deadline <= state.next_step]
    return [request for *_, request in sorted(overdue)]


def _slow_source(state: State, request: RequestId) -> EngineRecord | None:
    """The slow engine that runs the request, unless it migrates or has failed to migrate lately."""
    record = state.requests[request]
    if record.engine is None or request in state.migrations or not state.engines[record.engine].lag:
        return None
    failed_s = record.migration_failed_s
    has_failed_lately = state.now_s < failed_s + state.limits.rebalance_interval_s
    return None if has_failed_lately and failed_s else state.engines[record.engine]


def _is_sooner(state: State, request: RequestId, source: EngineRecord, destination: EngineRecord) -> bool:
    """Whether the request would finish MIN_SPEEDUP times sooner, its migration included."""
    num_left, num_tokens = predict_remaining_tokens(state, request), state.requests[request].num_tokens
    migration_s = state.costs.migration_cost(1, num_tokens, 1.0)
    destination_s = num_left / (destination.row_tokens_per_s or 1.0) + migration_s
    return num_left / source.row_tokens_per_s > MIN_SPEEDUP * destination_s
