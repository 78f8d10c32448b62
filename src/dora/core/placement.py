"""Placement: which versions each engine serves, and which engine runs which waiting request.

Algorithm 1 of DORA (arXiv 2604.26256). Engines are divided among versions in proportion to their requests;
the newest version also counts what the bound still admits. Waiting requests go to the engine with most free
rows, versions nearest to their deadline first. Siblings stay together where rows allow, so that they share
the KV of their prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum

from dora.core.actions import Action, Generate
from dora.core.bound import cached_num_admissible, sort_by_deadline
from dora.core.length_prediction import predict_remaining_steps
from dora.core.state import EngineRecord, State
from dora.core.types import RequestId


def place_waiting(state: State) -> list[Action]:
    """Place waiting requests on free rows of engines that hold their version."""
    if not state.waiting:
        return []
    actions: list[Action] = []
    for version in sort_by_deadline(state, state.waiting):
        placed: dict[int, list[RequestId]] = {}
        while version in state.waiting and version in state.available_engines:
            engine = state.available_engines[version].first()
            assert engine is not None, f"the heap of engines available for version {version} is empty"
            placed.setdefault(engine, []).extend(_place_siblings(state, state.engines[engine], version))
        actions += [Generate(e, version, tuple(requests)) for e, requests in sorted(placed.items())]
    return actions


def needs_rebalance(state: State) -> bool:
    """Whether engines and requests must be rebalanced: an event requires it, or the interval has passed."""
    is_interval_over = state.now_s >= state.last_rebalance_s + state.limits.rebalance_interval_s
    return state.is_rebalance_due or (is_interval_over and "period" not in state.limits.ablations)


def begin_rebalance(state: State) -> bool:
    """`needs_rebalance`; if true, the interval starts again."""
    if not needs_rebalance(state):
        return False
    state.is_rebalance_due, state.last_rebalance_s = False, state.now_s
    return True


def repartition(state: State) -> bool:
    """Decide which engines evict a version for another one, where that gains more than it costs.

    Returns whether it stopped at `max_migrations`, so that it must continue at the next event.
    """
    limits = state.limits
    newest = state.newest_published
    if limits.is_static or "shares" in limits.ablations or newest is None or state.is_training_done:
        return False
    flips = _Flips(state)
    engines = sorted(state.engines.values(), key=lambda e: (e.kv_tokens.total(), e.id))
    _divide_engines(state, [e for e in engines if e.num_slots == 1 and not e.is_draining], flips)
    for engine in engines:
        if engine.num_slots > 1 and newest not in engine.loaded and len(engine.loaded) == engine.num_slots:
            by_kv = sorted(engine.loaded, key=lambda v: (engine.kv_tokens[v], v))
            any(flips.try_flip(engine, version, newest) for version in by_kv)
    return flips.num_left <= 0


def apportion(requests: Mapping[int, int], total: int, order: Sequence[int]) -> dict[int, int]:
    """Divide `total` engines among versions in proportion to their requests, sum preserved.

    Largest-remainder method. A version with any request gets at least 1; if there are fewer engines than such
    versions, the first in `order` get one each. Ties go to the first in `order`, which contains every version
    of `requests` once. (Step 2 of Algorithm 1, which leaves the rounding open.)
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
        if result[version] == 0:  # take one from the version that exceeds its quota most
            rich = [v for v in wanting if result[v] > 1]
            result[max(rich, key=lambda v: result[v] * num_requests - total * requests[v])] -= 1
            result[version] = 1
    return result


def apportion_by_rounding(requests: Mapping[int, int], total: int, order: Sequence[int]) -> dict[int, int]:
    """Step 2 of Algorithm 1 as printed: the sum may differ from `total`, and a version may get no engine."""
    num_requests = sum(requests.values())
    return {v: int(total * requests[v] / num_requests + 0.5) if num_requests else 0 for v in order}


class _Flips:
    """Engines that evict one version for another, until `max_migrations` requests must migrate for it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.num_left = state.limits.max_migrations
        self._free_rows: Counter[int] = Counter()  # version -> rows that its requests may migrate to
        self._free_kv: dict[int, float] = {}  # ... and KV, in units of one engine's KV
        for version, available in state.available_engines.items():
            engines = [state.engines[e] for e in available]
            self._free_rows[version] = sum(_receivable_rows(state, e, version) for e in engines)
            free_kv = (_receivable_kv(state, e, version) for e in engines)
            self._free_kv[version] = fsum(free_kv)  # exact, hence independent of the order of engines

    def try_flip(self, engine: EngineRecord, old: int, new: int) -> bool:
        """Let the engine evict `old` and load `new`, if its requests have room elsewhere and it pays off."""
        state = self._state
        if self.num_left <= 0 or not _can_flip(state, engine, old, new):
            return False
        num_requests = engine.rows_by_version[old]
        rows_elsewhere = self._free_rows[old] - _receivable_rows(state, engine, old)
        kv_elsewhere = self._free_kv.get(old, 0.0) - _receivable_kv(state, engine, old)
        kv = engine.kv_usage_of(old) if "room" not in state.limits.ablations else 0.0
        if num_requests > rows_elsewhere or kv > max(0.0, kv_elsewhere):
            return False
        if num_requests and not _gains_by_flip(state, engine, old):
            return False
        if state.is_pinned(old) and len(state.holders[old]) == 1:
            return False
        self._free_rows[old], self._free_kv[old] = rows_elsewhere - num_requests, kv_elsewhere - kv
        self.num_left -= num_requests
        engine.evicting, engine.next_load = old, new
        state.mark_dirty(engine)
        return True


def _divide_engines(state: State, engines: list[EngineRecord], flips: _Flips) -> None:
    """Engines of one slot: flip whole engines until every version has its share.

    Engines of different speed count by their throughput, in units of the slowest.
    """
    if not engines:
        return
    units = _throughput_units(engines)
    current: Counter[int] = Counter()
    for engine in engines:
        current[engine.newest_version] += units[engine.id]
    requests = _requests_by_version(state)
    order = sorted(sort_by_deadline(state, requests), key=state.is_evaluation_only)
    divide = apportion_by_rounding if "remainders" in state.limits.ablations else apportion
    target = divide(requests, sum(units.values()), order)
    for version in order:
        is_newest = version == state.newest_published
        num_missing_rows = state.num_waiting(version) - _rows_for_waiting(state, version)
        for engine in engines:
            unit, old = units[engine.id], engine.newest_version
            has_rows = num_missing_rows <= 0 and not is_newest  # more engines would be idle
            if current[version] >= target[version] or has_rows or flips.num_left <= 0:
                break
            is_below = current[version] + unit / 2 <= target[version]
            is_surplus = old != version and current[old] - unit / 2 >= target.get(old, 0)
            if is_below and is_surplus and flips.try_flip(engine, old, version):
                current[old] -= unit
                current[version] += unit
                num_missing_rows -= engine.num_rows


def _rows_for_waiting(state: State, version: int) -> int:
    """Rows that waiting requests of `version` will get on engines that hold it or are about to load it."""
    if version not in state.waiting:
        return 0
    engines = (e for e in state.engines.values() if e.is_active)
    return sum(e.num_rows for e in engines if version in (e.loading, e.next_load, *e.loaded))


def _requests_by_version(state: State) -> dict[int, int]:
    """R[w]: unfinished requests by version, plus what the bound still admits at the newest."""
    newest = state.newest_published
    assert newest is not None, "repartition runs only after the first publication"
    requests = {v: num for v, num in state.num_unfinished.items() if v in state.stored_versions}
    for version in [v for v in requests if state.is_evaluation_only(v) and v not in state.holders]:
        del requests[version]  # weight_sync.load_for_evaluation finds an engine
    num_rows = sum(e.num_rows for e in state.engines.values() if not e.is_draining)
    supplement = cached_num_admissible(state, newest) * state.limits.group_size
    free_rows = max(0, num_rows - sum(requests.values()))
    requests[newest] = requests.get(newest, 0) + min(supplement, free_rows)
    return requests


def _throughput_units(engines: list[EngineRecord]) -> dict[int, int]:
    """Throughput of each engine in units of the slowest; an unmeasured engine counts as average."""
    rates = [e.row_tokens_per_s for e in engines if e.row_tokens_per_s > 0]
    average = sum(rates) / len(rates) if rates else 1.0
    throughput = {e.id: e.num_rows * (e.row_tokens_per_s or average) for e in engines}
    slowest = min(throughput.values())
    return {engine: round(tokens_per_s / slowest) for engine, tokens_per_s in throughput.items()}


def _can_flip(state: State, engine: EngineRecord, old: int, new: int) -> bool:
    if engine.loading is not None or engine.next_load is not None:
        return False
    if not engine.is_active or engine.incoming or old not in engine.loaded:
        return False
    if new != state.newest_published or state.is_newest_needed:
        return True
    limits = state.limits
    is_skipped = engine.skipped_version == new or new - engine.newest_version < limits.weight_sync_interval
    return limits.batches_per_version is None and not is_skipped


def _gains_by_flip(state: State, engine: EngineRecord, old: int) -> bool:
    """Compare rows that stay empty until the last request of `old` finishes with migrations and the load."""
    rate, num_requests = engine.row_tokens_per_s, engine.rows_by_version[old]
    gain = (engine.num_rows - num_requests) * predict_remaining_steps(state, engine, old)
    cost = state.costs.migration_cost(num_requests, engine.kv_tokens[old], rate)
    return gain > cost + state.costs.load_cost(engine.num_rows, rate)


def _receivable_rows(state: State, engine: EngineRecord, version: int) -> int:
    return engine.free_rows if state.can_receive(engine, version) else 0


def _receivable_kv(state: State, engine: EngineRecord, version: int) -> float:
    """KV up to the watermark; 0 without free rows, as such engines are not in `available_engines`."""
    has_rows = _receivable_rows(state, engine, version) > 0
    return state.limits.kv_watermark - engine.kv_usage if has_rows else 0.0


def _place_siblings(state: State, engine: EngineRecord, version: int) -> list[RequestId]:
    """Place siblings of the first waiting group, as many as the engine has places for."""
    queue = state.waiting[version]
    group = next(iter(queue)).group
    placed: list[RequestId] = []
    while queue and engine.free_places > 0 and (request := next(iter(queue))).group == group:
        del queue[request]
        state.assign(request, engine, version)
        placed.append(request)
    if not queue:
        state.remove_queue(version)
    state.mark_dirty(engine)
    return placed
