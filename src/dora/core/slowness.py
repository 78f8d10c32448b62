"""Engines that are slower than others, by what they report: they get requests last, and keep no straggler.

How far one lags is a power of two, so that engines which differ by chance are alike. While the trainer waits
for a request at its deadline, it leaves an engine that lags for one that will have ended it sooner, the move
included, as soon as a row is free there.
"""

from __future__ import annotations

from math import log2

from dora.core import moving
from dora.core.actions import Migrate
from dora.core.engines import Engine
from dora.core.lengths import remaining_tokens
from dora.core.records import RequestId
from dora.core.state import State

MARGIN = 0.25  # of a doubling, by which a lag must be passed before it counts as another
GAIN = 2.0  # times sooner, before a request moves


def measure(state: State) -> None:
    """How many doublings each engine is slower than the fastest; what has reported nothing does not lag."""
    if state.limits.is_static:
        return
    fastest = max((e.row_tokens_per_s for e in state.engines.values()), default=0.0)
    for engine in state.engines.values():
        pace = engine.row_tokens_per_s
        doublings = log2(fastest / pace) if pace > 0 else 0.0
        is_same = engine.lag - MARGIN <= doublings < engine.lag + 1 + MARGIN
        if not is_same:
            engine.lag = int(doublings)
            state.touch(engine)


def escape(state: State) -> list[Migrate]:
    """Moves of what the trainer waits for, off engines that lag."""
    if state.stall_group is None or state.limits.is_static:
        return []
    orders: list[Migrate] = []
    for request in _late(state):
        source = _engine_of(state, request)
        if source is not None and (destination := _sooner(state, request, source)) is not None:
            orders.append(moving.begin(state, request, source, destination, "slow"))
            state.touch(destination)
    return orders


def stranded(state: State) -> list[int]:
    """The version of what the trainer waits for, if only engines that lag have it or are to have it."""
    group = state.groups.get(state.stall_group) if state.stall_group is not None else None
    if group is None or not group.unfinished or group.version not in state.store:
        return []
    engines = [*state.holders.get(group.version, ()), *state.coming.get(group.version, ())]
    return [] if any(state.engines[e].lag == 0 for e in engines) else [group.version]


def _late(state: State) -> list[RequestId]:
    late = (groups for term, groups in state.unscored.items() if term.deadline <= state.next_step)
    return [r for groups in late for group in groups for r in sorted(state.groups[group].unfinished)]


def _engine_of(state: State, request: RequestId) -> Engine | None:
    """The engine that lags and has it, if it may move now: a move that failed lately is not tried again."""
    record = state.requests[request]
    if record.engine is None or request in state.moves or not state.engines[record.engine].lag:
        return None
    is_stuck = state.now_s < record.stuck_s + state.limits.rebalance_interval_s
    return None if is_stuck and record.stuck_s else state.engines[record.engine]


def _sooner(state: State, request: RequestId, source: Engine) -> Engine | None:
    """The engine with a free row that will have ended it first, if that is soon enough."""
    record, left = state.requests[request], remaining_tokens(state, request)
    engines = (state.engines[e] for e in state.takers.get(record.version, ()))
    fit = [
        e for e in engines if e.lag < source.lag and e.free_rows > 0 and state.may_receive(e, record.version)
    ]
    best = min(fit, key=lambda e: (e.lag, -e.free_rows, e.id), default=None)
    if best is None:
        return None
    move_s = state.costs.of_move(1, record.num_tokens, 1.0)
    is_worth_it = left / source.row_tokens_per_s > GAIN * (left / (best.row_tokens_per_s or 1.0) + move_s)
    return best if is_worth_it else None
