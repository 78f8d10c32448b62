"""Which running requests move to another engine, with their KV.

A request moves only to an engine that holds its version: a short one to where it fits best, a
long one to where most rows are free. What must leave an engine moves in any case; tails are
gathered only where that gains more than it costs.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from dora.core import moving
from dora.core.actions import Migrate
from dora.core.costs import VERSION_OVERHEAD
from dora.core.engines import Engine
from dora.core.lengths import horizon_tokens, is_long
from dora.core.records import RequestId
from dora.core.state import State


def migrate(state: State) -> list[Migrate]:
    """Moves that are due now, the needed ones first."""
    if state.limits.is_static or "moves" in state.limits.without:
        return []
    berths = _Berths(state)
    orders = _evacuate(state, berths)
    orders += _gather(state, berths)
    orders += _relieve(state, berths)
    if state.limits.level_running:
        orders += _level(state)
    for destination in {order.destination: None for order in orders}:
        state.touch(state.engines[destination])  # once, for many requests may go there
    return orders


class _Berths:
    """Free rows by version, on engines that may take moved requests.

    No engine that requests have to leave is among them.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._engines: dict[int, list[tuple[int, int]]] = {}  # (free rows, engine), fewest first

    def take(self, version: int, request: RequestId) -> Engine | None:
        """A row where the request fits best, or for a long one, where most rows are free."""
        engines = self._of(version)
        end = -1 if is_long(self._state, request) else 0
        while engines:
            num_free, number = engines.pop(end)
            engine = self._state.engines[number]
            is_fresh = num_free == engine.free_rows  # rows may have gone to another version
            num_left = engine.free_rows - is_fresh
            if num_left > 0:
                insort(engines, (num_left, number))
            if is_fresh:
                return engine
        return None

    def _of(self, version: int) -> list[tuple[int, int]]:
        if version not in self._engines:
            engines = [self._state.engines[e] for e in self._state.takers.get(version, ())]
            fit = [e for e in engines if e.free_rows > 0 and self._state.may_receive(e, version)]
            self._engines[version] = sorted((e.free_rows, e.id) for e in fit)
        return self._engines[version]


def _evacuate(state: State, berths: _Berths) -> list[Migrate]:
    """Off engines that leave, that give way to the trainer, or that clear a slot."""
    orders: list[Migrate] = []
    for engine in state.engines.values():
        if engine.is_leaving:
            orders += _move_off(state, engine, None, berths, "leave")
        elif engine.is_pausing or engine.is_paused:
            orders += _move_off(state, engine, None, berths, "reclaim")
        elif engine.clearing is not None:
            orders += _move_off(state, engine, engine.clearing, berths, "flip")
    return orders


def _gather(state: State, berths: _Berths) -> list[Migrate]:
    """Tails of an old version to engines that decode more of it: each version slows all rows."""
    orders: list[Migrate] = []
    for engine in state.engines.values():
        if len(engine.running) < 2 or not engine.is_working:
            continue
        for version in [v for v in sorted(engine.running) if v != state.newest]:
            host = _host(state, engine, version)
            if host is None or not _is_gain(state, engine, version):
                continue
            mine = [r for r, v in engine.requests.items() if v == version and r not in state.moves]
            orders += [moving.begin(state, request, engine, host, "gather") for request in mine]
    return orders


def _host(state: State, engine: Engine, version: int) -> Engine | None:
    """An engine that decodes more requests of `version` and has rows for all of this one's."""
    num_requests = engine.running[version]
    if version in engine.arriving.values() or version in engine.aborting.values():
        return None
    hosts = (state.engines[e] for e in state.holders.get(version, ()))
    fit = [
        e
        for e in hosts
        if e is not engine
        and state.may_receive(e, version)
        and e.free_rows >= num_requests
        and (e.running[version], -e.id) > (num_requests, -engine.id)
    ]
    return max(fit, key=lambda e: (e.running[version], -e.id), default=None)


def _is_gain(state: State, engine: Engine, version: int) -> bool:
    num_others = len(engine.requests) - engine.running[version]
    gain = VERSION_OVERHEAD * num_others * horizon_tokens(state, engine, version)
    pace = engine.row_tokens_per_s
    return gain > state.costs.of_move(engine.running[version], engine.kv_tokens[version], pace)


def _relieve(state: State, berths: _Berths) -> list[Migrate]:
    """The request with most KV off each engine that runs short of it."""
    orders: list[Migrate] = []
    for engine in state.engines.values():
        if engine.kv_share <= state.limits.kv_watermark or not engine.is_working:
            continue
        staying = [r for r in engine.requests if r not in state.moves]
        heaviest = max(staying, key=lambda r: (state.requests[r].num_tokens, r), default=None)
        if heaviest is not None:
            orders += _move_to(state, heaviest, engine, berths, "kv")
    return orders


def _level(state: State) -> list[Migrate]:
    """Even out the engines of each version: from the one with most requests to the one with fewest."""
    orders: list[Migrate] = []
    num_going = Counter(move.source for move in state.moves.values())
    for version in sorted(state.takers):
        engines = [
            state.engines[e] for e in state.holders.get(version, ()) if state.engines[e].is_open(version)
        ]
        loads = {e.id: len(e.requests) + len(e.arriving) - num_going[e.id] for e in engines}
        takers = [e for e in engines if state.may_receive(e, version)]
        staying = {e.id: _lightest_last(state, e, version) for e in engines}
        while takers and loads:
            least = min(takers, key=lambda e: (loads[e.id], e.id))
            most = max((e for e in loads if staying[e]), key=lambda e: (loads[e], -e), default=least.id)
            if loads[most] - loads[least.id] < 2 or least.free_rows == 0:
                break
            request = staying[most].pop()
            orders.append(moving.begin(state, request, state.engines[most], least, "level"))
            loads[most] -= 1
            loads[least.id] += 1
    return orders


def _lightest_last(state: State, engine: Engine, version: int) -> list[RequestId]:
    """Requests that may move, by KV, the cheapest to move at the end."""
    mine = [r for r, v in engine.requests.items() if v == version and r not in state.moves]
    return sorted(mine, key=lambda r: (-state.requests[r].num_tokens, r))


def _move_off(
    state: State, engine: Engine, version: int | None, berths: _Berths, reason: str
) -> list[Migrate]:
    """Move all requests of `version` (None: of all) that find a row elsewhere."""
    mine = [r for r, v in engine.requests.items() if version in (None, v) and r not in state.moves]
    return [order for request in mine for order in _move_to(state, request, engine, berths, reason)]


def _move_to(state: State, request: RequestId, source: Engine, berths: _Berths, reason: str) -> list[Migrate]:
    destination = berths.take(source.requests[request], request)
    return [] if destination is None else [moving.begin(state, request, source, destination, reason)]
