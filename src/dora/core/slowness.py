"""Engines that are slower than others, by what they report: they get requests last, and keep no straggler.

How far one lags is a power of two, so that engines which differ by chance are alike. While the trainer waits
for a request at its deadline, it leaves an engine that lags for one that will have ended it sooner, the move
included, as soon as a row is free there.
"""

from __future__ import annotations

from math import inf, log2

from dora.core import moving
from dora.core.actions import Migrate
from dora.core.engines import Engine
from dora.core.lengths import remaining_tokens
from dora.core.records import RequestId
from dora.core.state import State

MARGIN = 0.25  # of a doubling, by which a lag must be passed before it counts as another
GAIN = 2.0  # times sooner, before a request moves
Better = dict[tuple[int, int], Engine]  # engine, version -> where its late requests are better off


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
    """Moves of what the trainer waits for, off engines that lag; nearly never is there a better one."""
    better = {} if state.stall_group is None or state.limits.is_static else _better(state)
    orders: list[Migrate] = []
    for request in _late(state, better) if better else ():
        record = state.requests[request]
        assert record.engine is not None, "it was found on an engine"
        destination = better.get((record.engine, record.version))
        source = None if destination is None else _engine_of(state, request)
        if source and destination and _is_sooner(state, request, source, destination):
            orders.append(moving.begin(state, request, source, destination, "slow"))
            state.touch(destination)
            better = _better(state)
    return orders


def stranded(state: State) -> list[int]:
    """The version of what the trainer waits for, if only engines that lag have it or are to have it."""
    group = state.groups.get(state.stall_group) if state.stall_group is not None else None
    if group is None or not group.unfinished or group.version not in state.store:
        return []
    laggards, version = state.laggards.keys(), group.version
    owners = (state.holders.get(version, {}), state.coming.get(version, {}))
    return [version] if all(engines.keys() <= laggards for engines in owners) else []


def _better(state: State) -> Better:
    """The best row elsewhere, where it makes tokens so much faster; nearly never is there any."""
    if not state.laggards:
        return {}
    better: Better = {}
    for version in {term.version for term in state.unscored if term.deadline <= state.next_step}:
        if (best := _best(state, version)) is not None:
            slow = (best.row_tokens_per_s or 1.0) / GAIN
            if slow > _least_pace(state):
                laggards = (state.engines[e] for e in state.laggards)
                beaten = (e for e in laggards if e.lag > best.lag and e.row_tokens_per_s < slow)
                better |= {(e.id, version): best for e in beaten if version in e.running}
    return better


def _least_pace(state: State) -> float:
    """Of the engines that lag, which is asked far more often than it changes."""
    if state.least_pace is None:
        state.least_pace = min((state.engines[e].row_tokens_per_s for e in state.laggards), default=inf)
    return state.least_pace


def _best(state: State, version: int) -> Engine | None:
    """Of the engines with a free row for requests of `version`, the one that lags least.

    It is the first to get what waits, and the next only where that one may not receive what runs elsewhere.
    """
    if (takers := state.takers.get(version)) is None:
        return None
    first = takers.first()
    if first is not None and state.may_receive(state.engines[first], version):
        return state.engines[first]
    fit = [e for e in takers if state.may_receive(state.engines[e], version)]
    best = min(fit, key=lambda e: (state.rooms[e].ranks[version], e), default=None)
    return None if best is None else state.engines[best]


def _late(state: State, better: Better) -> list[RequestId]:
    """What the trainer waits for on these engines, the oldest prompts first."""
    requests = (r for e in {e: None for e, _ in better} for r in state.engines[e].requests)
    groups = ((r, state.groups.get(r.group)) for r in requests)
    late = [(g.deadline, g.index, r) for r, g in groups if g is not None and g.deadline <= state.next_step]
    return [request for *_, request in sorted(late)]


def _engine_of(state: State, request: RequestId) -> Engine | None:
    """The engine that lags and has it, if it may move now: a move that failed lately is not tried again."""
    record = state.requests[request]
    if record.engine is None or request in state.moves or not state.engines[record.engine].lag:
        return None
    is_stuck = state.now_s < record.stuck_s + state.limits.rebalance_interval_s
    return None if is_stuck and record.stuck_s else state.engines[record.engine]


def _is_sooner(state: State, request: RequestId, source: Engine, destination: Engine) -> bool:
    """Whether it would end there soon enough."""
    left, num_tokens = remaining_tokens(state, request), state.requests[request].num_tokens
    move_s = state.costs.of_move(1, num_tokens, 1.0)
    there_s = left / (destination.row_tokens_per_s or 1.0) + move_s
    return left / source.row_tokens_per_s > GAIN * there_s
