"""Which version each engine serves, and which engine runs which waiting request.

Algorithm 1 of DORA (arXiv 2604.26256): engines are shared out among versions in proportion to
their requests, what the bound still admits counted for the newest. Waiting requests go to the
engine with the most free rows, versions closest to their deadline first; siblings stay
together where rows allow, so that they share the KV of their prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum

from dora.core.actions import Action, Generate
from dora.core.bound import admissible
from dora.core.deadlines import nearest_first
from dora.core.engines import Engine
from dora.core.lengths import horizon_tokens
from dora.core.records import RequestId
from dora.core.state import State


def place(state: State) -> list[Action]:
    """Give waiting requests the free rows of engines that hold their version."""
    if not state.waiting:
        return []
    orders: list[Action] = []
    for version in nearest_first(state, state.waiting):
        placed: dict[int, list[RequestId]] = {}
        while version in state.waiting and version in state.takers:
            taker = state.takers[version].first()
            assert taker is not None, f"version {version} has takers without a first"
            placed.setdefault(taker, []).extend(_fill(state, state.engines[taker], version))
        orders += [Generate(e, version, tuple(requests)) for e, requests in sorted(placed.items())]
    return orders


def is_now(state: State) -> bool:
    """Whether engines and requests are to be looked at again: something happened, or time has passed."""
    is_later = state.now_s >= state.rebalanced_s + state.limits.rebalance_interval_s
    return state.is_rebalance_due or (is_later and "period" not in state.limits.without)


def is_due(state: State) -> bool:
    """As `is_now`, and it is done now."""
    if not is_now(state):
        return False
    state.is_rebalance_due, state.rebalanced_s = False, state.now_s
    return True


def repartition(state: State) -> bool:
    """Decide which engines clear a slot for another version, where that gains more than it costs.

    Returns whether it stopped at `max_moves`, so that it is to go on at the next event.
    """
    limits = state.limits
    if limits.is_static or "shares" in limits.without or state.newest is None or state.is_trained:
        return False
    flips = _Flips(state)
    engines = sorted(state.engines.values(), key=lambda e: (e.kv_tokens.total(), e.id))
    _share_out(state, [e for e in engines if e.slots == 1 and not e.is_leaving], flips)
    for engine in engines:
        if engine.slots > 1 and state.newest not in engine.held and len(engine.held) == engine.slots:
            victims = sorted(engine.held, key=lambda v: (engine.kv_tokens[v], v))
            any(flips.flip(engine, version, state.newest) for version in victims)
    return flips.num_left <= 0


def shares(requests: Mapping[int, int], total: int, order: Sequence[int]) -> dict[int, int]:
    """Divide `total` engines among versions in proportion to their requests, sum preserved.

    Largest remainder; a version with any request gets at least 1, and where there are fewer
    engines than such versions, the first in `order` get theirs and the others wait. Ties go to
    the first in `order`, which names every version of `requests` once. (Step 2 of Algorithm 1,
    which leaves the rounding open.)
    """
    wanting = [version for version in order if requests[version] > 0]
    if total <= len(wanting):
        return {version: int(version in wanting[:total]) for version in order}
    num_requests = sum(requests.values())
    if not num_requests:
        return dict.fromkeys(order, 0)
    result = {version: total * requests[version] // num_requests for version in order}
    by_remainder = sorted(wanting, key=lambda v: -(total * requests[v] % num_requests))  # stable
    for version in by_remainder[: total - sum(result.values())]:
        result[version] += 1
    for version in wanting:
        if result[version] == 0:  # from the one that has most over its quota, and more than one
            rich = [v for v in wanting if result[v] > 1]
            result[max(rich, key=lambda v: result[v] * num_requests - total * requests[v])] -= 1
            result[version] = 1
    return result


def rounded(requests: Mapping[int, int], total: int, order: Sequence[int]) -> dict[int, int]:
    """Step 2 of Algorithm 1 as it is printed: the sum may differ from `total`, a version may get none."""
    num_requests = sum(requests.values())
    return {v: int(total * requests[v] / num_requests + 0.5) if num_requests else 0 for v in order}


def _share_out(state: State, engines: list[Engine], flips: _Flips) -> None:
    """Engines of one slot: whole engines change their version until shares are met.

    Unequal engines count by their throughput, in units of the slowest.
    """
    if not engines:
        return
    units = _units(engines)
    have: Counter[int] = Counter()
    for engine in engines:
        have[engine.top] += units[engine.id]
    requests = _requests(state)
    order = sorted(nearest_first(state, requests), key=state.is_only_evaluated)
    divide = rounded if "remainders" in state.limits.without else shares
    target = divide(requests, sum(units.values()), order)
    for version in order:
        is_newest = version == state.newest
        lacking = state.num_waiting(version) - _rows_of(state, version)
        for engine in engines:
            unit, old = units[engine.id], engine.top
            if have[version] >= target[version] or (lacking <= 0 and not is_newest) or flips.num_left <= 0:
                break  # more engines would find nothing to do, or that is enough for now
            is_due = have[version] + unit / 2 <= target[version]
            is_surplus = old != version and have[old] - unit / 2 >= target.get(old, 0)
            if is_due and is_surplus and flips.flip(engine, old, version):
                have[old] -= unit
                have[version] += unit
                lacking -= engine.rows


def _rows_of(state: State, version: int) -> int:
    """Rows that requests of `version` get sooner or later, on engines that have it or are to have it."""
    if version not in state.waiting:
        return 0
    engines = (e for e in state.engines.values() if e.is_working)
    return sum(e.rows for e in engines if version in (e.loading, e.wanted, *e.held))


def _requests(state: State) -> dict[int, int]:
    """R[w]: unfinished requests by version, with what the bound still admits at the newest."""
    assert state.newest is not None
    requests = {v: num for v, num in state.unfinished.items() if v in state.store}
    for version in [v for v in requests if state.is_only_evaluated(v) and v not in state.holders]:
        del requests[version]  # it is lent an engine
    num_rows = sum(e.rows for e in state.engines.values() if not e.is_leaving)
    supplement = admissible(state, state.newest) * state.limits.group_size
    free_rows = max(0, num_rows - sum(requests.values()))
    requests[state.newest] = requests.get(state.newest, 0) + min(supplement, free_rows)
    return requests


def _units(engines: list[Engine]) -> dict[int, int]:
    """Throughput of each engine, in units of the slowest; unmeasured ones count as the mean."""
    speeds = [e.row_tokens_per_s for e in engines if e.row_tokens_per_s > 0]
    usual = sum(speeds) / len(speeds) if speeds else 1.0
    throughput = {e.id: e.rows * (e.row_tokens_per_s or usual) for e in engines}
    slowest = min(throughput.values())
    return {engine: round(speed / slowest) for engine, speed in throughput.items()}


class _Flips:
    """Engines that clear a slot, until `max_moves` requests have to move for it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.num_left = state.limits.max_moves
        self._spare: Counter[int] = Counter()  # version -> rows that requests may move to
        self._room: dict[int, float] = {}  # ... and for how much KV, in that of an engine
        for version, takers in state.takers.items():
            engines = [state.engines[e] for e in takers]
            self._spare[version] = sum(_spare_rows(state, e, version) for e in engines)
            self._room[version] = fsum(_spare_kv(state, e, version) for e in engines)  # in any order

    def flip(self, engine: Engine, old: int, new: int) -> bool:
        """Have it clear `old` for `new`, if its requests find rows and KV elsewhere and it is worth it."""
        state = self._state
        if self.num_left <= 0 or engine.loading is not None or engine.wanted is not None:
            return False
        if not engine.is_working or engine.arriving or old not in engine.held:
            return False
        if not _is_due(state, engine, new):
            return False
        num_requests = engine.running[old]
        rows_elsewhere = self._spare[old] - _spare_rows(state, engine, old)
        room_elsewhere = self._room.get(old, 0.0) - _spare_kv(state, engine, old)
        kv = engine.kv_share_of(old) if "room" not in state.limits.without else 0.0
        if num_requests > rows_elsewhere or kv > max(0.0, room_elsewhere):
            return False
        if num_requests and not _is_worth_it(state, engine, old):
            return False
        if state.is_pinned(old) and len(state.holders[old]) == 1:
            return False
        self._spare[old], self._room[old] = rows_elsewhere - num_requests, room_elsewhere - kv
        self.num_left -= num_requests
        engine.clearing, engine.wanted = old, new
        state.touch(engine)
        return True


def _is_due(state: State, engine: Engine, version: int) -> bool:
    """Whether engines take this version now, or leave it out."""
    if version != state.newest or state.is_newest_asked:
        return True
    limits = state.limits
    is_left_out = engine.skipped == version or version - engine.top < limits.load_interval
    return limits.batches_per_version is None and not is_left_out


def _is_worth_it(state: State, engine: Engine, old: int) -> bool:
    """Rows that would stay empty until the last request ends, against moving these and loading."""
    pace, num_requests = engine.row_tokens_per_s, engine.running[old]
    gain = (engine.rows - num_requests) * horizon_tokens(state, engine, old)
    cost = state.costs.of_move(num_requests, engine.kv_tokens[old], pace)
    return gain > cost + state.costs.of_load(engine.rows, pace)


def _spare_rows(state: State, engine: Engine, version: int) -> int:
    return engine.free_rows if state.may_receive(engine, version) else 0


def _spare_kv(state: State, engine: Engine, version: int) -> float:
    """Where it has rows, too: `takers` has no others, and what was not counted in is not to be taken out."""
    return state.limits.kv_watermark - engine.kv_share if _spare_rows(state, engine, version) else 0.0


def _fill(state: State, engine: Engine, version: int) -> list[RequestId]:
    """Siblings of the first waiting group, as many as the engine has rows for."""
    waiting = state.waiting[version]
    group = next(iter(waiting)).group
    taken: list[RequestId] = []
    while waiting and engine.free_rows > 0 and (request := next(iter(waiting))).group == group:
        del waiting[request]
        state.seat(request, engine, version)
        taken.append(request)
    if not waiting:
        state.forget_waiting(version)
    state.touch(engine)
    return taken
